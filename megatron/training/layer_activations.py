"""Activation bytes that a model's layers keep for the backward, from real layers: measured here, or extrapolated.

    with lone_rank(args):                                              # process groups of one rank of the layout
        fit = fit_layers(args, "dense")                                # two short stacks of the ordinary model
        fit.layer(args.seq_length)                                     # bytes of one layer of that kind
        measure_stack(args, ["dense"] * 12, num_streams=4, block_size=2)      # what a whole stack really holds

A layer's bytes are a quadratic in the sequence length (linear but for attention scores and masks), so stacks of one and
two layers at three short lengths give it exactly. The second layer's share is that of a layer; what one layer has more
is what layers share (the attention mask, rotary angles). A Mamba layer on PyTorch's operators keeps one state for every
so many tokens: its lengths are that far apart from each other and from the asked one. Kinds: layer_kinds.py.

What always holds: real layers of the asked widths under the asked flags, on one rank of a tensor-parallel group. The
collectives of that group are PyTorch's fake ones, which leave tensors as they are: values mean nothing, sizes do.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.core import parallel_state
from megatron.core.ssm.torch_mamba_operators import use_torch_mamba_operators
from megatron.core.ssm.torch_mamba_scan import tokens_per_kept_state
from megatron.core.transformer.wide_residual_config import RESIDUAL_STREAM_MODULE
from megatron.cpu.replacements import Replacements
from megatron.training.earlier_experts import set_aside_earlier_experts
from megatron.training.held_memory import HeldForBackward
from megatron.training.hybrid_builders import hybrid_model_config_from_args
from megatron.training.layer_kinds import MOE, is_hybrid, is_pair, layers_in
from megatron.training.wide_residual_arguments import WIDE_RESIDUAL_ARGUMENTS
from megatron.training.wide_residual_builders import gpt_model_config_from_args

_VOCABULARY = 128  # of the output layer, which is built and not run
_SHORTEST_SEQUENCE = 32


@contextmanager
def lone_rank(args: Namespace) -> Iterator[None]:
    """Process groups as the first rank of a tensor-parallel group sees them, without the other ranks; and what the
    layers need on the CPU host."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = args.tensor_model_parallel_size
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        parallel_state.initialize_model_parallel(size)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        with Replacements() as replaced:
            if is_hybrid(args):
                use_torch_mamba_operators(replaced, "cpu")
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def stack_arguments(
    args: Namespace, kinds: Sequence[str], num_streams: int | None, block_size: int | None
) -> Namespace:
    """Return the arguments of a model of layers of these kinds on one pipeline stage; replay with a block_size."""
    modules = [module for module in args.recompute_modules or () if module != RESIDUAL_STREAM_MODULE]
    granularity = args.recompute_granularity
    if block_size is not None:
        # Without a granularity Megatron ignores the modules; "selective" without modules would mean core_attn.
        modules = [*(modules if granularity == "selective" else ()), RESIDUAL_STREAM_MODULE]
        granularity = "selective"
    changed: dict[str, Any] = {
        "num_layers": sum(map(layers_in, kinds)),
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "expert_model_parallel_size": 1,
        "recompute_modules": modules if args.recompute_modules is not None or block_size is not None else None,
        "recompute_granularity": granularity,
        "residual_stream_recompute_num_layers": block_size,
        "padded_vocab_size": _VOCABULARY * args.tensor_model_parallel_size,
    }
    if args.num_experts is not None:
        changed["num_experts"] = args.num_experts // args.expert_model_parallel_size
    if is_hybrid(args):
        changed["hybrid_layer_pattern"] = "".join(kinds)
        changed["moe_shortcut_connection"] = any(map(is_pair, kinds))  # it wants a pair
        changed["moe_shortcut_parallel"] = False
    elif args.num_experts is not None:
        changed["moe_layer_freq"] = [int(kind == MOE) for kind in kinds]
    if num_streams is None:
        changed |= dict.fromkeys(WIDE_RESIDUAL_ARGUMENTS)
    return Namespace(**{**vars(args), **changed})


