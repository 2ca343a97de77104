"""Options that this machine cannot serve are refused by name before a model is built."""

from __future__ import annotations

import sys

import pytest
from harness_pretrain import TINY_GPT

from megatron.cpu.host import cpu_host
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.model_kinds import MODEL_KINDS
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--position-embedding-type", "relative"], "--position-embedding-type relative is T5's"),
        ([*EXPERTS, "--moe-router-topk", "5"], "--moe-router-topk 5 with --num-experts 4"),
        ([*EXPERTS, "--moe-router-topk", "0"], "--moe-router-topk 0 with --num-experts 4"),
        ([*EXPERTS, "--moe-layer-freq", "[1,0,1]"], "--moe-layer-freq names 3 layers, --num-layers 2"),
        # Upstream's own assertions: with words, and without.
        (["--num-attention-heads", "3"], "megatron-core does not take these options: "),
        (["--global-batch-size", "3"], "megatron-core does not take these options: "),
        (["--pipeline-model-parallel-size", "2"], "megatron-core does not take these options: "),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_options_that_upstream_answers_with_an_assertion_end_in_one_line(
    options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain", *TINY_GPT, *options])
    with cpu_host(), pytest.raises(LocalChoiceError) as refusal:
        MODEL_KINDS["gpt"].config(validated_arguments("cpu"))
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not str(refusal.value).endswith(": "), "it does not say what was wanted"
