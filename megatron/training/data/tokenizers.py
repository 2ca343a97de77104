"""The tokenizers of preprocessing and training, one builder for both, so that they can never differ.

    tokenizer = build_tokenizer(args)         # args: a namespace with megatron's tokenizer flags
    encode_texts(tokenizer, ["one", "two"])   # lists of ids, the same as [tokenizer.tokenize(t) for t in texts]

Everything is megatron.core.tokenizers, by the type names of `--tokenizer-type`. What is added here is thin:
- GPT2BPETokenizer: upstream fetches "gpt2" from the Hugging Face hub even when it is given --vocab-file and
  --merge-file; here the two files are enough and no network is used.
- HuggingFaceTokenizer: --tokenizer-model may also be a tokenizer.json file (upstream takes a folder or a hub name).
- ByteLevelTokenizer: upstream has the library but no type name for it. Here ids 0-255 are the bytes, 256 pads and
  257 ends a document (upstream's default puts the end of a document on byte 0).

In training the same builder is reached through megatron/patches/offline_tokenizers.py.

What always holds: the identity that goes into the index cache (`unique_identifiers`) names the user's files, never a
temporary folder, so it is the same on every rank and in every run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training.data.errors import DataError

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)
_MODEL_TYPES = TOKENIZER_TYPES[:5]  # those that are one file or folder: --tokenizer-model

# A bare tokenizer.json does not say which token ends a document. These are the usual names, looked for in this order.
_USUAL_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

_BYTE_LEVEL_ARGUMENTS = {"special_tokens": ["<eod>", "<pad>"], "vocab_size": 256, "_eos_id": 257, "_pad_id": 256}


def with_tokenizer_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of `args` in which every tokenizer flag that it lacks has Megatron's default."""
    from megatron.training.config import TokenizerConfig

    defaults = {field.name: field.default for field in dataclasses.fields(TokenizerConfig)}
    # preprocessing knows no model, so there is no vocabulary to pad
    parallel = {"pad_vocab_size": False, "rank": 0, "sft_tokenizer_prompt_format": None}
    return argparse.Namespace(**{**defaults, **parallel, **vars(args)})


def build_tokenizer(args: argparse.Namespace, **kwargs: Any) -> Any:
    """Build the tokenizer that Megatron's flags in `args` describe, and set `args.padded_vocab_size` as upstream does.

    Raises DataError when a file is missing or cannot be loaded.
    """
    _check_flags(args)
    try:
        if args.tokenizer_type == "GPT2BPETokenizer":
            return _padded(args, _build_gpt2_bpe(args))
        if args.tokenizer_type == "HuggingFaceTokenizer" and os.path.isfile(args.tokenizer_model):
            return _padded(args, _build_from_tokenizer_json(args))
        if args.tokenizer_type == "ByteLevelTokenizer":
            return _padded(args, _build_byte_level())
        return _upstream_build(args, **kwargs)
    except Exception as error:  # the libraries raise every kind of exception, bare AssertionErrors too
        source = args.tokenizer_model or args.vocab_file or "no file"
        raise DataError(
            f"--tokenizer-type {args.tokenizer_type} cannot be loaded from {source}: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        ) from error


def _check_flags(args: argparse.Namespace) -> None:
    kind, model = args.tokenizer_type, args.tokenizer_model
    if kind in _MODEL_TYPES and not model:
        raise DataError(f"--tokenizer-type {kind} needs --tokenizer-model (a file or folder).")
    # A hub name is "name" or "owner/name"; anything else that is not there is a mistyped path, not worth a download.
    could_be_hub_name = (
        kind == "HuggingFaceTokenizer" and not model.startswith((".", "/", "~")) and model.count("/") < 2
    )
    if kind in _MODEL_TYPES and not os.path.exists(model) and not could_be_hub_name:
        raise DataError(f"--tokenizer-model {model}: no such file or folder.")
    if kind == "GPT2BPETokenizer" and not (args.vocab_file and args.merge_file):
        raise DataError("--tokenizer-type GPT2BPETokenizer needs both --vocab-file and --merge-file.")
    for flag, path in (("--vocab-file", args.vocab_file), ("--merge-file", args.merge_file)):
        if kind == "GPT2BPETokenizer" and path and not os.path.isfile(path):
            raise DataError(f"{flag} {path}: no such file.")
    if kind == "NullTokenizer" and not args.vocab_size:
        raise DataError(
            "--tokenizer-type NullTokenizer needs --vocab-size (ids are 0 to N-1, the last ends documents)."
        )


def _upstream_build(args: argparse.Namespace, **kwargs: Any) -> Any:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as upstream_build_tokenizer

    return upstream_build_tokenizer(args, **kwargs)


def _padded(args: argparse.Namespace, tokenizer: Any) -> Any:
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    if args.pad_vocab_size and getattr(args, "padded_vocab_size", None) is None:
        args.padded_vocab_size = vocab_size_with_padding(tokenizer.vocab_size, args)
    return tokenizer


def _build_byte_level() -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"}, **_BYTE_LEVEL_ARGUMENTS)


def _build_gpt2_bpe(args: argparse.Namespace) -> Any:
    links = {"vocab.json": args.vocab_file, "merges.txt": args.merge_file}
    tokenizer = _build_from_folder(args, links, {"tokenizer_class": "GPT2Tokenizer"})
    tokenizer.path = args.tokenizer_type
    tokenizer.additional_args |= {"vocab_file": args.vocab_file, "merges_file": args.merge_file}
    return tokenizer


def _build_from_tokenizer_json(args: argparse.Namespace) -> Any:
    path = Path(args.tokenizer_model)
    config_path = path.with_name("tokenizer_config.json")
    if config_path.is_file():
        config = json.loads(config_path.read_text(encoding="utf-8"))
    else:
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])
        special = {token["content"] for token in added if token.get("special")}
        end = next((token for token in _USUAL_END_TOKENS if token in special), None)
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": end} if end else {})
    tokenizer = _build_from_folder(args, {"tokenizer.json": str(path)}, config)
    tokenizer.path = args.tokenizer_model
    return tokenizer


def _build_from_folder(args: argparse.Namespace, links: dict[str, str], config: dict[str, Any]) -> Any:
    """Build upstream's HuggingFaceTokenizer from files that are not where and how AutoTokenizer wants them."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        for name, target in links.items():
            os.symlink(os.path.abspath(target), os.path.join(folder, name))
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        replaced = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder, "pad_vocab_size": False}
        local = argparse.Namespace(**{**vars(args), **replaced, "vocab_file": None, "merge_file": None})
        return _upstream_build(local)


def end_of_document(tokenizer: Any) -> int | None:
    """Return the id that ends a document, or None when the tokenizer has none."""
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        return None
    return None if eod is None or eod < 0 else int(eod)  # SentencePiece says -1 for "none"


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of every text, as `tokenizer.tokenize` gives them, in one call where the library has one."""
    library: Any = getattr(tokenizer, "_tokenizer", None)
    hf_tokenizer = getattr(library, "tokenizer", None)
    if hf_tokenizer is not None and getattr(hf_tokenizer, "is_fast", False):
        return hf_tokenizer(
            list(texts),
            add_special_tokens=library.include_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning that a document is longer than some model's context
        ).input_ids
    return [tokenizer.tokenize(text) for text in texts]
