"""The Triton kernels compile for GPUs, on hosts without one too, and never for a batch size.

pytest tests/test_streamwise_triton_compiled.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron.core.fusions import streamwise_triton_norm as norms, streamwise_triton_read as reads
from megatron.core.fusions import streamwise_triton_write as writes

INTEGERS = ("n", "inner", "tiles")
FP32 = ("read_ptr", "write_ptr", "retention_ptr", "partial_ptr", "norm_partial_ptr", "mean_ptr", "scale_ptr")

def compiled(kernel, constants):
    kernel = kernel.fn if isinstance(kernel, triton.runtime.Autotuner) else kernel
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS:
            signature[name] = "i32"
        else:
            pointer = name.endswith("_ptr")
            kind = "*i64" if name == "seed_ptr" else "*fp32" if name in FP32 else "*bf16"
            signature[name] = kind if pointer else "i32"
            aligned[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]

shape = {"D": 1024, "K": 2, "ACC": tl.float32, "READ_KIND": 1, "BN": 1, "BD": 1024}
write = {"WRITE_KIND": 2, "RETENTION_KIND": 3, "MAX_FORGET": 0.1, "HAS_RETENTION": True, "HAS_READ": True,
         "HAS_BIAS": True, "THRESHOLD": 429496730, "SCALE": 1 / 0.9}
wants = dict.fromkeys(("WANTS_X", "WANTS_U", "WANTS_WRITE", "WANTS_RETENTION"), True)
del (update := dict(write))["HAS_READ"]
norm = {"IS_LAYER_NORM": True}
for kernel, constants in (
    (reads.read_forward, {**shape, "MANY": True}),
    (reads.read_backward, {**shape, "WANTS_X": True, "WANTS_READ": True, "THROUGH": True}),
    (writes.write_forward, {**shape, **write, "MANY": True}),
    (writes.write_backward, {**shape, **write, **wants}),
    (norms.read_norm_forward, {**shape, **norm, "EPS": 1e-5}),
    (norms.read_norm_backward, {**shape, **norm, "THROUGH": True, "STEPS": 16}),
    (norms.write_read_norm_forward, {**shape, **update, **norm, "EPS": 1e-5}),
    (norms.write_read_norm_backward, {**shape, **update, **norm, "STEPS": 16}),
):
    ptx = compiled(kernel, constants)
    wide = len(re.findall(r"(?:ld|st)\\.global\\S*\\.v4\\.b32", ptx))
    narrow = len(re.findall(r"(?:ld|st)\\.global\\S*\\.(?:b16|u16)", ptx))
    print("KERNEL", wide, narrow, "atom" in ptx or "red.global" in ptx)
"""


def test_kernels_compile_for_hopper_with_16_byte_accesses_and_no_atomics() -> None:
    pytest.importorskip("triton", reason="triton comes with PyTorch on Linux alone")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("KERNEL")]
    assert len(lines) == 8
    for wide, narrow, atomics in lines:
        assert int(wide) > 0, "no access of 16 bytes"
        assert int(narrow) == 0, "elements of a row are accessed one by one"
        assert atomics == "False", "an atomic sum would depend on the order of programs"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts compilations on a GPU")
def test_another_number_of_tokens_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_STREAMWISE_BACKEND", "triton")
    from megatron.core.fusions.streamwise_triton_read import read_backward, read_forward
    from megatron.core.transformer.streamwise_residual_ops import streamwise_sigmoid_read

    logits = torch.zeros(128, device="cuda", requires_grad=True)
    kernels = (read_forward.fn, read_backward)

    def compilations() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def run(tokens: int) -> None:
        x = torch.randn(tokens, 4 * 256, device="cuda", requires_grad=True)
        streamwise_sigmoid_read(x, logits, 4).sum().backward()

    run(16)
    before = compilations()
    for tokens in (1, 3, 17, 1000, 4097):
        run(tokens)
    assert compilations() == before
