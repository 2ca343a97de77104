"""A run whose streams cannot be served by the chosen kernels ends before a model is built, with one line.

pytest tests/test_streamwise_options.py
"""

from __future__ import annotations

import sys

import pytest
from harness_pretrain import TINY_GPT

from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE
from megatron.cpu.host import cpu_host
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.pretrain_entry import validated_arguments


def refusal(monkeypatch: pytest.MonkeyPatch, streams: int, **variables: str) -> str:
    """The message with which the trainer refuses a wide run under these environment variables; it exits with 2 then."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["pretrain", *TINY_GPT, "--wide-residual", str(streams)])
    with cpu_host(), pytest.raises(LocalChoiceError) as error:
        validated_arguments("cpu")
    return str(error.value)


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, 2, MEGATRON_STREAMWISE_BACKEND="fast")
    assert "must be one of auto, triton, compiled, eager, got 'fast'" in message


def test_triton_without_a_gpu_and_its_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal(monkeypatch, 17, MEGATRON_STREAMWISE_BACKEND="triton", TRITON_INTERPRET="1")  # whatever this process did
    message = refusal(monkeypatch, 2, MEGATRON_STREAMWISE_BACKEND="triton", TRITON_INTERPRET="0")
    assert "triton serves CUDA tensors, got cpu ones: use auto" in message


def test_more_streams_than_the_triton_kernels_serve_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, 17, MEGATRON_STREAMWISE_BACKEND="triton", TRITON_INTERPRET="1")
    assert "--wide-residual 17: the triton kernels of the streams serve 16 at most" in message
    assert "MEGATRON_STREAMWISE_BACKEND=eager" in message


def test_an_ordinary_run_does_not_look_at_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "fast")
    monkeypatch.setattr(sys, "argv", ["pretrain", *TINY_GPT])
    with cpu_host():
        assert validated_arguments("cpu").wide_residual is None
