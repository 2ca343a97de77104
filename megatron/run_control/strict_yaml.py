"""Reads the YAML files that people write: a mapping whose keys are known and stand there once.

    read_mapping(Path("scripts/recipes/tiny-gpt.yaml"), ("base", "flags"), "no such recipe")

PyYAML keeps the last of two equal keys without a word; here they are an error with both lines, in nested mappings too.
Keys that differ for YAML and are one flag (`1` and `"1"`) count as equal. Words that YAML 1.1 takes for something else
than they look like (`010`, `1:30`, `1_000`, `no`) are an error with the line.

What always holds: what cannot be read is a LaunchError of one line that names the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.run_control.errors import LaunchError


class _DuplicateKeyError(yaml.YAMLError):
    """A key that stands twice in one mapping."""


class _DisguiseError(yaml.YAMLError):
    """A word that YAML 1.1 takes for something else than it looks like."""


_PLAIN_NUMBER = re.compile(
    r"[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+|[0-9]*\.[0-9]*([eE][-+]?[0-9]+)?|\.inf|\.nan)", re.IGNORECASE
)


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without duplicate keys and disguises: 010 for 8, 1:30 for 90, 1_000, no for false."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping; looked at here, before `<<` lays another mapping below its keys."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            merge = key.tag == "tag:yaml.org,2002:merge"  # <<
            name, line = key.value if merge else str(self.construct_object(key)), key.start_mark.line + 1
            if name in lines:
                raise _DuplicateKeyError(f"key {name!r} stands in line {lines[name]} and in line {line}: keep one")
            lines[name] = line
        return node


def _as_it_looks(construct: Callable[[Any, Any], Any], looks: Callable[[str], bool]) -> Callable[[Any, Any], Any]:
    """A constructor that refuses words which do not look like what they are."""

    def checked(loader: Any, node: Any) -> Any:
        value = construct(loader, node)
        if not looks(str(node.value)):
            raise _DisguiseError(
                f"{node.value} in line {node.start_mark.line + 1} is {value!r} for YAML: write that, or quote the word"
            )
        return value

    return checked


for _kind, _looks in (
    ("int", lambda word: _PLAIN_NUMBER.fullmatch(word) is not None),
    ("float", lambda word: _PLAIN_NUMBER.fullmatch(word) is not None),
    ("bool", lambda word: word.lower() in ("true", "false")),
):
    _tag = f"tag:yaml.org,2002:{_kind}"
    _StrictLoader.add_constructor(_tag, _as_it_looks(yaml.SafeLoader.yaml_constructors[_tag], _looks))


def read_mapping(file: Path, keys: Sequence[str], absent: str) -> dict:
    """Read a mapping with some of these keys. Raises LaunchError; `absent` is what it says where there is no file."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _StrictLoader)
    except FileNotFoundError:
        raise LaunchError(f"{file}: {absent}") from None
    except OSError as error:
        raise LaunchError(f"{file}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise LaunchError(f"{file}: cannot be read as YAML: its brackets are nested too deep") from None
    except (ValueError, LookupError, AttributeError, TypeError, yaml.YAMLError) as error:  # PyYAML's, of !!int '' etc.
        raise LaunchError(f"{file}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise LaunchError(f"{file}: a mapping with {', '.join(keys)} is wanted, {type(content).__name__} was found")
    for key in content:
        if key not in keys:
            raise LaunchError(f"{file}: {key!r} is none of {', '.join(keys)}; flags of the script go below flags:")
    return content
