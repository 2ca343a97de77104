"""The short causal convolution of Mamba-2 in PyTorch: over a sequence, and one step of decoding.

    y_bdl = causal_conv1d_fn(x_bdl, weight_dw, bias_d, activation="silu")
    y_bsd = causal_conv1d_update(x_bsd, conv_state, weight_dw, bias_d, "silu", conv_state_indices=None)

The first has the signature of the package causal-conv1d, the second that of megatron.core.ssm.ops.causal_conv1d_triton.

What always holds: sums are accumulated in fp32 (fp64 for fp64 inputs) and rounded once. The backward keeps the inputs
alone and computes the pre-activation again. The sequence is walked in blocks that stay in cache.

Tensor names: b batch, l length, d channels, w taps of the kernel, s new tokens of a decoding step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.ssm.torch_accumulation import accumulation_dtype

_ELEMENTS_PER_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}
_ACTIVATIONS = ("silu", "swish")


def _is_activated(activation: str | bool | None) -> bool:
    if activation is None or activation is False:
        return False
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {', '.join(_ACTIVATIONS)}, got {activation!r}.")
    return True


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve x [b, d, l] with weight [d, w] per channel, looking back only; returns [b, d, l] in the dtype of x.

    `initial_states` [b, d, w-1] are the inputs before the first. `seq_idx` [b, l] keeps packed sequences apart. With
    `return_final_states` also the last w-1 inputs, [b, d, w-1] (into `final_states_out` where given).
    Raises NotImplementedError for `seq_idx` together with states, which causal-conv1d refuses as well.
    """
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise NotImplementedError("seq_idx together with initial_states or return_final_states is not supported.")
    y_bld = causal_conv1d(
        x.transpose(1, 2), weight, bias, activation=activation, seq_idx_bl=seq_idx, initial_states_bdw=initial_states
    )
    y = y_bld.transpose(1, 2)
    if not return_final_states:
        return y
    kept = weight.shape[1] - 1
    before = x.new_zeros(*x.shape[:2], kept) if initial_states is None else initial_states.to(x.dtype)
    final_states = torch.cat([before, x[:, :, max(x.shape[2] - kept, 0) :]], dim=2)[:, :, -kept:]
    if final_states_out is None:
        return y, final_states
    return y, final_states_out.copy_(final_states)


def causal_conv1d(
    x_bld: Tensor,
    weight_dw: Tensor,
    bias_d: Tensor | None,
    *,
    activation: str | None,
    seq_idx_bl: Tensor | None = None,
    initial_states_bdw: Tensor | None = None,
) -> Tensor:
    """The same with the channels last: x [b, l, d] -> [b, l, d]. Differentiable once, but not in seq_idx."""
    return _CausalConv.apply(x_bld, weight_dw, bias_d, initial_states_bdw, seq_idx_bl, _is_activated(activation))


