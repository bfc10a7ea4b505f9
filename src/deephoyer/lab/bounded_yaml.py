"""YAML for recipes, read in bounded time and memory: whatever a file holds, it becomes plain values or one clear error.

1e-3 is a number, as people mean it, and a key that stands twice is an error. Aliases are allowed, but count as what
they stand for, so that a few lines can't become a billion.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

LONGEST = 256 * 1024
"""Characters in a text."""
DEEPEST = 24
"""Mappings and lists inside each other."""
MOST = 10_000
"""Values in all, aliases written out."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.YAMLError(f"the key {twice[0]!r} stands twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load(text: str) -> Any:
    """The value that a YAML text stands for; anything wrong with it is a `yaml.YAMLError`.

    >>> load("{lr: 1e-3}")
    {'lr': 0.001}
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"it has {len(text):,} characters; {LONGEST:,} are allowed")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _size(node, {}, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise yaml.YAMLError(f"it is nested more than {DEEPEST} deep") from None
    except (ValueError, OverflowError, TypeError, AttributeError, KeyError) as why:  # dates, !!int abc, …
        raise yaml.YAMLError(f"a value in it makes no sense ({str(why)[:100]})") from None


def explain(why: yaml.YAMLError) -> str:
    """What is wrong with a text, in a line, and in which one."""
    mark = getattr(why, "problem_mark", None)
    return f"{f'line {mark.line + 1}: ' if mark else ''}{getattr(why, 'problem', None) or why}"


def _size(node: yaml.Node, known: dict[int, tuple[int, int]], above: set[int]) -> tuple[int, int]:
    """How many values a node stands for and how deep it goes; refused where that is too much, or has no end."""
    if id(node) in above:
        raise yaml.YAMLError("an alias stands inside of what it stands for")
    if id(node) in known:
        return known[id(node)]
    count, depth = 1, 0
    if isinstance(node, yaml.CollectionNode):
        pairs = isinstance(node, yaml.MappingNode)
        inner = [part for pair in node.value for part in pair] if pairs else list(node.value)
        for part in inner:
            more, deep = _size(part, known, above | {id(node)})
            count, depth = count + more, max(depth, deep + 1)
    if count > MOST:
        raise yaml.YAMLError(f"it stands for more than {MOST:,} values")
    if depth > DEEPEST:
        raise yaml.YAMLError(f"it is nested more than {DEEPEST} deep")
    known[id(node)] = count, depth
    return known[id(node)]
