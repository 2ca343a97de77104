#!/usr/bin/env python3
"""Plans, runs and reports an ablation: one YAML names a base recipe, axes and seeds.

    python tools/ablate.py plan scripts/ablations/quickstart_gpt.yaml
    python tools/ablate.py run scripts/ablations/quickstart_gpt.yaml --parallel 2
    python tools/ablate.py run scripts/ablations/gpt_1b_streams.yaml --slurm -- --gpus-per-node=8
    python tools/ablate.py report scripts/ablations/quickstart_gpt.yaml --output docs/results/quickstart_gpt

`plan` prints the runs, what differs between them, parameters, tokens and cost. `run` launches what is not finished,
here or as a SLURM job array (options of sbatch behind --), and can be interrupted and started again at any moment.
`report` writes report.md, results.csv, differences.csv and pictures: mean and spread over seeds, and paired differences
against the reference with 95 % intervals. docs/ablate.md describes the YAML.

What always holds: a finished run is never run again; a folder whose flags are not the YAML's is refused by name; a run
that is missing, unfinished or unreadable is named by the report. Exit status: 0 done; 1 a run failed, is missing or
unfinished, or none has finished; 2 bad input or an unreadable run; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections import defaultdict
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_pipe import run_tool
from compare_runs import Run, RunError, read_run

from megatron.ablations.description import Ablation, load_ablation
from megatron.ablations.state import ablation_lock, check_folders, damage_of, other_folders, state_of
from megatron.run_control.errors import LaunchError, said

ROOT = Path(__file__).resolve().parents[1]


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("a name is wanted, it is empty")
    return Path(text)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    description, _, details = (__doc__ or "").partition("\n")
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, epilog=details, formatter_class=style, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="plan|run|report")
    plan = commands.add_parser("plan", help="print the runs and their cost", allow_abbrev=False)
    run = commands.add_parser("run", help="launch what is not finished", allow_abbrev=False)
    report = commands.add_parser("report", help="write tables and pictures", allow_abbrev=False)
    for command in (plan, run, report):
        command.add_argument("file", type=_path, metavar="YAML", help="the ablation, scripts/ablations/*.yaml")
    plan.add_argument("--flags", action="store_true", help="print every flag of every variant, not only what differs")
    run.add_argument("--parallel", type=int, default=None, metavar="N", help="runs at a time (default: 1; SLURM: all)")
    run.add_argument("--slurm", action="store_true", help="submit a job array; options of sbatch go behind --")
    report.add_argument("--output", type=_path, metavar="DIR", help="where to write (default: report/ beside the runs)")
    report.add_argument(
        "--partial", action="store_true", help="exit 0 although runs are missing, and leave out unreadable ones"
    )
    report.add_argument(
        "--tail", type=int, default=10, metavar="N", help="train loss: mean of N last steps (default: 10)"
    )
    report.add_argument("--note", default="", metavar="TEXT", help="a paragraph for the report: machine, date, caveats")
    words = list(sys.argv[1:] if argv is None else argv)
    own, sbatch = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    args = parser.parse_args(own)
    args.sbatch = sbatch
    if args.command == "run" and args.parallel is not None and args.parallel < 1:
        parser.error(f"--parallel {args.parallel}: a whole number from 1 is wanted")
    if sbatch and not getattr(args, "slurm", False):
        parser.error(f"{shlex.join(sbatch)} behind --: options of sbatch, which only run --slurm takes")
    if args.command == "report" and args.tail < 1:
        parser.error(f"--tail {args.tail}: at least 1")
    return args


def measured_runs(ablation: Ablation, tail: int) -> tuple[dict[str, Run], dict[str, str]]:
    """What the finished runs logged, by name, and why others cannot be read, by name."""
    found, unreadable = {}, {}
    for run in ablation.runs:
        damage = damage_of(run)
        if damage is not None:
            unreadable[run.name] = damage
        elif state_of(run) == "finished":
            try:
                found[run.name] = read_run(run.folder, run.name, tail)
            except (RunError, OSError) as error:
                unreadable[run.name] = str(error)
    return found, unreadable


def plan_command(args: argparse.Namespace, ablation: Ablation) -> int:
    """Print runs and cost."""
    from megatron.ablations.cost import variant_costs
    from megatron.ablations.plan_table import print_plan

    speeds = defaultdict(list)
    measured, unreadable = measured_runs(ablation, 1)
    for run in ablation.runs:
        if run.name in measured and measured[run.name].tokens_per_second:
            speeds[run.variant.name].append(measured[run.name].tokens_per_second or 0.0)
    means = {name: statistics.fmean(values) for name, values in speeds.items()}
    print_plan(ablation, variant_costs(ablation, ROOT, means), args.flags)
    for name, reason in unreadable.items():
        print(f"note: {name} cannot be read and says nothing of speed: {reason}")
    return 0


def run_command(args: argparse.Namespace, ablation: Ablation) -> int:
    """Launch what is not finished."""
    from megatron.ablations.runner import Runner
    from megatron.ablations.slurm_array import queued, submit

    check_folders(ablation)
    if os.environ.get("WANDB_RUN_ID") and any("wandb-project" in run.recipe.flags for run in ablation.runs):
        raise LaunchError("WANDB_RUN_ID is set: all runs would be one wandb run; unset it")
    with ablation_lock(ablation):
        if args.slurm:
            job, runs = submit(ablation, ROOT, args.parallel, args.sbatch)
            print(f"submitted {len(runs)} runs as job {job}" if runs else "nothing to submit: all finished or queued")
            return 0
        elsewhere = queued(ablation)
        for name, element in elsewhere.items():
            print(f"{name}: left out, it is in SLURM's queue as {element}")
        status, failed = Runner(ablation, ROOT, args.parallel or 1, tuple(elsewhere)).run()
    if failed:
        print(f"error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return status


def report_command(args: argparse.Namespace, ablation: Ablation) -> int:
    """Write tables and pictures."""
    from megatron.ablations.plots import draw
    from megatron.ablations.report import Report, write_report

    check_folders(ablation, but_damaged=True)
    measured, unreadable = measured_runs(ablation, args.tail)
    for name, reason in unreadable.items():
        if not args.partial:
            raise LaunchError(
                f"{name} cannot be read: {reason}. Mend or remove its folder, or leave it out by --partial"
            )
    states = {run.name: state_of(run) for run in ablation.runs}
    states |= {name: f"unreadable: {reason}" for name, reason in unreadable.items()}
    report = Report(ablation, measured, states)
    output = ["--output", str(args.output)] if args.output else []
    command = "\n".join(
        shlex.join(["python", "tools/ablate.py", *words])
        for words in (["run", str(args.file)], ["report", str(args.file), *output])
    )
    for file in write_report(report, args.output or ablation.folder / "report", args.note, command, draw):
        print(f"wrote {file}")
    for name in other_folders(ablation):
        print(f"left out: {name}, a run folder that {args.file} does not name")
    for line in report.unfinished:
        print(f"not in the report: {line}", file=sys.stderr)
    if not report.measured:
        print(f"error: no run of {args.file} has finished, the report is empty", file=sys.stderr)
        return 1
    return 1 if report.unfinished and not args.partial else 0


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    commands = {"plan": plan_command, "run": run_command, "report": report_command}
    try:
        from megatron.run_control.known_flags import known_flags

        return commands[args.command](args, load_ablation(args.file, ROOT, known_flags()))
    except (LaunchError, OSError) as error:
        print(f"error: {said(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run_tool(main)
