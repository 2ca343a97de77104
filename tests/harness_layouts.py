"""Train the same model in many parallel layouts and record what each one computed.

A case is a row of `CASES`: model (a row of `MODELS`), precision, number of processes and the layout's flags.
`run_cases(cases, folder)` launches one process for what every case is compared with, then one launch per process count
that runs its cases one after another, each through the real trainer (`megatron.training.pretrain_entry.train`):

    results = run_cases(CASES, tmp_path)
    results["tp2-sp-fp32"].losses      results["tp2-sp-fp32"].gradients["decoder.layers.0.mlp.linear_fc1.weight"]
    results[CASES[0].reference]        # the same model on one process, with the same number of samples a step

To add a model: put its flags into `MODELS` and rows into the table that you pass; a layout that needs another flag for
that model takes it in `flags`. Models with a --hybrid-layer-pattern are trained as pretrain_mamba.py does.

What always holds: a case and its reference load the same weights from one torch_dist checkpoint and see the same
samples in every step; a gradient is the whole parameter's, put together from all ranks after `finalize_model_grads`,
under the name that the parameter has in the one-process model. Dropout is 0, because layouts draw different masks.

As a script (what `run_cases` launches): harness_layouts.py PLAN.json on every rank, one JSON and one .pt file a case.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness_preloaded import run_preloaded_ranks

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
GLOBAL_BATCH = 4

BASE = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", str(GLOBAL_BATCH)),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--init-method-std", "0.1", "--seed", "11"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"),
    *("--make-vocab-size-divisible-by", "64", "--lr-decay-style", "constant", "--clip-grad", "1.0"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--no-save-optim", "--no-save-rng"),
]
TRAIN = ["--lr", "0.001", "--min-lr", "0.001", "--weight-decay", "0.1", "--train-iters"]
START = ["--train-iters", "1", "--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--save-interval", "1"]

MODELS: dict[str, list[str]] = {
    # Learned positions, LayerNorm, biases, tied embeddings, grouped-query attention.
    "dense": ["--group-query-attention", "--num-query-groups", "2"],
    # RoPE, RMSNorm, SwiGLU without biases, untied embeddings.
    "llama": [
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        "--untie-embeddings-and-output-weights",
    ],
    "moe": [
        *("--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none"),
        *("--normalization", "RMSNorm", "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
    ],
}
# Streams that differ clearly from the first step on, so that every controller has a gradient worth comparing.
_WIDE = ["--wide-residual-streamwise-sigmoid-init-scale", "1.0", "--wide-residual"]
_RETENTION = ["--wide-residual-learned-retention", "--wide-residual-retention-init", "0.97"]
MODELS["wide4"] = [*MODELS["dense"], *_WIDE, "4"]
MODELS["wide3-retention"] = [*MODELS["llama"], *_WIDE, "3", *_RETENTION]
MODELS["wide2-moe"] = [*MODELS["moe"], *_WIDE, "2"]
MODELS["hybrid"] = [
    *("--hybrid-layer-pattern", "M*-E", "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--moe-router-load-balancing-type", "none", "--moe-token-dispatcher-type", "alltoall"),
    *("--mamba-head-dim", "16", "--mamba-state-dim", "16", "--mamba-num-groups", "2", "--normalization", "RMSNorm"),
    *("--moe-shared-expert-intermediate-size", "64"),
]
MODELS["wide4-hybrid"] = [*MODELS["hybrid"], *_WIDE, "4"]
MODELS["wide4-shortcut"] = [*MODELS["wide4-hybrid"], "--moe-shortcut-connection"]
MODELS["wide3-hybrid-mtp"] = [
    *MODELS["hybrid"],
    *(*_WIDE, "3", *_RETENTION, "--hybrid-layer-pattern", "M*-E/M*"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
]
MODELS["wide2-mtp"] = [*MODELS["llama"], *_WIDE, "2", "--mtp-num-layers", "1"]
PRECISIONS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    "bf16-fp32-residual": ["--bf16", "--fp32-residual-connection"],
}


@dataclass(frozen=True)
class Case:
    """One layout of one model: `flags` are the options that a user would give to get it."""

    name: str
    world_size: int
    flags: Sequence[str]
    precision: str = "fp32"
    model: str = "dense"

    @property
    def reference(self) -> str:
        """Name of the one-process result that this case is compared with."""
        return f"reference-{self.model}-{self.precision}"


@dataclass
class Result:
    """What a case computed: loss and gradient norm of every step, all gradients of the first step, and the padded
    controllers of a wide model after the last."""

    losses: list[float]
    gradient_norms: list[float]
    gradients: dict[str, Any] = field(repr=False, default_factory=dict)
    controllers: dict[str, Any] = field(repr=False, default_factory=dict)


_TP = ("--tensor-model-parallel-size", "2")
_PP = ("--pipeline-model-parallel-size", "2")
_EP = ("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type")
_LAYOUTS: tuple[tuple[str, str, Sequence[str]], ...] = (
    ("tp2", "dense", _TP),
    ("tp2-sp", "dense", (*_TP, "--sequence-parallel")),
    ("tp2-sp-llama", "llama", (*_TP, "--sequence-parallel")),
    ("pp2", "dense", _PP),
    ("pp2-vpp2", "dense", (*_PP, "--num-virtual-stages-per-pipeline-rank", "2")),
    ("dp2", "dense", ()),
    ("dp2-distopt", "dense", ("--use-distributed-optimizer",)),
    ("ep2-allgather", "moe", (*_EP, "allgather")),
    ("ep2-alltoall", "moe", (*_EP, "alltoall")),
)
CASES: tuple[Case, ...] = tuple(
    Case(f"{name}-{precision}", 2, flags, precision, model)
    for name, model, flags in _LAYOUTS
    for precision in ("fp32", "bf16")
)


def run_cases(cases: Iterable[Case], folder: Path, steps: int = STEPS) -> dict[str, Result]:
    """Run the cases and their references; results by name. Raises AssertionError with the log's end when one fails."""
    cases = list(cases)
    train = [*TRAIN, str(steps)]
    start: list[dict[str, Any]] = []
    for reference, model, precision in sorted({(case.reference, case.model, case.precision) for case in cases}):
        base = BASE + MODELS[model] + PRECISIONS[precision]
        weights = str(folder / f"weights-{model}-{precision}")
        start.append({"name": f"start-{model}-{precision}", "argv": [*base, *START, "--save", weights]})
        start.append({"name": reference, "argv": base + train + _load(model, precision, folder)})
    launch_entries(1, start, folder)
    for world_size in sorted({case.world_size for case in cases}):
        entries = [
            {
                "name": case.name,
                "argv": [
                    *(*BASE, *MODELS[case.model], *PRECISIONS[case.precision], *train, *case.flags),
                    *_load(case.model, case.precision, folder),
                ],
            }
            for case in cases
            if case.world_size == world_size
        ]
        launch_entries(world_size, entries, folder)
    names = [case.name for case in cases] + [case.reference for case in cases]
    return {name: read_result(name, folder) for name in names}


