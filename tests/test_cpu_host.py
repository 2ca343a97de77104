"""What the CPU host promises: it replaces what it says, and nothing of it is left afterwards."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_pretrain import ROOT, TINY_GPT, pretrain
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.transformer.enums import LayerType
from megatron.training.global_vars import destroy_global_vars

import megatron.cpu.host as host_module
from megatron.cpu.host import HostChoiceError, choose_host, cpu_host, training_host
from megatron.cpu.replacements import Replacements
from megatron.patches import UpstreamChangedError, UpstreamPatch, apply_patches, prebuilt_dataset_helpers
from megatron.training import language_batches
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.pretrain_entry import parse_training_arguments


@pytest.fixture
def host() -> Iterator[None]:
    with cpu_host():
        yield


@pytest.mark.parametrize(
    ("environment", "devices", "expected"),
    [
        ({}, 0, "cpu"),
        ({}, 2, "cuda"),
        ({"MEGATRON_DEVICE": "cpu"}, 0, "cpu"),
        ({"MEGATRON_DEVICE": "cpu"}, 8, "cpu"),
        ({"MEGATRON_DEVICE": "cuda"}, 1, "cuda"),
    ],
)
def test_the_host_follows_the_devices_unless_the_variable_says_otherwise(
    environment: dict[str, str], devices: int, expected: str
) -> None:
    assert choose_host(environment, devices)[0] == expected


@pytest.mark.parametrize(
    ("environment", "devices", "message"),
    [
        ({"MEGATRON_DEVICE": "cuda"}, 0, "no CUDA device"),
        ({"MEGATRON_DEVICE": "tpu"}, 0, "'tpu'.*cuda or cpu"),
        ({"MEGATRON_DEVICE": "CPU"}, 1, "'CPU'.*cuda or cpu"),
    ],
)
def test_an_impossible_choice_is_a_clear_error(environment: dict[str, str], devices: int, message: str) -> None:
    with pytest.raises(HostChoiceError, match=message):
        choose_host(environment, devices)


def _everything_replaceable() -> dict[tuple[str, str], object]:
    """Every attribute of torch, its tensors, torch.cuda and all of upstream's modules and their classes."""
    owners = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.accelerator]
    owners += [torch.utils.data.DataLoader]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and module is not None:
            owners.append(module)
            owners += [value for value in vars(module).values() if isinstance(value, type)]
    return {(repr(owner), name): value for owner in owners for name, value in list(vars(owner).items())}


def test_everything_replaced_is_put_back() -> None:
    with cpu_host():
        pass  # imports what the host imports, and fills caches
    before = _everything_replaceable()
    environment, filters = dict(os.environ), list(logging.getLogger("megatron.core.tensor_parallel.random").filters)
    with cpu_host():
        during = _everything_replaceable()
        changed = [key for key, value in during.items() if before.get(key) is not value]
    after = _everything_replaceable()
    assert len(changed) > 80, f"the test saw only {len(changed)} replacements"
    assert after.keys() == before.keys(), f"left or lost: {sorted(map(str, after.keys() ^ before.keys()))}"
    different = [key for key in before if before[key] is not after[key] and "_cpu_host_is_in_use" not in key]
    assert not different, f"not the objects that stood there before: {different}"
    assert dict(os.environ) == environment
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == filters


def test_everything_is_put_back_after_an_error() -> None:
    synchronize, to = torch.cuda.synchronize, torch.Tensor.to
    with pytest.raises(ZeroDivisionError), cpu_host():
        _ = 1 / int(torch.cuda.synchronize is synchronize)  # 1 / 0: it stands replaced here
    assert torch.cuda.synchronize is synchronize
    assert torch.Tensor.to is to


def test_entering_the_host_twice_is_refused(host: None) -> None:
    with pytest.raises(RuntimeError, match="in use already"), cpu_host():
        pass


