"""Reads the YAML files that people write: a mapping whose keys are known and stand there once.

    read_mapping(Path("scripts/recipes/tiny-gpt.yaml"), ("base", "flags"), "no such recipe")

PyYAML keeps the last of two equal keys without a word; here they are an error with both lines, in nested mappings too.
Keys that differ for YAML and are one flag (`1` and `"1"`) count as equal.

What always holds: what cannot be read is a LaunchError of one line that names the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.run_control.errors import LaunchError


class _DuplicateKeyError(yaml.YAMLError):
    """A key that stands twice in one mapping."""


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without duplicate keys."""

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
