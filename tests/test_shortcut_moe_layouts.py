"""Shortcut MoE computes in every parallel layout what it computes on one process.

Real processes, gloo, the real trainer (harness_layouts). Tolerances as in test_hybrid_layouts.py: losses 1e-5 over the
steps, gradients of the first step 1e-4 of the parameter's gradient norm (sums that nearly cancel), all parameters
together 1e-5. The first read is left out: it sees equal streams, so its gradient is nothing but rounding.
"""

from __future__ import annotations

import pytest
import torch
from harness_layouts import MODELS, Case, Result, run_cases

STEPS = 8
MODELS["shortcut"] = [
    *(*MODELS["hybrid"], "--num-layers", "6", "--hybrid-layer-pattern", "M*E-E*"),
    *("--moe-shortcut-connection", "--moe-shortcut-parallel"),
]
MODELS["wide3-shortcut"] = [
    *MODELS["shortcut"],
    *("--wide-residual", "3", "--wide-residual-streamwise-sigmoid-init-scale", "1.0"),
]
SEQUENCE = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2", "--hybrid-layer-pattern")
EXPERT = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type")
REPLAY = ("--recompute-granularity", "selective", "--recompute-modules", "residual_stream")
REPLAY_1 = (*REPLAY, "--residual-stream-recompute-num-layers", "1")

CASES = (
    Case("ordinary-tp2-sp", 2, SEQUENCE, model="shortcut"),
    Case("ordinary-ep2-alltoall", 2, (*EXPERT, "alltoall"), model="shortcut"),
    Case("tp2-sp-replay", 2, (*SEQUENCE, *REPLAY_1), model="wide3-shortcut"),
    Case("pp2", 2, (*PIPELINE, "M*E|-E*"), model="wide3-shortcut"),
    Case("pp2-vpp2-replay", 2, (*PIPELINE, "M|*E|-E|*", *REPLAY), model="wide3-shortcut"),
    Case("ep2-alltoall", 2, (*EXPERT, "alltoall"), model="wide3-shortcut"),
    Case("ep2-allgather", 2, (*EXPERT, "allgather"), model="wide3-shortcut"),
    Case("dp2-distopt", 2, ("--use-distributed-optimizer",), model="wide3-shortcut"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_cases(CASES, tmp_path_factory.mktemp("shortcut-layouts"), STEPS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    found, wanted = results[case.name].losses, results[case.reference].losses
    assert len(found) == len(wanted) == STEPS
    assert wanted[0] - wanted[-1] > 0.1, "the reference does not learn, so equality would show nothing"
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    found, wanted = results[case.name].gradients, results[case.reference].gradients
    compared = {name: gradient for name, gradient in wanted.items() if ".layers.0.residual_read" not in name}
    assert wanted.keys() <= found.keys(), f"no gradient of {sorted(wanted.keys() - found.keys())}"
    assert sum(".shortcut_" in name for name in compared) == 2 * 2, "two pairs have two RMS norms each"
    for name, gradient in compared.items():
        assert gradient.norm() > 0, f"{name} has no gradient to compare"
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= 1e-4, f"{name}: relative error {error:.2e}"
    total = torch.cat([gradient.flatten() for gradient in compared.values()])
    error = (torch.cat([found[name].flatten() for name in compared]) - total).norm() / total.norm()
    assert error <= 1e-5, f"all parameters together: relative error {error:.2e}"
