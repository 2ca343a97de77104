"""Argument checks of the streamwise operators: each misuse is its own TypeError or ValueError.

Used by streamwise_residual_ops at the start of every call and by residual connections. Every message says what was
found and what is wanted. Checks look at kinds, shapes, dtypes and devices alone, never at values, so they never wait
for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_norm import StreamNorm

_CONTROLLER_DTYPES = (torch.float32, torch.float64)


def check_num_streams(num_streams: int) -> None:
    """Refuse a stream count that is not an int of at least 1."""
    if type(num_streams) is not int:
        raise TypeError(f"num_streams must be an int, got {type(num_streams).__name__} ({num_streams!r}).")
    if num_streams < 1:
        raise ValueError(f"num_streams must be at least 1, got {num_streams}.")


def check_wide_stream(name: str, x: Tensor, num_streams: int) -> None:
    """Refuse anything but a floating tensor [..., K*D] with D >= 1."""
    _check_activation(name, x)
    width = x.shape[-1]
    if width == 0 or width % num_streams:
        raise ValueError(
            f"{name} must have a last dimension that is a positive multiple of the {num_streams} streams, "
            f"got {width} in shape {tuple(x.shape)}."
        )


def check_branch_update(update: Tensor, residual_stream: Tensor, num_streams: int) -> None:
    """Refuse an update whose shape is not the residual stream's with its last dimension divided by K."""
    _check_activation("branch_update", update)
    wanted = (*residual_stream.shape[:-1], residual_stream.shape[-1] // num_streams)
    if update.shape != wanted:
        raise ValueError(
            f"branch_update must have shape {wanted} for a residual_stream of shape {tuple(residual_stream.shape)} "
            f"with {num_streams} streams, got {tuple(update.shape)}."
        )
    if update.device != residual_stream.device:
        raise ValueError(
            f"branch_update must be on the residual_stream's device {residual_stream.device}, got {update.device}."
        )


def check_controller(
    name: str, controller: Tensor, stream: Tensor, *, at_least: int = 1, exactly: int | None = None
) -> None:
    """Refuse anything but an fp32 or fp64 vector of the wanted length on the stream's device."""
    if not isinstance(controller, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(controller).__name__}.")
    if controller.dtype not in _CONTROLLER_DTYPES:
        raise TypeError(
            f"{name} must be torch.float32 (or torch.float64), got {controller.dtype}: controllers stay fp32 in "
            f"reduced precision training, since the factors' exact start does not survive the cast."
        )
    if controller.dim() != 1:
        raise ValueError(f"{name} must be a vector, got shape {tuple(controller.shape)}.")
    length = controller.shape[0]
    if exactly is not None and length != exactly:
        raise ValueError(f"{name} must have one element per stream, {exactly} in all, got {length}.")
    if length < at_least:
        raise ValueError(f"{name} must have at least {at_least} element(s), one per stream, got {length}.")
    if isinstance(stream, Tensor) and controller.device != stream.device:
        raise ValueError(f"{name} must be on the stream's device {stream.device}, got {controller.device}.")


def check_max_forget(max_forget: float, *, needed: bool) -> None:
    """Refuse a bound on forgetting outside [0, 1), and 0 where retention is in use."""
    if isinstance(max_forget, bool) or not isinstance(max_forget, int | float):
        raise TypeError(f"retention_max_forget must be a float, got {type(max_forget).__name__} ({max_forget!r}).")
    if needed and not 0 < max_forget < 1:
        raise ValueError(
            f"retention_max_forget must lie strictly between 0 and 1 when retention_logits are given, got {max_forget}."
        )
    if not 0 <= max_forget < 1:
        raise ValueError(f"retention_max_forget must be at least 0 and below 1, got {max_forget}.")


def check_bias(bias: Tensor | None, update: Tensor) -> None:
    """Refuse a bias that is no floating tensor, or does not broadcast to the update's shape."""
    if bias is None:
        return
    _check_activation("bias", bias)
    fits = bias.dim() <= update.dim() and bias.shape[-1] == update.shape[-1]
    if fits and bias.dim() > 1:
        sizes = zip(reversed(bias.shape), reversed(update.shape), strict=False)
        fits = all(size in (1, wanted) for size, wanted in sizes)
    if not fits:
        raise ValueError(
            f"bias must broadcast to the update's shape {tuple(update.shape)} with a last dimension of "
            f"{update.shape[-1]}, got {tuple(bias.shape)}."
        )
    if bias.device != update.device:
        raise ValueError(f"bias must be on the update's device {update.device}, got {bias.device}.")


def check_dropout(probability: float) -> None:
    """Refuse anything but a probability."""
    if isinstance(probability, bool) or not isinstance(probability, int | float):
        raise TypeError(f"dropout_probability must be a float, got {type(probability).__name__} ({probability!r}).")
    if not 0 <= probability <= 1:
        raise ValueError(f"dropout_probability must lie in [0, 1], got {probability}.")


def check_norm(norm: StreamNorm | None, stream: Tensor, num_streams: int) -> None:
    """Refuse anything but a norm over the width of a branch, with its parameters on the stream's device."""
    if norm is None:
        return
    if not isinstance(norm, StreamNorm):
        raise TypeError(f"norm must be a StreamNorm (stream_norm_of a module), got {type(norm).__name__}.")
    if norm.kind not in ("RMSNorm", "LayerNorm"):
        raise ValueError(f"norm.kind must be 'RMSNorm' or 'LayerNorm', got {norm.kind!r}.")
    if isinstance(norm.eps, bool) or not isinstance(norm.eps, int | float):
        raise TypeError(f"norm.eps must be a float, got {type(norm.eps).__name__} ({norm.eps!r}).")
    if norm.kind == "RMSNorm" and norm.bias_d is not None:
        raise ValueError("norm.bias_d must be None for an RMSNorm, which has no bias.")
    width = stream.shape[-1] // num_streams
    if norm.width != width:
        raise ValueError(f"norm must be one over the branch width {width}, got one over {norm.width}.")
    for name, parameter in (("weight_d", norm.weight_d), ("bias_d", norm.bias_d)):
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor) or not parameter.dtype.is_floating_point:
            raise TypeError(f"norm.{name} must be a floating torch.Tensor, got {parameter!r:.60}.")
        if parameter.shape != (width,):
            raise ValueError(f"norm.{name} must have shape ({width},), got {tuple(parameter.shape)}.")
        if parameter.device != stream.device:
            raise ValueError(f"norm.{name} must be on the stream's device {stream.device}, got {parameter.device}.")


def check_output_dtype(output_dtype: torch.dtype | None, hidden_states: Tensor) -> torch.dtype:
    """The dtype of a read's result: `output_dtype`, or that of `hidden_states`."""
    if output_dtype is None:
        return hidden_states.dtype
    if not isinstance(output_dtype, torch.dtype):
        raise TypeError(f"output_dtype must be a torch.dtype or None, got {type(output_dtype).__name__}.")
    if not output_dtype.is_floating_point:
        raise TypeError(f"output_dtype must be a floating dtype, got {output_dtype}.")
    return output_dtype


def _check_activation(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must have a floating dtype, got {x.dtype}.")
    if x.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar.")