def build_stack(
    args: Namespace, kinds: Sequence[str], *, num_streams: int | None, block_size: int | None, head: bool
) -> Any:
    """Build a pipeline stage without embedding and loss: layers, and with head the final norm (and the readout)."""
    config_from_args = hybrid_model_config_from_args if is_hybrid(args) else gpt_model_config_from_args
    config: Any = config_from_args(stack_arguments(args, kinds, num_streams, block_size))
    config.should_pad_vocab = False
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(groups, pre_process=False, post_process=head)
    model.post_process = False  # the output layer is outside of what is counted
    return model.to(config.transformer.params_dtype).train()


@dataclass(frozen=True)
class HeldBytes:
    """Bytes held for the backward of one micro-batch: after the forward, and the most at any moment."""

    kept: int
    most: int


def hold(model: Any, args: Namespace, seq_length: int, num_streams: int | None, *, backward: bool) -> HeldBytes:
    """Run one micro-batch through a stage, and its backward too if asked; count what is held."""
    batch = args.micro_batch_size
    local_length = seq_length // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    dtype = torch.float32 if args.fp32_residual_connection else args.params_dtype
    device = torch.cuda.current_device()
    x = torch.randn(local_length, batch, args.hidden_size * (num_streams or 1), device=device).to(dtype)
    mask = torch.ones(batch, 1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)
    model.set_input_tensor(x.requires_grad_())
    with Replacements() as replaced, HeldForBackward(model.parameters()) as held:
        set_aside_earlier_experts(replaced)
        output = model(None, None, mask)
        kept = held.now()
        if backward:
            output.float().sum().backward()
    return HeldBytes(kept, held.most)


def measure_stack(
    args: Namespace,
    kinds: Sequence[str],
    *,
    num_streams: int | None = None,
    block_size: int | None = None,
    head: bool = False,
) -> HeldBytes:
    """Build a stage on this host, run a forward and a backward of one micro-batch, and count what autograd holds."""
    model = build_stack(args, kinds, num_streams=num_streams, block_size=block_size, head=head)
    return hold(model, args, args.seq_length, num_streams, backward=True)


@dataclass(frozen=True)
class LayerFit:
    """Bytes of one micro-batch at the sequence lengths `lengths`: of a stack of one layer, and of one of two."""

    lengths: tuple[int, ...]
    one: tuple[int, ...]
    two: tuple[int, ...]

    def layer(self, seq_length: int) -> int:
        """Bytes of one layer."""
        return self._at(seq_length, [two - one for one, two in zip(self.one, self.two, strict=True)])

    def shared(self, seq_length: int) -> int:
        """Bytes that the layers of a stage share."""
        return self._at(seq_length, [2 * one - two for one, two in zip(self.one, self.two, strict=True)])

    def _at(self, seq_length: int, values: Sequence[int]) -> int:
        """Value of the polynomial through (lengths, values)."""
        total = Fraction(0)
        for length, value in zip(self.lengths, values, strict=True):
            term = Fraction(value)
            for other in self.lengths:
                if other != length:
                    term *= Fraction(seq_length - other, length - other)
            total += term
        return round(total)


def _fit_lengths(args: Namespace, model: Any) -> tuple[int, int, int]:
    """Three short sequence lengths through which a layer's bytes at args.seq_length can be told."""
    shortest = max(_SHORTEST_SEQUENCE, 4 * (args.num_experts or 0)) * args.tensor_model_parallel_size
    device = torch.empty(0, device=torch.cuda.current_device()).device.type
    period = lcm(
        *(
            tokens_per_kept_state(args.micro_batch_size, module.nheads_local_tp, device)
            for module in model.modules()
            if isinstance(module, MambaMixer)
        )
    )
    step = -(-shortest // period) * period
    first = args.seq_length % period
    if first < shortest:
        first += step
    return first, first + step, first + 2 * step


def fit_layers(args: Namespace, kind: str) -> LayerFit:
    """Fit the bytes of the ordinary model's layers of a kind, to be asked at args.seq_length.

    With an fp32 residual stream: those of its branches' dtype, since PyTorch's norms refuse an fp32 stream beside
    weights of 16 bits.
    """
    narrow = Namespace(**{**vars(args), "fp32_residual_connection": False})
    lengths: tuple[int, ...] = ()
    counts = []
    for number in (1, 2):
        model = build_stack(narrow, [kind] * number, num_streams=None, block_size=None, head=False)
        lengths = lengths or _fit_lengths(args, model)
        counts.append(tuple(hold(model, narrow, length, None, backward=False).kept for length in lengths))
    return LayerFit(lengths, *counts)
