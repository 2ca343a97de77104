"""Whether two checkpoints compute the same: both are loaded, see the same tokens, and their logits are compared.

    difference = compare(Path("runs/mine/checkpoints"), Path("runs/wide/checkpoints"))
    difference.largest_relative

The models are built from the arguments that each checkpoint stores, by the same code that text generation uses. A plain
checkpoint of several ranks is put together first, in a temporary folder beside it.

What always holds: one process, no GPU and no Transformer Engine are needed; logits are compared in float64, relative
to the largest logit of the source.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.training.checkpoints.companions import weight_flaw_of
from megatron.training.checkpoints.conversion import execute
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import locate, open_reader
from megatron.training.checkpoints.reshard import plan_reshard

_TOKENS, _SEED = 64, 20
"""Tokens of the sequence that both models see, and the seed that draws it."""


@dataclass(frozen=True)
class Difference:
    """The largest differences between logits of [tokens, vocabulary]."""

    largest_absolute: float
    largest_relative: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"logits of {self.tokens} tokens differ by at most {self.largest_absolute:.3g}, relative to the largest "
            f"logit {self.largest_relative:.3g}"
        )


@contextmanager
def _one_process(load: Path, step: int | None) -> Iterator[tuple[Path, int | None]]:
    """Yield a checkpoint that one process can load: this one, or a temporary copy of a plain one of several ranks."""
    location = locate(load, step)
    with open_reader(load, step, flaw_in=weight_flaw_of) as reader:
        whole = location.format == "torch_dist" or Layout.of(reader.common.args) == Layout()
        if whole:
            yield load, step
            return
        with tempfile.TemporaryDirectory(dir=load.resolve().parent, prefix=".verify-") as folder:
            target = Path(folder) / "whole"
            execute(plan_reshard(reader, Layout(), "torch_dist", keep_optimizer=False), reader, target, progress=False)
            yield target, None


def logits_of(load: Path, step: int | None = None, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits [tokens, vocabulary] (float64, without padding rows) and the tokens that were seen.

    Raises:
        ConversionError: the checkpoint cannot be built or loaded here.
    """
    from megatron.core.utils import unwrap_model

    from megatron.cpu.host import training_host
    from megatron.training.generation.checkpoint_location import find_checkpoint
    from megatron.training.generation.checkpoint_model import open_checkpoint
    from megatron.training.generation.errors import GenerationError

    try:
        with (
            _one_process(load, step) as (folder, at),
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            training_host() as host,
            open_checkpoint(find_checkpoint(str(folder), at), host) as loaded,
            torch.no_grad(),
        ):
            vocabulary = loaded.tokenizer.vocab_size
            if tokens is None:
                count = min(_TOKENS, loaded.context_length)
                tokens = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(_SEED))
            model = unwrap_model(loaded.model)
            device = next(model.parameters()).device
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
            mask = torch.triu(torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool), 1)[None, None]
            logits = model(tokens.to(device), positions.to(device), mask.to(device))
            return logits[0, :, :vocabulary].double().cpu(), tokens
    except GenerationError as error:
        raise ConversionError(f"verification: {error}") from error


def compare(source: Path, result: Path, step: int | None = None) -> Difference:
    """Return by how much the logits of the result differ from the source's; `step` is the source's."""
    wanted, tokens = logits_of(source, step)
    found, _ = logits_of(result, None, tokens)
    if wanted.shape != found.shape:
        raise ConversionError(f"the source has logits {list(wanted.shape)}, the result {list(found.shape)}")
    difference = (wanted - found).abs().max()
    if not torch.isfinite(difference):
        raise ConversionError("logits are not finite: the checkpoint's run had diverged, or it is damaged")
    return Difference(float(difference), float(difference / wanted.abs().max().clamp_min(1e-30)), tokens.shape[1])