def _load(model: str, precision: str, folder: Path) -> list[str]:
    weights = str(folder / f"weights-{model}-{precision}")
    return ["--load", weights, "--finetune", "--no-load-optim", "--no-load-rng", "--exit-on-missing-checkpoint"]


def launch_entries(world_size: int, entries: list[dict[str, Any]], folder: Path) -> None:
    """Run one plan on `world_size` processes."""
    plan = folder / f"plan-{world_size}-{entries[0]['name']}.json"
    plan.write_text(json.dumps({"folder": str(folder), "entries": entries}))
    log = folder / f"{plan.stem}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    status = run_preloaded_ranks(world_size, [__file__, str(plan)], environment, ROOT, log)
    assert status == 0, f"{plan.stem} failed:\n{_first_failure(log.read_text())}"


def _first_failure(text: str) -> str:
    """What the ranks printed around the first traceback."""
    at = text.find("Traceback (most recent call last)")
    start = text.rfind("\n==== ", 0, at) if at >= 0 else -1
    entry = text[start + 1 :].partition("\n")[0] if start >= 0 else "(no entry had begun)"
    return f"{entry}\n{text[max(at - 500, 0) : at + 5000]}" if at >= 0 else text[-6000:]


def read_result(name: str, folder: Path) -> Result:
    """Return what an entry of a plan computed."""
    import torch

    numbers = json.loads((folder / f"{name}.json").read_text())
    return Result(**numbers, **torch.load(folder / f"{name}.pt"))


# ---- inside the launched processes ----


class Recorder:
    """Notes what a Result holds."""

    def __init__(self) -> None:
        self.result = Result([], [])

    def watch(self, training: Any) -> None:
        """Observe the trainer's own `train_step` and `finalize_model_grads`; both still run."""
        train_step, finalize = training.train_step, training.finalize_model_grads

        # Wrapped as copies of what they observe, so that a patch of upstream's functions knows these too.
        @functools.wraps(train_step)
        def observed_step(*args: Any, **kwargs: Any) -> Any:
            outcome = train_step(*args, **kwargs)
            self.result.losses.append(_last_rank_value(outcome[0].get("lm loss")))
            self.result.gradient_norms.append(float(outcome[5]))
            self.result.controllers = whole_controllers(args[2])
            return outcome

        @functools.wraps(finalize)
        def observed_finalize(model: list[Any], *args: Any, **kwargs: Any) -> Any:
            outcome = finalize(model, *args, **kwargs)
            if not self.result.gradients:
                self.result.gradients = whole_gradients(model)
            return outcome

        training.train_step, training.finalize_model_grads = observed_step, observed_finalize

    def write(self, name: str, folder: Path) -> None:
        import torch

        numbers = asdict(self.result)
        torch.save({part: numbers.pop(part) for part in ("gradients", "controllers")}, folder / f"{name}.pt")
        (folder / f"{name}.json").write_text(json.dumps(numbers))