class _Windows:
    """The taps over one call's sequence: for each tap, the inputs that a stretch of outputs multiplies by it."""

    def __init__(
        self, x_bld: Tensor, weight_dw: Tensor, bias_d: Tensor | None, initial_bdw: Tensor | None, seq_idx: Any
    ) -> None:
        self.wide = accumulation_dtype(x_bld.dtype)
        self.x_bld, self.initial_bdw, self.seq_idx_bl = x_bld, initial_bdw, seq_idx
        self.taps = weight_dw.shape[1]
        self.weight_wd = weight_dw.to(self.wide).t().contiguous()
        self.bias_d = None if bias_d is None else bias_d.to(self.wide)
        batch, self.length, channels = x_bld.shape
        budget = _ELEMENTS_PER_BLOCK.get(x_bld.device.type, 1 << 26)
        self.block = max(4 * self.taps, budget // max(1, batch * channels))

    def inputs(self, start: int, end: int) -> Tensor:
        """Inputs start .. end-1 in the accumulation dtype; the initial states, or zeros, stand before the first."""
        inside = self.x_bld[:, max(start, 0) : end].to(self.wide)
        if start >= 0:
            return inside
        if self.initial_bdw is None:
            return torch.nn.functional.pad(inside, (0, 0, -start, 0))
        return torch.cat([self.initial_bdw[:, :, start:].to(self.wide).transpose(1, 2), inside], dim=1)

    def visible(self, tap: int, start: int, end: int) -> Tensor | None:
        """Which of the outputs start .. end-1 lie in the same packed sequence as this tap's input; None for all."""
        back = self.taps - 1 - tap
        if self.seq_idx_bl is None or back == 0:
            return None
        index = self.seq_idx_bl[:, start:end]
        earlier = self.seq_idx_bl[:, max(start - back, 0) : end - back]
        missing = index.shape[1] - earlier.shape[1]
        same = index[:, missing:] == earlier
        return torch.nn.functional.pad(same, (missing, 0)).unsqueeze(2)

    def product(self, values: Tensor, tap: int, start: int, end: int) -> Tensor:
        """`values` of outputs start .. end-1, zeroed where the tap's input is invisible."""
        visible = self.visible(tap, start, end)
        return values if visible is None else values * visible

    def convolve(self, window: Tensor, start: int, end: int) -> Tensor:
        """Pre-activations start .. end-1, given the inputs start-(w-1) .. end-1."""
        size = end - start
        last = window[:, self.taps - 1 :]
        pre = last * self.weight_wd[-1] if self.bias_d is None else torch.addcmul(self.bias_d, last, self.weight_wd[-1])
        for tap in range(self.taps - 1):
            pre.addcmul_(self.product(window[:, tap : tap + size], tap, start, end), self.weight_wd[tap])
        return pre


class _CausalConv(torch.autograd.Function):
    """Depthwise causal convolution and activation, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_states: Tensor | None,
        seq_idx: Tensor | None,
        activated: bool,
    ) -> Tensor:
        windows = _Windows(x, weight, bias, initial_states, seq_idx)
        y = torch.empty_like(x)
        for start in range(0, windows.length, windows.block):
            end = min(start + windows.block, windows.length)
            pre = windows.convolve(windows.inputs(start - windows.taps + 1, end), start, end)
            y[:, start:end] = torch.nn.functional.silu(pre, inplace=True) if activated else pre
        ctx.save_for_backward(x, weight, bias, initial_states, seq_idx)
        ctx.activated = activated
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        x, weight, bias, initial_states, seq_idx = ctx.saved_tensors
        windows = _Windows(x, weight, bias, initial_states, seq_idx)
        halo, length, wide = windows.taps - 1, windows.length, windows.wide
        grad_x = torch.empty_like(x)
        grad_weight_wd = torch.zeros_like(windows.weight_wd)
        grad_bias_d = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        grad_initial = None
        for start in range(0, length, windows.block):
            end = min(start + windows.block, length)
            reach = min(end + halo, length)  # outputs that the inputs of this block enter
            window = windows.inputs(start - halo, reach)
            grad_pre = grad_y[:, start:reach].to(wide)
            if ctx.activated:
                grad_pre = _silu_backward(grad_pre, windows.convolve(window, start, reach))
            own = grad_pre[:, : end - start]
            if grad_bias_d is not None:
                grad_bias_d += own.sum((0, 1))
            for tap in range(windows.taps):
                seen = windows.product(window[:, tap : tap + end - start], tap, start, end)
                grad_weight_wd[tap] += (own * seen).sum((0, 1))
            first = start - halo if start == 0 and initial_states is not None else start
            grad_inputs = _inputs_backward(windows, grad_pre, start, reach, first, end)
            if first < start:
                assert initial_states is not None
                grad_initial = grad_inputs[:, :halo].transpose(1, 2).to(initial_states.dtype)
                grad_inputs = grad_inputs[:, halo:]
            grad_x[:, start:end] = grad_inputs
        grad_bias = None if grad_bias_d is None else grad_bias_d.to(bias.dtype)
        return grad_x, grad_weight_wd.t().to(weight.dtype), grad_bias, grad_initial, None, None


def _silu_backward(grad: Tensor, pre: Tensor) -> Tensor:
    """The gradient before silu."""
    return torch.ops.aten.silu_backward(grad, pre)


def _inputs_backward(windows: _Windows, grad_pre: Tensor, start: int, reach: int, first: int, end: int) -> Tensor:
    """Gradients of the inputs first .. end-1 from those of the pre-activations start .. reach-1."""
    grad = grad_pre.new_zeros(grad_pre.shape[0], end - first, grad_pre.shape[2])
    for tap in range(windows.taps):
        ahead = windows.taps - 1 - tap  # the output at position i + ahead multiplies input i by this tap
        low, high = max(start, first + ahead), min(reach, end + ahead)
        if low >= high:
            continue
        values = windows.product(grad_pre[:, low - start : high - start], tap, low, high)
        grad[:, low - ahead - first : high - ahead - first].addcmul_(values, windows.weight_wd[tap])
    return grad


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: str | bool | None,
    conv_state_indices: Tensor | None,
    intermediate_conv_states: Tensor | None = None,
) -> Tensor:
    """Convolve the next token(s) x [b, d] or [b, s, d] with the last inputs of each sequence, updated in place.

    `conv_state` [slots, d, m], m >= w-1, holds the newest input last. `conv_state_indices` [b] says which slot a
    sequence has (its own position without it); a negative one yields zeros and touches nothing. The state after each
    token is written to `intermediate_conv_states` [slots, s, d, m] where given. Returns the shape and dtype of x.
    """
    activated = _is_activated(silu_activation)
    x_bsd = x.unsqueeze(1) if x.dim() == 2 else x
    slots, active = state_slots(conv_state_indices, x_bsd, conv_state)
    wide, taps = accumulation_dtype(x.dtype), weight.shape[1]
    x_asd = x_bsd[active]
    state_adm = conv_state[slots]
    history_adt = torch.cat([state_adm, x_asd.transpose(1, 2).to(conv_state.dtype)], dim=2)
    tokens, length = x_bsd.shape[1], conv_state.shape[2]
    y_asd = torch.stack(
        [
            (history_adt[:, :, length + 1 + s - taps : length + 1 + s].to(wide) * weight.to(wide)).sum(2)
            for s in range(tokens)
        ],
        dim=1,
    )
    if bias is not None:
        y_asd = y_asd + bias.to(wide)
    if activated:
        y_asd = torch.nn.functional.silu(y_asd)
    if intermediate_conv_states is not None:
        for s in range(tokens):
            intermediate_conv_states[slots, s] = history_adt[:, :, s + 1 : s + 1 + length].to(
                intermediate_conv_states.dtype
            )
    conv_state[slots] = history_adt[:, :, tokens:]
    y_bsd = torch.zeros_like(x_bsd)
    y_bsd[active] = y_asd.to(x.dtype)
    return y_bsd.view_as(x)


def state_slots(indices: Tensor | None, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Which slots of a state cache the sequences of x [b, ...] use, and which of them are in use (index not negative).

    Without indices sequence i has slot i. Raises ValueError when there is not one slot per sequence then.
    """
    if indices is None:
        if x.shape[0] != state.shape[0]:
            raise ValueError(
                f"x has {x.shape[0]} sequences, the state cache {state.shape[0]}: without indices they must be equal. "
                "MambaMixer's static decoding hands a batch over as the tokens of one sequence: decode one at a time."
            )
        every = torch.arange(x.shape[0], device=x.device)
        return every, every
    active = (indices >= 0).nonzero().squeeze(1)
    return indices[active].long(), active
