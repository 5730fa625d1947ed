"""How deep a grammar nests, found without recursion, before a library that recurses sees it."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

from worker.grammars.errors import GrammarError

MAX_DEPTH = 256
"""Levels of a schema, counting through `$ref`, and of Lark rules that use each other. The library takes up to 10 kB of
native stack for each. What people write has some tens."""
_LARK_WORD = re.compile(
    r"""
    "(?:[^"\\\n]|\\.)*" | /(?:[^/\\\n]|\\.)+/                  # a text, a regular expression
    | (?://|\#)[^\n]*                                          # a comment
    | \n[ \t]*[?!]*(?P<rule>[A-Za-z_]\w*)[^\n:|"/]*:           # the beginning of a rule
    | [A-Za-z_]\w*
    """,
    re.VERBOSE,
)

N = TypeVar("N", bound=Hashable)


def check_schema_depth(schema: Any) -> None:
    """Raises GrammarError."""
    nodes: dict[int, Any] = {id(schema): schema}

    def below(key: int) -> Iterator[int]:
        for child in _below(nodes[key], schema):
            if isinstance(child, dict | list):
                nodes[id(child)] = child
                yield id(child)

    if isinstance(schema, dict | list):
        _check([id(schema)], below, "levels, counted through $ref")


def _below(node: Any, schema: Any) -> Iterator[Any]:
    if isinstance(node, list):
        yield from node
        return
    yield from node.values()
    if isinstance(reference := node.get("$ref"), str):
        yield _target(schema, reference)


def _target(schema: Any, reference: str) -> Any:
    """What a JSON pointer into `schema` points to; None if it is of another kind, or points nowhere."""
    node = schema if reference.startswith("#") else None
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def check_lark_depth(text: str) -> None:
    """Raises GrammarError. What nests inside of a rule is bounded by the library."""
    rules: dict[str, set[str]] = {}
    current: set[str] = set()
    for word in _LARK_WORD.finditer("\n" + text):
        if rule := word["rule"]:
            current = rules.setdefault(rule, set())
        else:
            current.add(word[0])
    _check(rules, lambda rule: (used for used in rules[rule] if used in rules), "rules that use each other")


def _check(starts: Iterable[N], below: Callable[[N], Iterator[N]], words: str) -> None:
    """Depth first. Each node is entered once, as by the library: a way back into what is being walked adds nothing."""
    heights: dict[N, int] = {}
    for start in starts:
        if start in heights:
            continue
        path = [(start, below(start))]
        open_heights = {start: 1}
        while path:
            node, rest = path[-1]
            child = next((child for child in rest if child not in open_heights), None)
            if child is None:
                path.pop()
                height = heights[node] = open_heights.pop(node)
                if path:
                    open_heights[path[-1][0]] = max(open_heights[path[-1][0]], height + 1)
            elif child in heights:
                open_heights[node] = max(open_heights[node], heights[child] + 1)
            else:
                path.append((child, below(child)))
                open_heights[child] = 1
            if len(path) > MAX_DEPTH or max(open_heights.get(node, 0), heights.get(node, 0)) > MAX_DEPTH:
                raise GrammarError(f"it is nested too deeply: at most {MAX_DEPTH} {words}")
