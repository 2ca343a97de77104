"""Turns one raw record into its texts, or says precisely why it cannot: the thin layer of checks on the input.

    parse_record(b'{"text": "In the beginning"}', "jsonl", ["text"])  ->  {"text": "In the beginning"}
    parse_record(b'{"text": null}', "jsonl", ["text"])                ->  raises BadRecord("null text", ...)

Accepted: CRLF line ends (stripped), a JSON string of white space only, any valid UTF-8. Refused: a blank line, broken
JSON, JSON that is not an object, a missing key, null, a value that is not a string, an empty string, invalid UTF-8, a
lone surrogate (a \\ud800 escape stands for no character, so no tokenizer can encode it).

What always holds: all keys of a record are good, or the record is bad as a whole; the outputs of several keys stay
aligned document by document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.training.data.document_reader import RecordKind


class BadRecord(Exception):  # noqa: N818  (caught and counted, mostly no error)
    """A record that cannot become documents. `kind` is a short name to count by, `detail` the full reason."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def parse_record(payload: Any, kind: RecordKind, json_keys: Sequence[str]) -> dict[str, str]:
    """Return the text under every key; raise BadRecord with the reason otherwise. Plain text goes under the one key."""
    if kind == "text":
        (key,) = json_keys
        text = _decode(payload, "document").rstrip("\r\n")
        if not text.strip():
            raise BadRecord(
                "blank line", "the document is blank (blank lines may stand between paragraphs, see --help)"
            )
        return {key: text}
    fields = payload if kind == "parquet" else _parse_json(payload)
    return {key: _field_text(fields, key) for key in json_keys}


def _decode(raw: bytes, unit: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRecord(
            "invalid UTF-8", f"byte {error.start + 1} of the {unit} (0x{raw[error.start]:02x}) is not valid UTF-8"
        ) from None


def _parse_json(line: bytes) -> dict[str, Any]:
    text = _decode(line, "line")
    if not text.strip():
        raise BadRecord("blank line", "the line is blank, a JSON object is wanted")
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRecord(
            "broken JSON", f"not a complete JSON object on one line ({error.msg} at column {error.colno})"
        ) from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
        raise BadRecord("broken JSON", f"the JSON cannot be read ({error})") from None
    if not isinstance(fields, dict):
        raise BadRecord("not an object", f"holds a JSON {_json_type(fields)}, a JSON object is wanted")
    return fields


def _field_text(fields: dict[str, Any], key: str) -> str:
    if key not in fields:
        found = ", ".join(repr(name) for name in fields) or "none"
        raise BadRecord("missing key", f"has no key {key!r} (keys found: {found}); see --json-keys")
    value = fields[key]
    if value is None:
        raise BadRecord("null text", f"{key!r} is null, a string is wanted")
    if not isinstance(value, str):
        raise BadRecord("text is not a string", f"{key!r} is a {_json_type(value)}, a string is wanted")
    return _checked_text(value, repr(key))


def _checked_text(text: str, name: str) -> str:
    if not text:
        raise BadRecord("empty document", f"{name} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise BadRecord(
            "lone surrogate", f"{name} holds the lone surrogate \\u{code:04x}, which is no character"
        ) from None
    return text


def _json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
