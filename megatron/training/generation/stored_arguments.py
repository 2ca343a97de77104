"""The arguments that describe a checkpoint's model and tokenizer, taken over from those that the checkpoint stores.

    restore_model_arguments(args, stored, parser, host)

A checkpoint stores every argument of the run that wrote it. For sampling there is no command line that repeats those of
the model, so all of them (model_argument_names) are taken over; a training run compares and restores them in
resume/model_arguments.py.

What always holds: what concerns the run alone (layout, batch, recompute, kernels, precision of the gradients) is as the
command line and this machine's defaults say.
"""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from megatron.training.model_argument_names import model_argument_names


def _runnable_implementation(stored: Any, default: str) -> str:
    """Return the stored --transformer-impl where it can run here: it decides the names of a plain checkpoint's keys."""
    if stored == "local" or (stored == "transformer_engine" and importlib.util.find_spec("transformer_engine")):
        return stored
    return default


def stored_hybrid_pattern(stored: argparse.Namespace) -> str | None:
    """Return the layer pattern of a hybrid model, None for a GPT."""
    return getattr(stored, "hybrid_layer_pattern", None) or getattr(stored, "hybrid_override_pattern", None)


def _restore_pattern(args: argparse.Namespace, pattern: str) -> None:
    """Set the pattern without its pipeline cuts; upstream derives the numbers of layers from it."""
    args.hybrid_layer_pattern = pattern.replace("|", "")
    args.hybrid_override_pattern = args.num_layers = args.mtp_num_layers = None


def restore_model_arguments(
    args: argparse.Namespace, stored: argparse.Namespace, parser: argparse.ArgumentParser, host: str
) -> None:
    """Set the model's and the tokenizer's arguments of `args` to the stored ones; `host` is "cuda" or "cpu".

    An argument that the checkpoint does not know (it was written by an older version) keeps its default.
    """
    for name in model_argument_names(parser):
        if hasattr(stored, name):
            setattr(args, name, getattr(stored, name))
    pattern = stored_hybrid_pattern(stored)
    if pattern is not None:
        _restore_pattern(args, pattern)
    if host == "cuda":
        args.transformer_impl = _runnable_implementation(
            getattr(stored, "transformer_impl", None), args.transformer_impl
        )
        args.moe_grouped_gemm = getattr(stored, "moe_grouped_gemm", args.moe_grouped_gemm)
