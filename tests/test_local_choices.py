"""Options that this machine cannot serve are refused by name before a model is built."""

from __future__ import annotations

import sys

import pytest
from harness_pretrain import TINY_GPT

from megatron.cpu.host import cpu_host
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.pretrain_entry import validated_arguments

EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"]


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        (["--apply-layernorm-1p"], "transformer-engine"),
        ([*EXPERTS, "--moe-latent-size", "16"], "transformer-engine"),
        ([*EXPERTS, "--moe-router-fusion"], "transformer-engine"),
        ([*EXPERTS, "--moe-permute-fusion"], "transformer-engine"),
        ([*EXPERTS, "--moe-grouped-gemm"], "a GPU"),
        (["--multi-latent-attention"], "transformer-engine"),
        (["--tp-comm-overlap"], "transformer-engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[-2:]),
)
def test_an_option_that_needs_what_is_absent_is_refused(
    options: list[str], needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = [option for option in options if option.startswith("--")][-1]
    monkeypatch.setattr(sys, "argv", ["pretrain", *TINY_GPT, *options])
    with cpu_host(), pytest.raises(LocalChoiceError, match=rf"^{flag} needs {needs}, which is not here \(host cpu\)"):
        validated_arguments("cpu")
