"""Watches the streams of a model while it trains, and reports every --log-streams-interval steps.

    model_config.pre_wrap_hooks.append(partial(attach_monitor, args=args))      # before the model is wrapped
    apply_patches(PATCHES, replaced)                                            # reports when gradients are reduced

On a step that is reported, activations of the first micro-batch are summed where branches read (samples.py). When the
gradients have been reduced, one all-reduce over all ranks brings the sums, the factors and the gradient norms of every
pipeline stage together; the last rank, which logs, prints and writes them.

What always holds: nothing is computed on other steps and in evaluation; nothing of the run is changed. The factors are
those that the step's forward used. A step that upstream's rerun machine computes again is reported once, the first
time.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron.core.transformer.wide_residual_config import require_wide_residual_config
from megatron.patches import UpstreamPatch
from megatron.training.run_logs.warnings_once import warn_once
from megatron.training.stream_health.branches import StreamBranch, key_order, local_branches
from megatron.training.stream_health.gradients import GradientParts
from megatron.training.stream_health.pictures import heat_map
from megatron.training.stream_health.report import BranchHealth, StreamReport
from megatron.training.stream_health.samples import mean_of, stream_sums, sums_length, token_grams

_MONITOR = "stream_health_monitor"
_KINDS = ("read", "write", "retention")

REPORTS_PER_PICTURE = 10
"""Heat maps are drawn at every tenth report: they cost more than all the numbers."""

_TITLES = {
    "read": "read factors",
    "write": "write factors",
    "retention": "retention",
    "share": "share of the branch input",
    "norm": "root mean square",
}


class StreamMonitor:
    """The streams of one model.

    Args:
        model_chunks: of this rank, not wrapped yet; each a GPT or hybrid model on wide streams.
        args: the run's arguments, whose curr_iteration the trainer keeps.
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module], args: Namespace) -> None:
        self._args = args
        self._interval: int = args.log_streams_interval
        self._groups: Any = unwrap_model(model_chunks[0]).pg_collection
        config = get_model_config(model_chunks[0])
        self._width: int = args.hidden_size  # the config's is the carried one on pipeline stages
        self._streams = require_wide_residual_config(config, "StreamMonitor").num_streams
        self._branches = local_branches(model_chunks)
        self._grams: dict[str, Tensor] = {}
        self._reported = 0  # the last step that was
        everywhere: list[Any] = [None] * torch.distributed.get_world_size()
        local = [(branch.key, sorted(branch.controllers())) for branch in self._branches]
        torch.distributed.all_gather_object(everywhere, local)
        kinds = {key: found for rank in everywhere for key, found in rank}
        self._kinds: dict[str, list[str]] = {key: kinds[key] for key in sorted(kinds, key=key_order)}
        for branch in self._branches:
            branch.watch(self._watcher(branch))

    @property
    def _step(self) -> int:
        """The step that the trainer is in, counted from 1."""
        return int(self._args.curr_iteration) + 1

    def _reports(self) -> bool:
        return self._step % self._interval == 0 and self._step != self._reported

    def _watcher(self, branch: StreamBranch) -> Callable[[torch.nn.Module, Tensor], None]:
        def see(module: torch.nn.Module, x_sbw: Tensor) -> None:
            if module.training and branch.key not in self._grams and self._reports():
                self._grams[branch.key] = token_grams(x_sbw, self._streams)

        return see

    def _table(self, ddp_chunks: Sequence[Any]) -> Tensor:
        """Return this rank's part of the table whose sum over all ranks is the model's: [r, 2K^2 + 1 + 3K + 3]."""
        streams, sums = self._streams, sums_length(self._streams)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        table = torch.zeros(len(self._kinds), sums + 3 * streams + 3, dtype=torch.float64, device=device)
        row_of = {key: row for row, key in enumerate(self._kinds)}
        if self._grams:
            table[[row_of[key] for key in self._grams], :sums] = stream_sums(list(self._grams.values()))
        if self._groups.tp.rank() != 0:
            return table  # a copy of the controllers of tensor rank 0
        copies = self._groups.dp_cp.size()
        gradients = GradientParts(ddp_chunks, copies)
        first = self._groups.dp_cp.rank() == 0
        with torch.no_grad():
            for branch in self._branches:
                row = table[row_of[branch.key]]
                modules = {"read": branch.read, "write": branch.write, "retention": branch.retention}
                for number, kind in enumerate(_KINDS):
                    module = modules[kind]
                    if module is not None and first:
                        row[sums + number * streams : sums + (number + 1) * streams] = module.factors().detach()
                for kind, parameter in branch.controllers().items():
                    row[sums + 3 * streams + _KINDS.index(kind)] = gradients.squared(parameter)
        return table

    def collect(self, ddp_chunks: Sequence[Any]) -> StreamReport:
        """Return the report of this step; collective over all ranks."""
        table = self._table(ddp_chunks)
        self._grams.clear()
        torch.distributed.all_reduce(table)
        scale = self._loss_scale(ddp_chunks)
        rows = [
            self._row(key, kinds, table_row, scale)
            for (key, kinds), table_row in zip(self._kinds.items(), table.cpu().numpy(), strict=True)
        ]
        return StreamReport(self._step, rows)

    def _loss_scale(self, ddp_chunks: Sequence[Any]) -> float:
        """Return what the loss, and so every gradient, was multiplied by (fp16)."""
        scale = get_model_config(ddp_chunks[0]).grad_scale_func
        return float(scale(torch.ones(1, device=torch.cuda.current_device()))) if scale is not None else 1.0

    def _row(self, key: str, kinds: Sequence[str], row: Any, scale: float) -> BranchHealth:
        """Return a branch from its row of the table."""
        streams, sums = self._streams, sums_length(self._streams)
        factors = row[sums : sums + 3 * streams].reshape(3, streams)
        squares = row[sums + 3 * streams :]
        found = {kind: factors[_KINDS.index(kind)].tolist() for kind in kinds}
        norms = {kind: math.sqrt(squares[_KINDS.index(kind)]) / scale for kind in kinds}
        means = mean_of(row[:sums], streams)
        if means is None:
            return BranchHealth(key, **found, gradients=norms)
        gram_kj, cosine_kj = means
        read_k = factors[0]
        parts_k = read_k * (gram_kj @ read_k)
        total = parts_k.sum()
        return BranchHealth(
            key,
            **found,
            norm=[math.sqrt(gram_kj[k, k] / self._width) for k in range(streams)],
            cosines=cosine_kj.tolist(),
            share=(parts_k / total if total > 0 else 0 * parts_k).tolist(),
            gradients=norms,
        )

    def report(self, ddp_chunks: Sequence[Any]) -> None:
        """Report this step if it is one to report; called on every rank once the gradients are reduced."""
        if not self._reports():
            return
        report = self.collect(ddp_chunks)
        self._reported = self._step
        if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
            return
        print(report.line(), flush=True)
        if (warning := report.collapse()) is not None:
            warn_once("stream-collapse", warning)
        from megatron.training.global_vars import get_tensorboard_writer

        writer = get_tensorboard_writer()
        if writer is None:
            return
        writer.add_numbers(report.scalars(), report.step)
        number = report.step // self._interval
        if number % REPORTS_PER_PICTURE == 1 or REPORTS_PER_PICTURE == 1 or report.step == self._args.train_iters:
            self._draw(report, writer)

    @staticmethod
    def _draw(report: StreamReport, writer: Any) -> None:
        for kind, title in _TITLES.items():
            rows = [row for row in report.rows if getattr(row, kind) is not None]
            if rows:
                pixels = heat_map(title, [row.key for row in rows], [getattr(row, kind) for row in rows])
                writer.add_image(f"streams/{kind}", pixels, report.step)


def attach_monitor(model_chunks: list[Any], *, args: Namespace) -> list[Any]:
    """Watch the streams of a model and return it as it is (a pre_wrap_hook of ModelConfig)."""
    if args.log_streams_interval:
        setattr(unwrap_model(model_chunks[0]), _MONITOR, StreamMonitor(model_chunks, args))
    return model_chunks


def _make_finalize(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def finalize_model_grads(model: list[Any], *args: Any, **options: Any) -> Any:
        outcome = upstream(model, *args, **options)
        monitor: StreamMonitor | None = getattr(unwrap_model(model[0]), _MONITOR, None)
        if monitor is not None:
            monitor.report(model)
        return outcome

    return finalize_model_grads


PATCHES = (
    UpstreamPatch(
        module="megatron.training.training",
        name="finalize_model_grads",
        reason="no callback is called between the reduction of gradients and the optimizer, on every rank",
        source_sha256="36d18a1e17302e3439d47454fc661cf41de5704dfeaef00e1f8438e1a420fa4e",
        make=_make_finalize,
    ),
)
