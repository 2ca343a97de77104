"""tools/stream_cases.py: everything that is timed side by side does the same job.

    pytest tests/test_stream_cases.py

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from stream_cases import Operators, Shape, operator_cases, package_modules, step_cases, using_backend

BACKENDS = ["naive", "eager", "compiled"]
SHAPE = Shape(4, 24, 10, torch.float32)


def test_every_backend_gives_the_results_and_gradients_of_the_plain_formula() -> None:
    found: dict[tuple[str, str, bool], list[tuple[torch.Tensor, ...]]] = {}
    for case in [*operator_cases(SHAPE, BACKENDS, retention=True), *step_cases(SHAPE, BACKENDS, package=False)]:
        with using_backend(case.backend):
            result = case.run()
        results = result if isinstance(result, tuple) else (result,)
        found.setdefault((case.op, case.direction, case.retention), []).append(results)
    assert len(found) == 9
    for name, (plain, *others) in found.items():
        assert len(others) == len(BACKENDS) - 1
        for other in others:
            for one, two in zip(plain, other, strict=True):
                assert torch.allclose(two, one, rtol=1e-4, atol=1e-5), f"{name}: {(two - one).abs().max()} apart"


def test_a_compiled_plain_formula_gives_the_formula() -> None:
    x, u, logits = torch.randn(10, 96), torch.randn(10, 24), torch.randn(128)
    plain, compiled = Operators("naive", 4), Operators("inductor", 4)
    torch.testing.assert_close(compiled.write(x, u, logits), plain.write(x, u, logits))


def test_a_backend_is_used_inside_its_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("MEGATRON_STREAMWISE_BACKEND", "compiled")
    with using_backend("eager"):
        assert os.environ["MEGATRON_STREAMWISE_BACKEND"] == "eager"
    assert os.environ["MEGATRON_STREAMWISE_BACKEND"] == "compiled"


def test_the_static_variant_is_what_the_package_computes_at_its_start() -> None:
    pytest.importorskip("hyper_connections", reason="an extra: pip install -c constraints.txt -e '.[benchmarks]'")
    modules = package_modules(SHAPE)
    x_knd = torch.randn(4, 10, 24)
    dynamic, static = (modules[f"hyper-connections {name}"] for name in ("dynamic", "static"))
    torch.testing.assert_close(static(x_knd), dynamic(x_knd))
