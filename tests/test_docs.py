"""What the pages for people name is there."""

import re
from pathlib import Path

import pytest
from google.protobuf.json_format import Parse

from bench.cpu_table import with_table
from fissile import v1

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench/README.md"]
NO_FILES = ("bench/NAME.py", "fissile/_services/")
"""A pattern, and what is only in a wheel."""
FOLDERS = "(?:bench|common|deploy|docs|fissile|protos|router|tests|worker)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_speeds_are_those_of_the_last_sitting():
    readme = (ROOT / "README.md").read_text()
    assert readme == with_table(readme), "run: python -m bench.cpu_table"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_folders_exist(page):
    """A path is in backquotes and begins with a folder of ours."""
    paths = re.findall(rf"`({FOLDERS}/[\w./-]*)`", page.read_text())
    assert [path for path in paths if path not in NO_FILES and not (ROOT / path).exists()] == []


def test_each_benchmark_has_its_keys_explained():
    scripts = {path.stem.replace("_", "-") for path in (ROOT / "bench").glob("*.py") if "finish(" in path.read_text()}
    explained = set(re.findall(r"^## ([\w-]+)", (ROOT / "bench/README.md").read_text(), re.MULTILINE))
    assert explained == scripts - {"common"}


def test_examples_of_grpcurl_are_requests():
    """Names of enums and fields are those of the contract."""
    calls = re.findall(r"grpcurl [^']*-d '([^']+)'.*\n.*GenerationService/(\w+)", (ROOT / "README.md").read_text())
    assert {method for _, method in calls} == {"Generate", "Chat"}
    kinds = {"Generate": v1.GenerateRequest, "Chat": v1.ChatRequest}
    for text, method in calls:
        request = Parse(text, kinds[method]())
        assert method == "Generate" or request.messages[0].role == v1.CHAT_ROLE_USER
