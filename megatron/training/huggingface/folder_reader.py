"""A Hugging Face folder, read tensor by tensor: config.json and safetensors, in one file or in shards with an index.

    with HfFolder.open("llama-2-7b") as folder:
        folder.config                                   # config.json, parsed
        folder.entries["lm_head.weight"].shape          # known without reading
        folder.tensor("lm_head.weight")                 # read now, nothing kept

What always holds: nothing is written; the index and the shards name the same tensors; a folder that is damaged or not
whole is a HuggingFaceError that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.training.huggingface.errors import HuggingFaceError

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a tokenizer


DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of the dtypes that are read."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is and what it looks like; dtype as safetensors writes it ("F32", "BF16"), offset in the file."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HuggingFaceError(f"{file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise HuggingFaceError(f"{file} is no JSON: {error}.") from error


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return config.json of a folder.

    Raises:
        HuggingFaceError: no such folder or file, no JSON object.
    """
    if not folder.is_dir():
        raise HuggingFaceError(f"{folder}: no such folder. A folder with {CONFIG} and safetensors is wanted.")
    if not (folder / CONFIG).is_file():
        raise HuggingFaceError(f"{folder} has no {CONFIG}: a Hugging Face folder is wanted.")
    config = _read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise HuggingFaceError(f"{folder / CONFIG} holds a {type(config).__name__}; an object is wanted.")
    return config


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer that `--tokenizer-type HuggingFaceTokenizer` can take."""
    return any((folder / name).is_file() for name in _TOKENIZERS)


@dataclass
class HfFolder:
    """An open folder. `entries` has every tensor of every file."""

    path: Path
    config: dict[str, Any]
    entries: dict[str, Entry]
    _files: Mapping[str, BinaryIO] = field(repr=False)

    @classmethod
    @contextmanager
    def open(cls, path: str | Path) -> Iterator[HfFolder]:
        """Open a folder, whose files are closed on exit.

        Raises:
            HuggingFaceError: no folder, a file that is missing or damaged, an index that does not fit.
        """
        path = Path(path)
        config = read_config_json(path)
        entries: dict[str, Entry] = {}
        with ExitStack() as stack:
            files = {}
            for name in _shard_names(path):
                found = _entries(path, name)
                if twice := set(entries) & set(found):
                    raise HuggingFaceError(f"{path}: {min(twice)} is in more than one file.")
                entries |= found
                files[name] = stack.enter_context((path / name).open("rb", buffering=0))
            _check_index(path, entries)
            yield cls(path, config, entries, files)

    def tensor(self, name: str, rows: int | None = None) -> Tensor:
        """Read one tensor, with zero rows after it up to `rows`: no second copy is made for them.

        safetensors' own reader maps the file, whose pages then count as this process's memory until the file is closed.

        Raises:
            HuggingFaceError: the file ends too early.
        """
        entry = self.entries[name]
        shape = list(entry.shape)
        if rows is not None:
            shape[0] = rows
        whole = torch.zeros(shape, dtype=DTYPES[entry.dtype])
        count = torch.Size(entry.shape).numel() * whole.itemsize
        buffer = memoryview(whole.reshape(-1).view(torch.uint8).numpy())[:count]
        file = self._files[entry.file]
        file.seek(entry.offset)
        done = 0
        while done < count:
            read = file.readinto(buffer[done:])  # type: ignore[attr-defined]
            if not read:
                raise HuggingFaceError(f"{self.path / entry.file} ends in the middle of {name}.")
            done += read
        return whole


def _shard_names(path: Path) -> list[str]:
    if (path / INDEX).is_file():
        index = _read_json(path / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise HuggingFaceError(f"{path / INDEX} has no weight_map.")
        return sorted(set(index["weight_map"].values()))
    if (path / SINGLE).is_file():
        return [SINGLE]
    if any(path.glob("*.bin")):
        raise HuggingFaceError(
            f"{path} holds pickled weights (*.bin); safetensors are wanted. transformers writes them: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)."
        )
    raise HuggingFaceError(f"{path} has neither {SINGLE} nor {INDEX}.")


def _entries(path: Path, file: str) -> dict[str, Entry]:
    """Return the tensors of a file, which safetensors has checked."""
    from safetensors import SafetensorError, safe_open

    if not (path / file).is_file():
        raise HuggingFaceError(f"{path / file} is not there, but {INDEX} names it.")
    try:
        with safe_open(path / file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise HuggingFaceError(f"{path / file} cannot be read ({error}). Is it whole?") from error
    with (path / file).open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: Entry(file, tuple(tensor["shape"]), tensor["dtype"], 8 + length + tensor["data_offsets"][0])
        for name, tensor in header.items()
    }


def _check_index(path: Path, entries: dict[str, Entry]) -> None:
    """Raise unless the index, where there is one, says of every tensor the file that holds it."""
    if not (path / INDEX).is_file():
        return
    index = _read_json(path / INDEX)["weight_map"]
    for name in sorted(set(index) | set(entries)):
        stored = entries[name].file if name in entries else "no file"
        if index.get(name, "no file") != stored:
            raise HuggingFaceError(f"{path / INDEX} says {name} is in {index.get(name, 'no file')}; it is in {stored}.")
