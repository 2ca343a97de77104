"""The sizes that the table's shapes are written in, from a checkpoint's training arguments.

    sizes = model_sizes(args)               # {"D": 1024, "V": 50304, ...}
    evaluate("2*G*S", sizes)

D width, V padded vocabulary, P positions, A rows of attention output (heads x head), Q rows of query-key-value,
F feed-forward, f experts' feed-forward, s shared experts' feed-forward, g 2 with a gated activation else 1, E experts,
I Mamba's inner width, G Mamba groups, S Mamba state, H Mamba heads, W convolution window, p padded controller.

What always holds: a size that the arguments do not tell is left out, and what depends on it is not checked.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence

from megatron.training.checkpoints.errors import ConversionError

_TERM = re.compile(r"[A-Za-z]+|\d+")
MIN_CONTROLLER = 128


def evaluate(expression: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum of products such as "2*I+2*G*S+H"; KeyError for a size that is not known."""
    total = 0
    for product in expression.split("+"):
        value = 1
        for factor in product.split("*"):
            value *= int(factor) if factor.isdigit() else sizes[factor]
        total += value
    return total


def _attention(args: Namespace, sizes: dict[str, int]) -> None:
    heads = getattr(args, "num_attention_heads", None)
    if not heads:
        return
    head = getattr(args, "kv_channels", None) or args.hidden_size // heads
    groups = args.num_query_groups if getattr(args, "group_query_attention", False) else heads
    sizes.update(A=heads * head, h=head, Q=(heads + 2 * groups) * head, groups=groups)


def _mamba(args: Namespace, sizes: dict[str, int]) -> None:
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)
    head = getattr(args, "mamba_head_dim", None)  # a GPT's arguments have defaults of these
    if not pattern or not head or not getattr(args, "mamba_state_dim", None):
        return
    heads = getattr(args, "mamba_num_heads", None) or 2 * args.hidden_size // head
    sizes.update(I=heads * head, H=heads, G=args.mamba_num_groups, S=args.mamba_state_dim)


def model_sizes(args: Namespace) -> dict[str, int]:
    """Return the sizes that the training arguments tell."""
    width = getattr(args, "hidden_size", None)
    if not width:
        raise ConversionError("the stored arguments have no hidden_size: they do not describe a language model")
    gated = bool(getattr(args, "swiglu", False)) or bool(getattr(args, "quick_geglu", False))
    sizes = {"D": width, "g": 2 if gated else 1}
    streams = getattr(args, "wide_residual", None) or 0
    sizes["p"] = max(MIN_CONTROLLER, streams)
    plain = (
        ("V", "padded_vocab_size"),
        ("P", "max_position_embeddings"),
        ("F", "ffn_hidden_size"),
        ("f", "moe_ffn_hidden_size"),
        ("s", "moe_shared_expert_intermediate_size"),
        ("E", "num_experts"),
    )
    for symbol, name in plain:
        if getattr(args, name, None):
            sizes[symbol] = getattr(args, name)
    if "f" not in sizes and "F" in sizes:
        sizes["f"] = sizes["F"]
    _attention(args, sizes)
    _mamba(args, sizes)
    return sizes


def shape_of(symbols: Sequence[str], sizes: Mapping[str, int]) -> tuple[int | None, ...]:
    """Return a shape written in sizes; None where a size is not known."""
    return tuple(
        None
        if any(term not in sizes for term in _TERM.findall(symbol) if not term.isdigit())
        else evaluate(symbol, sizes)
        for symbol in symbols
    )
