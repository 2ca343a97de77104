"""The wide model computes in every parallel layout what it computes on one process, controllers' gradients included.

Real processes, gloo, the real trainer (harness_layouts). Tolerances, relative: fp32 losses 1e-5 over 8 optimizer
steps, gradients of the first step 1e-5 of the parameter's gradient norm, those of controllers 1e-4 (sums over all
tokens of products that nearly cancel); bf16 losses 5e-3 over 8 steps, gradients 5e-2, those of all controllers taken
together 0.1.
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
INTERLEAVED = (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")
OPTIMIZER = ("--use-distributed-optimizer",)
EXPERT = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type")
REPLAY = ("--recompute-granularity", "selective", "--recompute-modules", "residual_stream")
REPLAY_1 = (*REPLAY, "--residual-stream-recompute-num-layers", "1")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")

CASES = (
    Case("tp2", 2, TENSOR, model="wide4"),
    Case("tp2-sp", 2, SEQUENCE, model="wide4"),
    Case("tp2-sp-retention", 2, SEQUENCE, model="wide3-retention"),
    Case("tp2-retention-distopt", 2, (*TENSOR, *OPTIMIZER), model="wide3-retention"),
    Case("pp2", 2, PIPELINE, model="wide4"),
    Case("pp2-vpp2", 2, INTERLEAVED, model="wide4"),
    Case("pp2-layout", 2, (*PIPELINE, "--pipeline-model-parallel-layout", "Et|tttL"), model="wide4"),
    Case("pp2-vpp2-retention-full-recompute", 2, (*INTERLEAVED, *FULL), model="wide3-retention"),
    Case("dp2-distopt", 2, OPTIMIZER, model="wide4"),
    Case("dp2-distopt-retention", 2, OPTIMIZER, model="wide3-retention"),
    Case("ep2-alltoall", 2, (*EXPERT, "alltoall"), model="wide2-moe"),
    Case("ep2-allgather", 2, (*EXPERT, "allgather"), model="wide2-moe"),
    Case("tp2-sp-bf16", 2, SEQUENCE, "bf16", "wide4"),
    Case("pp2-vpp2-bf16", 2, INTERLEAVED, "bf16", "wide4"),
    Case("dp2-distopt-bf16", 2, OPTIMIZER, "bf16", "wide4"),
    Case("pp2-fp32-residual", 2, PIPELINE, "bf16-fp32-residual", "wide4"),
    Case("tp2-sp-replay", 2, (*SEQUENCE, *REPLAY_1), model="wide4"),
    Case("pp2-replay", 2, (*PIPELINE, *REPLAY), model="wide4"),
    Case("pp2-vpp2-replay", 2, (*INTERLEAVED, *REPLAY), model="wide3-retention"),
    Case("ep2-replay", 2, (*EXPERT, "alltoall", *REPLAY_1), model="wide2-moe"),
    Case("dp2-distopt-replay-bf16", 2, (*OPTIMIZER, *REPLAY), "bf16", "wide4"),
)
FIRST_READ = "decoder.layers.0.residual_read_self_attn.read_map.logit"
STREAMS = {"wide4": 4, "wide3-retention": 3, "wide2-moe": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_cases(CASES, tmp_path_factory.mktemp("wide-layouts"), STEPS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wide_losses_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    found, wanted = results[case.name].losses, results[case.reference].losses
    assert len(found) == len(wanted) == STEPS
    assert wanted[0] - wanted[-1] > 0.1, "the reference does not learn, so equality would show nothing"
    assert found == pytest.approx(wanted, rel=1e-5 if case.precision == "fp32" else 5e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wide_gradients_equal_those_of_one_process(results: dict[str, Result], case: Case) -> None:
    found, wanted = results[case.name].gradients, results[case.reference].gradients
    controllers = results[case.reference].controllers
    assert wanted.keys() <= found.keys(), f"no gradient of {sorted(wanted.keys() - found.keys())}"
    assert controllers.keys() <= wanted.keys()
    compared = {name: gradient for name, gradient in wanted.items() if name != FIRST_READ}
    for name, gradient in compared.items():
        assert gradient.norm() > 0, f"{name} has no gradient to compare"
        if case.precision != "fp32" and name in controllers:
            continue
        tolerance = 5e-2 if case.precision != "fp32" else 1e-4 if name in controllers else 1e-5
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: relative error {error:.2e}"
    together = {name: gradient for name, gradient in compared.items() if name in controllers}
    total = torch.cat(list(together.values()))
    error = (torch.cat([found[name] for name in together]) - total).norm() / total.norm()
    assert error <= (1e-5 if case.precision == "fp32" else 0.1), f"all controllers: relative error {error:.2e}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_controllers_learn_and_their_padding_stays_exactly_zero(results: dict[str, Result], case: Case) -> None:
    controllers = results[case.name].controllers
    streams = STREAMS[case.model]
    branches = 4 * 2
    assert len(controllers) == branches * (3 if "retention" in case.model else 2) + 1
    for name, vector in controllers.items():
        assert vector.shape == (128,)
        assert not vector[streams:].any(), f"{name}: the padding is no longer zero after {STEPS} steps"
        assert vector[:streams].any(), f"{name} is all zero"
        gradient = results[case.name].gradients[name]
        assert not gradient[streams:].any(), f"{name}: the padding has a gradient"
