"""The read/write protocol: each misuse has its own error, and a good call gives the documented result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness_models import transformer_config
from torch import Tensor

from megatron.core.transformer.residual_connection import ResidualConnection, ResidualConnectionState
from megatron.core.transformer.wide_residual import StreamwiseSigmoidWideResidualConnection
from megatron.core.transformer.wide_residual_config import WideResidualConfig, widen_transformer_config

K, D = 4, 64


def connection(operation: str, **wide_options: Any) -> StreamwiseSigmoidWideResidualConnection:
    config = widen_transformer_config(transformer_config(), WideResidualConfig(K, **wide_options))
    return StreamwiseSigmoidWideResidualConnection(config, 3, "mlp", operation=operation)  # type: ignore[arg-type]


def stream(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 2, K * D, generator=torch.Generator().manual_seed(0)).to(dtype)


def update(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 2, D, generator=torch.Generator().manual_seed(1)).to(dtype)


READ: dict[str, Any] = {"hidden_states": stream(), "fp32_residual_connection": False}
WRITE: dict[str, Any] = {
    "branch_output": (update(), None),
    "state": ResidualConnectionState(stream()),
    "dropout_probability": 0.0,
    "training": True,
}


def test_read_returns_the_weighted_sum_and_keeps_the_stream() -> None:
    z_sbd, state = connection("read")(**READ)
    torch.testing.assert_close(z_sbd, stream().unflatten(-1, (K, D)).mean(-2), rtol=0, atol=1e-6)
    assert state.residual is READ["hidden_states"]


def test_write_adds_bias_then_drops_out_then_writes_one_mask_to_all_streams() -> None:
    bias = torch.linspace(-1, 1, D)
    write = connection("write")
    torch.manual_seed(3)
    y_sbw = write(**{**WRITE, "branch_output": (update(), bias), "dropout_probability": 0.5})
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(update() + bias, 0.5)
    wanted = stream().unflatten(-1, (K, D)) + write.write_map.factors().unsqueeze(-1) * dropped.unsqueeze(-2)
    torch.testing.assert_close(y_sbw, wanted.flatten(-2), rtol=1e-6, atol=1e-6)


def test_write_in_evaluation_drops_nothing_out() -> None:
    write = connection("write")
    evaluated = write(**{**WRITE, "dropout_probability": 0.5, "training": False})
    assert torch.equal(evaluated, write(**WRITE))


def test_write_never_changes_the_stream_or_the_update() -> None:
    with torch.no_grad():
        connection("write", learned_retention=True)(**WRITE)
    assert torch.equal(WRITE["state"].residual, stream())
    assert torch.equal(WRITE["branch_output"][0], update())


def test_fp32_residual_reads_in_branch_precision_and_promotes_the_carried_stream() -> None:
    read = connection("read")
    read.config.params_dtype = torch.bfloat16
    z_sbd, state = read(stream(torch.bfloat16), fp32_residual_connection=True)
    assert (z_sbd.dtype, state.residual.dtype) == (torch.bfloat16, torch.float32)
    z_sbd, _ = read(stream(), fp32_residual_connection=True, branch_input_dtype=torch.float64)
    assert z_sbd.dtype == torch.float64
    y_sbw = connection("write")(**{**WRITE, "branch_output": (update(torch.bfloat16), None)})
    assert y_sbw.dtype == torch.float32


MISUSES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("read", {}, TypeError, "needs hidden_states"),
    ("read", {"hidden_states": stream()}, TypeError, "needs fp32_residual_connection"),
    (
        "read",
        {**READ, "state": WRITE["state"]},
        TypeError,
        "state was given, which is not an argument of a residual re",
    ),
    ("read", {**READ, "branch_output": (update(), None)}, TypeError, "branch_output was given"),
    ("read", {**READ, "dropout_probability": 0.1}, TypeError, "dropout_probability was given"),
    ("read", {**READ, "training": True}, TypeError, "training was given"),
    ("read", {**READ, "next_read": connection("read")}, TypeError, "next_read was given"),
    ("write", {**WRITE, "next_read": connection("write")}, TypeError, "a connection built for a read is wanted"),
    ("read", {**READ, "hidden_states": [1.0]}, TypeError, "hidden_states is a list"),
    ("read", {**READ, "hidden_states": stream().long()}, TypeError, "hidden_states has dtype torch.int64"),
    ("read", {**READ, "hidden_states": update()}, ValueError, r"shape \(5, 2, 64\); a last dimension of 256"),
    ("read", {**READ, "fp32_residual_connection": 1}, TypeError, "fp32_residual_connection is 1"),
    ("read", {**READ, "branch_input_dtype": torch.int8}, TypeError, "branch_input_dtype is torch.int8"),
    ("write", {**WRITE, "hidden_states": stream()}, TypeError, "hidden_states was given, which is not an argument"),
    ("write", {**WRITE, "fp32_residual_connection": True}, TypeError, "fp32_residual_connection was given"),
    ("write", {**WRITE, "branch_input_dtype": torch.float32}, TypeError, "branch_input_dtype was given"),
    *[
        ("write", {k: v for k, v in WRITE.items() if k != name}, TypeError, f"needs {name}, which is missing")
        for name in WRITE
    ],
    ("write", {**WRITE, "state": stream()}, TypeError, "state is a Tensor; a ResidualConnectionState"),
    ("write", {**WRITE, "branch_output": update()}, TypeError, r"branch_output is Tensor; \(update, bias\)"),
    ("write", {**WRITE, "branch_output": (update(),)}, TypeError, "branch_output is tuple"),
    ("write", {**WRITE, "branch_output": (None, None)}, TypeError, "the update is a NoneType"),
    ("write", {**WRITE, "branch_output": (update().long(), None)}, TypeError, "the update has dtype torch.int64"),
    ("write", {**WRITE, "branch_output": (stream(), None)}, ValueError, r"shape \(5, 2, 256\); \(5, 2, 64\) is wanted"),
    ("write", {**WRITE, "branch_output": (update()[:4], None)}, ValueError, r"shape \(4, 2, 64\)"),
    ("write", {**WRITE, "branch_output": (update(), 0.5)}, TypeError, "the bias is a float"),
    ("write", {**WRITE, "branch_output": (update(), torch.ones(3))}, ValueError, r"the bias has shape \(3,\)"),
    ("write", {**WRITE, "state": ResidualConnectionState(update())}, ValueError, "state.residual has shape"),
    ("write", {**WRITE, "dropout_probability": 1.5}, ValueError, "dropout_probability is 1.5"),
    ("write", {**WRITE, "dropout_probability": True}, TypeError, "dropout_probability is True"),
    ("write", {**WRITE, "training": 1}, TypeError, "training is 1"),
]


@pytest.mark.parametrize(("operation", "arguments", "error", "message"), MISUSES)
def test_misuse_is_named(operation: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as found:
        connection(operation)(**arguments)
    assert "layer 3 mlp" in str(found.value), "the message does not say which connection was misused"


def test_unknown_operation_is_an_error() -> None:
    with pytest.raises(ValueError, match='operation is \'both\'; "read" or "write" is wanted'):
        connection("both")


def test_each_operation_owns_only_its_own_maps() -> None:
    assert {name for name, _ in connection("read", learned_retention=True).named_parameters()} == {"read_map.logit"}
    assert {name for name, _ in connection("write", learned_retention=True).named_parameters()} == {
        "write_map.logit",
        "retention.retention_logit",
    }
    assert {name for name, _ in connection("write").named_parameters()} == {"write_map.logit"}


def test_base_class_says_that_it_has_no_operation_of_its_own() -> None:
    base = ResidualConnection(transformer_config(), 1, "mlp", operation="read")
    with pytest.raises(NotImplementedError, match="_read"):
        base(update(), fp32_residual_connection=False)


def test_module_hooks_see_the_call() -> None:
    read, calls = connection("read"), []
    read.register_forward_hook(lambda module, inputs, output: calls.append(module.operation))
    read(**READ)
    assert calls == ["read"]
