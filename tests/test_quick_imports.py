"""Where the host is the CPU, upstream is imported without PyTorch's compiler, and torch.compile is as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from harness_pretrain import ROOT

SCRIPT = """
import json, sys
import torch
compile = torch.compile
from megatron.cpu.quick_imports import import_upstream
import_upstream()
inductor = "torch._inductor.compile_fx" in sys.modules
import megatron.core.jit
from megatron.core.activations import squared_relu
json.dump({
    "inductor": inductor,
    "compile is as before": torch.compile is compile and megatron.core.jit.jit_fuser is compile,
    "squared_relu is compiled": hasattr(squared_relu, "_torchdynamo_orig_callable"),
    "compiles": torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item(),
}, sys.stdout)
"""


def test_upstream_is_imported_without_inductor_and_torch_compile_stays() -> None:
    environment = {**os.environ, "MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "inductor": False,
        "compile is as before": True,
        "squared_relu is compiled": False,
        "compiles": 1.0,
    }
