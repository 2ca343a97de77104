"""Hybrids and multi-token prediction compute in every parallel layout what they compute on one process.

Real processes, gloo, the real trainer (harness_layouts), Mamba, attention, MLP and MoE layers, PyTorch Mamba operators.
Tolerances as in test_wide_layouts.py: fp32 losses 1e-5 over 8 optimizer steps, gradients of the first step 1e-4 of the
parameter's gradient norm and 1e-5 of all together; bf16 losses 5e-3.
The first read is left out: it sees equal streams, so its gradient is nothing but rounding.
"""

from __future__ import annotations

import pytest
import torch
from harness_layouts import Case, Result, run_cases

STEPS = 8
TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
CUT = (*PIPELINE, "--hybrid-layer-pattern", "M|*-E")
INTERLEAVED = (*PIPELINE, "--hybrid-layer-pattern", "M|*|-|E")
OPTIMIZER = ("--use-distributed-optimizer",)
EXPERT = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type")
REPLAY = ("--recompute-granularity", "selective", "--recompute-modules", "residual_stream")
REPLAY_1 = (*REPLAY, "--residual-stream-recompute-num-layers", "1")

CASES = (
    Case("ordinary-tp2-sp", 2, SEQUENCE, model="hybrid"),
    Case("ordinary-pp2", 2, PIPELINE, model="hybrid"),
    Case("tp2-sp", 2, SEQUENCE, model="wide4-hybrid"),
    Case("tp2-sp-replay", 2, (*SEQUENCE, *REPLAY), model="wide4-hybrid"),
    Case("pp2", 2, PIPELINE, model="wide4-hybrid"),
    Case("pp2-cut", 2, CUT, model="wide4-hybrid"),
    Case("pp2-vpp2", 2, INTERLEAVED, model="wide4-hybrid"),
    Case("pp2-vpp2-replay", 2, (*INTERLEAVED, *REPLAY_1), model="wide4-hybrid"),
    Case("ep2-alltoall", 2, (*EXPERT, "alltoall"), model="wide4-hybrid"),
    Case("ep2-allgather", 2, (*EXPERT, "allgather"), model="wide4-hybrid"),
    Case("dp2-distopt", 2, OPTIMIZER, model="wide4-hybrid"),
    Case("dp2-distopt-replay-bf16", 2, (*OPTIMIZER, *REPLAY), "bf16", "wide4-hybrid"),
    Case("mtp-tp2-sp", 2, SEQUENCE, model="wide3-hybrid-mtp"),
    Case("mtp-pp2-vpp2", 2, (*PIPELINE, "--hybrid-layer-pattern", "M|*|-|E/M*"), model="wide3-hybrid-mtp"),
    Case("gpt-mtp-pp2", 2, PIPELINE, model="wide2-mtp"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_cases(CASES, tmp_path_factory.mktemp("hybrid-layouts"), STEPS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hybrid_losses_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    found, wanted = results[case.name].losses, results[case.reference].losses
    assert len(found) == len(wanted) == STEPS
    assert wanted[0] - wanted[-1] > 0.1, "the reference does not learn, so equality would show nothing"
    assert found == pytest.approx(wanted, rel=1e-5 if case.precision == "fp32" else 5e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hybrid_gradients_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    found, wanted = results[case.name].gradients, results[case.reference].gradients
    controllers = results[case.reference].controllers
    first_read = next((name for name in wanted if ".layers.0.residual_read" in name), None)
    assert wanted.keys() <= found.keys(), f"no gradient of {sorted(wanted.keys() - found.keys())}"
    exact = case.precision == "fp32"
    for name, gradient in wanted.items():
        if name == first_read or (not exact and name in controllers):
            continue
        assert gradient.norm() > 0, f"{name} has no gradient to compare"
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= (1e-4 if exact else 5e-2), f"{name}: relative error {error:.2e}"
    for names in (controllers.keys() - {first_read}, wanted.keys() - controllers.keys()):
        if names:
            total = torch.cat([wanted[name].flatten() for name in sorted(names)])
            error = (torch.cat([found[name].flatten() for name in sorted(names)]) - total).norm() / total.norm()
            assert error <= (1e-5 if exact else 0.1), f"{len(names)} parameters together: relative error {error:.2e}"
