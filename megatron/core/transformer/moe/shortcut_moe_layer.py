"""An MoE layer whose routed experts take a shortcut around the layer ahead of it (arXiv 2404.05019).

    spec = shortcut_moe_layer_spec(moe_layer_spec)          # what hybrid stacks do: shortcut_hybrid_stack.py
    moe_layer.follow(predecessor, parallel=False)           # then run predecessor and moe_layer, in this order

With the predecessor P (attention, Mamba or MLP) and the stream x before it:

    h  = x + P(norm(x))                                     the predecessor, unchanged
    x' = h + norm_o(Experts(norm_r(x)) + SharedExpert(norm_s(h)))

norm_r is `shortcut_layernorm`, norm_o `shortcut_output_layernorm`, norm_s the ordinary `pre_mlp_layernorm`. The routed
experts (router, dispatch, experts, combine) are started when P is called, before it computes; with `parallel` on a GPU
they run on a CUDA stream of their own, beside P.

What always holds: upstream's forwards run, not copies of them; all base parameter names are the ordinary layer's;
building the norms draws no random numbers; the order of computations, and so every number, is the same with and without
`parallel`.

Shape suffixes: s sequence, b batch, d width D.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from megatron.core.transformer.moe.shortcut_moe_options import check_shortcut_options


class ShortcutMoELayer(MoELayer):
    """MoELayer whose routed experts and shared expert have an input each: `routed` runs the former, a call the latter.

    Arguments as MoELayer.
    """

    def shared_experts_compute(self, hidden_states: Tensor) -> None:
        """Leave the shared expert out of upstream's forward, which `routed` runs."""

    def routed(self, z_sbd: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Route z [s, b, D] and return what the routed experts make of it, [s, b, D]; padding_mask is [b, s]."""
        routed_sbd: Tensor = super().forward(z_sbd, padding_mask=padding_mask)[0]
        return routed_sbd

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the shared expert's output [s, b, D] and no bias, as an MLP of upstream's does."""
        del intermediate_tensors, padding_mask  # of the routed experts
        return super().shared_experts_compute(hidden_states), None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of the routed experts of all layers on this device."""
    return torch.cuda.Stream(device)


@contextmanager
def _on_side_stream(*inputs: Tensor | None) -> Iterator[None]:
    """Queue CUDA work behind everything queued so far, without delaying what is queued after it.

    Autograd runs the backward of that work on the same stream and orders it with its neighbours'. record_stream keeps
    the memory of the inputs, which belongs to the caller's stream, until the work that reads it is done. An input that
    a replay block rebuilds is kept by the replayed operation until its own backward, which comes after that work.
    """
    tensors = [tensor for tensor in inputs if tensor is not None]
    side = _side_stream(tensors[0].device)
    side.wait_stream(torch.cuda.current_stream())
    for tensor in tensors:
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield


def _join_side_stream(result: Tensor) -> None:
    """Let the current stream wait for what was queued on the side stream, whose memory holds result."""
    current = torch.cuda.current_stream()
    current.wait_stream(_side_stream(result.device))
    result.record_stream(current)


class ShortcutMoETransformerLayer(TransformerLayer):
    """An MoE TransformerLayer that `follow`s the layer ahead of it. Arguments as TransformerLayer.

    Raises:
        ValueError: an option that shortcut MoE refuses, or submodules without a norm ahead of the MoE.
    """

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *args: Any, **kwargs: Any
    ) -> None:
        check_shortcut_options(config)
        if submodules.pre_mlp_layernorm is IdentityOp:
            raise ValueError(
                "shortcut MoE takes its norms from the layer spec's pre_mlp_layernorm, and this spec has none (one "
                "fused into the layer after it serves one input only): give the MoE layer a norm of its own"
            )
        super().__init__(config, submodules, *args, **kwargs)
        for name in ("shortcut_layernorm", "shortcut_output_layernorm"):
            norm = submodules.pre_mlp_layernorm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
            setattr(self, name, norm)
        self.shortcut_padding_mask: Tensor | None = None
        self._parallel = False
        self._routed_sbd: Tensor | None = None

    def follow(self, predecessor: torch.nn.Module, *, parallel: bool) -> None:
        """Start the routed experts whenever predecessor is called, with its hidden_states.

        Args:
            predecessor: the layer that runs directly before this one.
            parallel: run them on a CUDA stream of their own; on a CPU it has no effect.
        """
        self._parallel = parallel
        predecessor.register_forward_pre_hook(self._start_routed, with_kwargs=True)

    def forget_shortcut(self) -> None:
        """Drop what a forward that did not reach this layer left behind."""
        self.shortcut_padding_mask = None
        self._routed_sbd = None

    def _start_routed(self, predecessor: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the routed experts on the input of predecessor (a forward pre-hook)."""
        del predecessor
        stream = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        packed = kwargs.get("packed_seq_params")
        z_sbd, padding_mask, samples = self._maybe_unflatten_for_moe(
            self._shortcut_input(stream), self.shortcut_padding_mask, packed
        )
        if self._parallel and z_sbd.is_cuda:
            with _on_side_stream(z_sbd, padding_mask):
                routed_sbd = self._maybe_reflatten_from_moe(self.mlp.routed(z_sbd, padding_mask), packed, samples)
        else:
            routed_sbd = self._maybe_reflatten_from_moe(self.mlp.routed(z_sbd, padding_mask), packed, samples)
        self._routed_sbd = routed_sbd

    def _shortcut_input(self, x_sbd: Tensor) -> Tensor:
        """Return the input of the routed experts for the stream before the predecessor: [s, b, D] -> [s, b, D]."""
        z_sbd: Tensor = self.shortcut_layernorm(x_sbd)
        return z_sbd

    def _take_routed(self) -> Tensor:
        """Return the routed experts' output and keep no reference to it."""
        routed_sbd, self._routed_sbd = self._routed_sbd, None
        if routed_sbd is None:
            raise RuntimeError(
                f"layer {self.layer_number} is the MoE half of a shortcut pair, and the layer that it follows did not "
                "run before it; call layers in the order of the stack, after follow(predecessor)"
            )
        if self._parallel and routed_sbd.is_cuda:
            _join_side_stream(routed_sbd)
        return routed_sbd

    def _forward_post_mlp(self, mlp_output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
        """Add the routed experts to the shared one, norm the sum, and let upstream write it."""
        shared_sbd, bias = mlp_output_with_bias
        update_sbd = self.shortcut_output_layernorm(self._take_routed() + shared_sbd)
        y: Tensor = super()._forward_post_mlp((update_sbd, bias), residual)
        return y


def shortcut_moe_layer_spec(spec: ModuleSpec) -> ModuleSpec:
    """Return the spec of an MoE layer with the shortcut twins of its classes; spec is left as it was.

    Raises:
        TypeError: no spec of upstream's MoE layer; the message names what was found.
    """
    if spec.module not in (MoETransformerLayer, TransformerLayer):
        raise TypeError(
            f"moe_layer: the layer class {getattr(spec.module, '__name__', spec.module)} has no shortcut twin; "
            "MoETransformerLayer or TransformerLayer is wanted"
        )
    builder = spec.submodules.mlp
    if not isinstance(builder, partial) or builder.func is not MoELayer:
        raise TypeError(
            f"moe_layer: its mlp is {builder!r}, which has no shortcut twin; functools.partial(MoELayer, ...), as "
            "get_moe_module_spec makes it, is wanted"
        )
    mlp = partial(ShortcutMoELayer, *builder.args, **builder.keywords)
    return replace(spec, module=ShortcutMoETransformerLayer, submodules=replace(spec.submodules, mlp=mlp))