def test_with_a_gpu_nothing_at_all_is_replaced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Only the number of devices that the choice reads is made up; the host itself is the real one."""
    monkeypatch.delenv("MEGATRON_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    before = _everything_replaceable()
    with training_host() as chosen:
        assert chosen == "cuda"
        during = _everything_replaceable()
        assert [key for key in during if before.get(key) is not during[key]] == []
    assert "> host: cuda (4 CUDA devices)" in capsys.readouterr().out


def test_one_line_on_rank_0_says_which_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("MEGATRON_DEVICE", "cpu")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with training_host() as chosen:
            assert chosen == "cpu"
        assert capsys.readouterr().out.count("> host: cpu (MEGATRON_DEVICE=cpu") == lines


def test_cuda_stays_unavailable(host: None) -> None:
    assert torch.cuda.is_available() is False
    assert torch.accelerator.is_available() is False
    assert torch.cuda.device_count() == 1


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 1)], ids=str)
def test_every_name_of_the_cuda_device_is_the_cpu(host: None, device: Any) -> None:
    tensors = [
        torch.empty(2, device=device),
        torch.tensor([1.0], device=device),
        torch.arange(3, device=device),
        torch.zeros_like(torch.ones(2), device=device),
        torch.ones(2).new_zeros(2, device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device, dtype=torch.bfloat16),
        torch.ones(2).cuda(),
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2).cuda().weight,
    ]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_other_devices_and_dtypes_pass_through(host: None) -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    assert torch.ones(2).to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert torch.ones(2).type(torch.float64).dtype == torch.float64
    assert torch.ones(2).type() == "torch.cuda.FloatTensor", "upstream's optimizers know a parameter by this name"


def test_memory_answers_are_those_of_this_process(host: None) -> None:
    before = torch.cuda.memory_allocated()
    # Memory of its own from the kernel: malloc may hold as much already, freed by another test.
    block = torch.frombuffer(mmap.mmap(-1, 64 * 2**20), dtype=torch.uint8).fill_(1)
    after = torch.cuda.memory_allocated()
    assert 48 * 2**20 < after - before < 200 * 2**20, f"64 MiB more, {(after - before) / 2**20:.0f} MiB reported"
    assert torch.cuda.max_memory_allocated() >= after
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= after
    del block
    assert torch.cuda.max_memory_allocated() >= after, "a peak does not fall"


def test_the_data_loader_leaves_the_models_generator_alone(host: None) -> None:
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(3)))
    torch.manual_seed(3)
    undisturbed = torch.rand(4)
    torch.manual_seed(3)
    list(loader)
    list(loader)
    assert torch.equal(torch.rand(4), undisturbed)


def test_the_rng_tracker_forks_the_generator_that_dropout_draws_from(
    host: None, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.manual_seed(5)
    undisturbed = torch.rand(4)
    torch.cuda.manual_seed(5)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 99)
    with tracker.fork():
        first = torch.nn.functional.dropout(torch.ones(64))
    with tracker.fork():
        second = torch.nn.functional.dropout(torch.ones(64))
    assert torch.equal(torch.rand(4), undisturbed), "a fork moved the generator outside it"
    assert not torch.equal(first, second), "a fork does not go on where the last one ended"
    torch.manual_seed(99)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64)), first)
    assert "CPU RNG state changed" not in caplog.text


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_the_torch_norm_serves_sequence_parallelism(host: None, normalization: str) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    def norm(sequence_parallel: bool) -> torch.nn.Module:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            normalization=normalization,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
        )
        return WrappedTorchNorm(config=config, hidden_size=8, eps=1e-3)

    x_sbd = torch.randn(3, 2, 8)
    assert torch.equal(norm(True)(x_sbd), norm(False)(x_sbd))
    assert [vars(parameter)["sequence_parallel"] for parameter in norm(True).parameters()].count(False) == 0
    assert type(norm(True)) is type(norm(False))


def test_a_patch_of_another_upstream_source_is_refused() -> None:
    good = prebuilt_dataset_helpers.PATCH
    stale = UpstreamPatch(good.module, good.name, good.reason, "0" * 64, good.make)
    with Replacements() as replaced, pytest.raises(UpstreamChangedError, match=r"compile_helpers.*constraints\.txt"):
        apply_patches((stale,), replaced)
    assert good.owner()[0].compile_helpers.__name__ == "compile_helpers"


def test_a_run_logs_memory_and_compiles_nothing(tmp_path: Path) -> None:
    """PATH without make or a compiler: the shipped helper serves, and no fused function is compiled."""
    (tmp_path / "bin").mkdir()
    options = [*TINY_GPT, "--train-iters", "2", "--log-memory-to-tensorboard", "--swiglu"]
    run = pretrain(options, tmp_path, environment={"PATH": str(tmp_path / "bin"), "CXX": "/nonexistent"})
    line = next(line for line in run.log.splitlines() if "memory (MB) | allocated:" in line)
    allocated, peak = (float(line.split(f"{name}: ")[1].split(" |")[0]) for name in (" allocated", "max allocated"))
    assert 100 < allocated <= peak + 0.01, line
    assert "> host: cpu" in run.log


def test_a_default_changes_only_where_something_is_absent_and_never_a_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT, "--train-iters", "1", "--no-rope-fusion"])
    monkeypatch.setenv("RANK", "0")
    try:
        args = parse_training_arguments("cpu")
    finally:
        destroy_global_vars()
        destroy_num_microbatches_calculator()
    assert (args.transformer_impl, args.distributed_backend, args.bias_gelu_fusion) == ("local", "gloo", False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("> defaults for this machine:")]
    assert len(lines) == 1
    assert "--transformer-impl local (no transformer-engine)" in lines[0]
    assert "--distributed-backend gloo (no GPU)" in lines[0]


_ENGINE = "needs transformer-engine"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--transformer-impl", "transformer_engine"], f"--transformer-impl transformer_engine {_ENGINE}"),
        (["--distributed-backend", "nccl"], "--distributed-backend nccl needs a GPU"),
        (["--fp8-format", "hybrid"], f"--fp8-format {_ENGINE}"),
        (["--context-parallel-size", "2"], f"--context-parallel-size 2 {_ENGINE}"),
        (["--multi-latent-attention"], f"--multi-latent-attention {_ENGINE}"),
        (["--save-activations-interval", "2"], f"--save-activations-interval {_ENGINE}"),
        (["--save-dgrads-interval", "2"], f"--save-dgrads-interval {_ENGINE}"),
        (["--freeze-all-layers"], "--freeze-all-layers is not served"),
        (["--rampup-batch-size", "2", "2", "8"], "--rampup-batch-size is not served"),
        (["--openai-gelu"], "--openai-gelu is not served"),
        (["--onnx-safe", "1"], "--onnx-safe is not served"),
        (["--use-kitchen-attention"], "--use-kitchen-attention changes nothing without --kitchen-config-file"),
        (["--first-last-layers-bf16"], "--first-last-layers-bf16 keeps layers of FP8 or FP4 training in bf16"),
        (["--use-te-activation-func"], f"--use-te-activation-func {_ENGINE}"),
        (["--full-validation"], "--full-validation ends with an error at an evaluation"),
        (["--recompute-modules", "layernorm"], f"--recompute-modules layernorm {_ENGINE}"),
        (["--recompute-modules", "mlp"], "--recompute-modules mlp recurses for ever with linear biases"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_explicit_option_that_cannot_work_is_refused(
    option: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT, "--train-iters", "1", *option])
    with pytest.raises(LocalChoiceError, match=message):
        parse_training_arguments("cpu")


def test_help_works_without_a_gpu() -> None:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--num-layers" in done.stdout
    assert "--wide-residual" in done.stdout


def test_the_host_module_imports_without_torch() -> None:
    """The choice costs nothing before it is made: importing it must not load torch."""
    code = "import sys, megatron.cpu.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    assert host_module.DEVICE_VARIABLE == "MEGATRON_DEVICE"


def test_prediction_depths_beside_an_fp32_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are ordinary layers beside wide streams too, and torch's norms take no fp32 stream with bf16 weights."""
    depths = ["--mtp-num-layers", "1", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"]
    wide = ["--wide-residual", "4", "--bf16", "--fp32-residual-connection", "--train-iters", "1"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT, *wide, *depths])
    with pytest.raises(LocalChoiceError, match="multi-token prediction needs transformer-engine"):
        parse_training_arguments("cpu")


def test_the_batches_read_a_pipeline_layout_as_the_model_does() -> None:
    layout = language_batches._pipeline_layout("Et|tttL", 2)
    assert layout is not None
    assert [chunk.count(LayerType.decoder) for stage in layout.layout for chunk in stage] == [1, 3]
    assert language_batches._pipeline_layout(None, 2) is None