def _last_rank_value(loss: Any) -> float:
    """The loss that the last pipeline stage has, on every rank."""
    import torch

    value = torch.zeros(1, dtype=torch.float64) if loss is None else loss.detach().double().reshape(1)
    torch.distributed.broadcast(value, torch.distributed.get_world_size() - 1)
    return value.item()


def whole_gradients(model: list[Any]) -> dict[str, Any]:
    """Gradients of all ranks by the parameter's one-process name, tensor-parallel shards joined (fp32, on rank 0)."""
    import torch
    from megatron.core.utils import unwrap_model

    for chunk in model:
        _gather_optimizer_shards(chunk)
    local = {}
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            local[_one_process_name(chunk, name)] = _join_tensor_parallel(parameter)
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, local)
    return {name: gradient for rank in reversed(gathered) for name, gradient in rank.items()}


def whole_controllers(model: list[Any]) -> dict[str, Any]:
    """The padded controllers of all ranks by their one-process name; ranks that hold the same one must agree."""
    import torch
    from megatron.core.utils import unwrap_model

    local = {
        _one_process_name(chunk, name): parameter.detach().clone()
        for chunk in unwrap_model(model)
        for name, parameter in chunk.named_parameters()
        if hasattr(parameter, "residual_controller")
    }
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, local)
    whole: dict[str, Any] = {}
    for rank, controllers in enumerate(gathered):
        for name, vector in controllers.items():
            assert torch.equal(whole.setdefault(name, vector), vector), f"rank {rank} has another {name}"
    return whole


def _gather_optimizer_shards(chunk: Any) -> None:
    """With the distributed optimizer each rank holds the reduced gradients of its share of a bucket only."""
    import torch

    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        if not buffer.ddp_config.use_distributed_optimizer:
            continue
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            share = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=group)


def _one_process_name(chunk: Any, name: str) -> str:
    """The parameter's name with global layer and expert numbers."""
    from megatron.core import parallel_state

    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part == "layers" and parts[:i] == ["decoder"]:
            parts[i + 1] = str(chunk.decoder.layers[int(parts[i + 1])].layer_number - 1)
        if part == "local_experts":
            per_rank = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
            parts[i + 1] = str(int(parts[i + 1]) + per_rank * parallel_state.get_expert_model_parallel_rank())
    return ".".join(parts)


def _join_tensor_parallel(parameter: Any) -> Any:
    """The parameter's whole gradient in fp32."""
    import torch

    from megatron.core import parallel_state

    gradient = parameter.main_grad.detach().float().clone()
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return gradient
    shards = [torch.empty_like(gradient) for _ in range(group.size())]
    torch.distributed.all_gather(shards, gradient, group=group)
    dim = parameter.partition_dim
    if hasattr(parameter, "partition_sizes"):  # several projections in one weight, each split over the ranks
        pieces = [shard.split(list(parameter.partition_sizes), dim) for shard in shards]
        return torch.cat([piece[i] for i in range(len(pieces[0])) for piece in pieces], dim)
    stride = getattr(parameter, "partition_stride", 1)
    # With a stride of 2 (gate and up projection in one weight) each shard holds a piece of both.
    pieces = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([piece[i] for i in range(stride) for piece in pieces], dim)


def _run_entry(entry: dict[str, Any], folder: Path, store: Any) -> None:
    import megatron.training.training as training
    import torch

    from megatron.training.model_kinds import MODEL_KINDS
    from megatron.training.pretrain_entry import train

    saved = training.train_step, training.finalize_model_grads
    recorder = Recorder()
    recorder.watch(training)
    kind = "hybrid" if "--hybrid-layer-pattern" in entry["argv"] else "gpt"
    # Without worker processes: forked from a process with the threads of earlier entries, one has ended in a segfault.
    sys.argv = ["pretrain", *entry["argv"], "--num-workers", "0"]
    rank = int(os.environ["RANK"])
    try:
        train("cpu", MODEL_KINDS[kind], store=torch.distributed.PrefixStore(entry["name"], store))
    finally:
        training.train_step, training.finalize_model_grads = saved
    training.destroy_global_state()
    if rank == 0:
        recorder.write(entry["name"], folder)


def main() -> None:
    """Run the plan named on the command line."""
    import traceback

    import torch

    from megatron.cpu.host import training_host
    from megatron.cpu.quick_imports import import_upstream

    import_upstream()
    plan = json.loads(Path(sys.argv[1]).read_text())
    store, _, _ = next(torch.distributed.rendezvous("env://"))
    with training_host():
        for entry in plan["entries"]:
            print(f"==== {entry['name']}", flush=True)
            try:
                _run_entry(entry, Path(plan["folder"]), store)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)  # the other ranks wait in a collective: they are killed then


if __name__ == "__main__":
    main()
