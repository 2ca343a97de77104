"""Every parallel layout computes on the CPU host what one process computes: real processes, gloo, the real trainer.

Stated tolerances, relative: fp32 losses and gradient norms 1e-5, fp32 gradients 1e-5 of the parameter's gradient norm;
bf16 losses 5e-3, norms 5e-2, gradients 4e-2 (a tensor-parallel rank rounds its partial sums to bf16). Losses are those
of three optimizer steps, gradients those of the first.
"""

from __future__ import annotations

import pytest
from harness_layouts import CASES, STEPS, Case, Result, run_cases
from harness_pretrain import TINY_GPT, pretrain

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
NORM_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2}
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 4e-2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_cases(CASES, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    got, wanted = results[case.name], results[case.reference]
    assert len(wanted.losses) == STEPS
    assert wanted.losses[0] - wanted.losses[-1] > 0.01, "the reference does not learn, so equality would show nothing"
    assert got.losses == pytest.approx(wanted.losses, rel=LOSS_TOLERANCE[case.precision])
    assert got.gradient_norms == pytest.approx(wanted.gradient_norms, rel=NORM_TOLERANCE[case.precision])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    got, wanted = results[case.name].gradients, results[case.reference].gradients
    assert wanted.keys() <= got.keys(), f"no gradient of {sorted(wanted.keys() - got.keys())}"
    for name, gradient in wanted.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error <= GRADIENT_TOLERANCE[case.precision], f"{name}: relative error {error:.2e}"


def test_context_parallelism_is_refused_with_a_reason(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Upstream's local attention cannot split a sequence; that is said before anything is built."""
    options = [*TINY_GPT, "--train-iters", "1", "--context-parallel-size", "2"]
    run = pretrain(options, tmp_path_factory.mktemp("cp"), environment={"WORLD_SIZE": "2"}, expect_status=2)
    assert "error: --context-parallel-size 2 needs transformer-engine" in run.log
    assert "Traceback" not in run.log
