"""What ours import is what they install, and the other way round."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = ("common", "fissile", "router", "worker")
NAMESPACES = {"google.protobuf": "protobuf", "google.rpc": "googleapis-common-protos"}
COMPANIONS = {"pydantic_core": "pydantic", "triton": "torch"}
"""Of one release with another package, which brings them."""
TYPES = "_typeshed"
"""For type checkers alone."""


def installed(*extras: str) -> set[str]:
    """The packages of the base install and these extras."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return {re.match(r"[\w-]+", requirement)[0].lower() for requirements in lists for requirement in requirements}


def imported(folder: str) -> Iterator[str]:
    """Modules by their full names."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module


@cache
def packages(folder: str) -> set[str]:
    """Others' packages that are imported there."""
    found = set()
    owners = packages_distributions()
    for module in set(imported(folder)):
        root = module.partition(".")[0]
        if root in (*OURS, TYPES) or root in sys.stdlib_module_names:
            continue
        inside = [package for prefix, package in NAMESPACES.items() if module.startswith(prefix)]
        found |= {*inside} or {COMPANIONS.get(root) or owners[root][0].lower().replace("_", "-")}
    return found


@pytest.mark.parametrize(
    ("folder", "extras"),
    [("fissile", ["tracing"]), ("common", ["tracing"]), ("router", ["http"]), ("worker", ["worker"])],
)
def test_what_is_imported_is_installed(folder, extras):
    names = {"opentelemetry-api" if name.startswith("opentelemetry") else name for name in packages(folder)}
    assert names - installed(*extras) == set()


def test_what_is_installed_is_imported():
    names = set().union(*(packages(folder) for folder in OURS))
    unused = installed("worker", "http", "tracing") - names
    assert {name for name in unused if not name.startswith("opentelemetry")} == set()
