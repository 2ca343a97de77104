"""Floating-point operations of a training step: what upstream's count leaves out, and what wide streams add.

    apply_patches((PATCH,), replaced)                       # the trainer's throughput then counts a hybrid right
    stream_flops_per_token(num_streams=4, width=1024, branches=48, retention=False)

Upstream's `num_floating_point_operations` counts matrix products three times (forward, and two in the backward), causal
attention as half of the square. It was compared with the products that really run (tests/test_model_flops.py): a GPT,
dense or MoE, with multi-token prediction, is right but for the router; a hybrid lacks the projections of its prediction
depths, and its Mamba layers are counted as if their inner width were twice the model's whatever --mamba-num-heads and
--mamba-head-dim say. `left_out_flops` is exactly that. The Mamba-2 scan stays upstream's estimate of
7 * inner width * state size a token.

What always holds: FLOPs of reads and writes are reported for themselves and are no part of the throughput, so that
ordinary and wide models of one size are compared by the same work.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.patches import UpstreamPatch

_FORWARD_AND_BACKWARD = 3


def _mamba_flops(width: int, inner: int, heads: int, args: Namespace) -> float:
    """Forward FLOPs of a Mamba layer per token, with upstream's terms: projections and scan."""
    state, groups = args.mamba_state_dim, args.mamba_num_groups
    return 2 * width * (2 * inner + 2 * groups * state + heads) + 7 * inner * state + 2 * inner * width


def _left_out_by_hybrid(args: Namespace) -> float:
    """Forward FLOPs per token that upstream's count of a hybrid lacks, the routers aside."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, get_hybrid_layer_counts

    layers = get_hybrid_layer_counts(args.hybrid_layer_pattern)
    width, heads = args.hidden_size, args.mamba_num_heads
    mamba = 0.0
    if heads:
        found = _mamba_flops(width, 2 * width, heads, args)
        mamba = layers[Symbols.MAMBA] * (_mamba_flops(width, heads * args.mamba_head_dim, heads, args) - found)
    return mamba + (args.mtp_num_layers or 0) * 2 * (2 * width) * width


def _moe_layers(args: Namespace) -> int:
    """Layers with a router, those of prediction depths included."""
    if args.hybrid_layer_pattern is not None:
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, get_hybrid_layer_counts

        return int(get_hybrid_layer_counts(args.hybrid_layer_pattern)[Symbols.MOE])
    frequency = args.moe_layer_freq
    layers = (
        frequency
        if isinstance(frequency, list)
        else [int(number % frequency == 0) for number in range(args.num_layers)]
    )
    return int(sum(layers) + layers[-1] * (args.mtp_num_layers or 0))


def left_out_flops(args: Namespace) -> float:
    """Return the FLOPs per token of a step that upstream's count lacks (negative where it counts too many)."""
    forward = 0.0
    if args.hybrid_layer_pattern is not None:
        forward += _left_out_by_hybrid(args)
    if args.num_experts:
        forward += _moe_layers(args) * 2 * args.hidden_size * args.num_experts
    return _FORWARD_AND_BACKWARD * forward


def stream_flops_per_token(num_streams: int, width: int, branches: int, *, retention: bool) -> int:
    """Return the FLOPs per token of a step that reads, writes and the readout add; 0 for one stream.

    Per branch and element of width D: the read K products and K - 1 sums; the write K products and K sums, K products
    more with retention; the readout is a read. The backward is counted as twice the forward.
    """
    if num_streams == 1:
        return 0
    read = 2 * num_streams - 1
    write = (3 if retention else 2) * num_streams
    return _FORWARD_AND_BACKWARD * width * (branches * (read + write) + read)


def _make(upstream: Callable[..., float]) -> Callable[..., float]:
    def num_floating_point_operations(args: Namespace, batch_size: int, *rest: Any, **options: Any) -> float:
        tokens = options.get("total_real_tokens_in_batch")
        if tokens is None:
            tokens = batch_size * args.seq_length
        return upstream(args, batch_size, *rest, **options) + tokens * left_out_flops(args)

    return num_floating_point_operations


PATCH = UpstreamPatch(
    module="megatron.training.training",
    name="num_floating_point_operations",
    reason="leaves out projections of prediction depths and the real width of Mamba layers of a hybrid, and routers",
    source_sha256="f9ed9b380e17ebd3e197a69b259bf69aa99fa5a41031503fa6d6e7e6b5118197",
    make=_make,
)
