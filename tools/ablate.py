#!/usr/bin/env python3
"""Plans, runs and reports an ablation: one YAML names a base recipe, axes and seeds.

    python tools/ablate.py plan scripts/ablations/quickstart_gpt.yaml
    python tools/ablate.py run scripts/ablations/quickstart_gpt.yaml --parallel 2
    python tools/ablate.py run scripts/ablations/gpt_1b_streams.yaml --slurm --sbatch "--nodes=1 --gpus-per-node=8"
    python tools/ablate.py report scripts/ablations/quickstart_gpt.yaml --output docs/results/quickstart_gpt

`plan` prints the runs, what differs between them, parameters, tokens and cost. `run` launches what is not finished,
here or as a SLURM job array, and can be interrupted and started again at any moment. `report` writes report.md,
results.csv and pictures: mean and spread over seeds, and paired differences against the reference with 95 % intervals.
docs/ablate.md describes the YAML.

What always holds: a finished run is never run again; a folder whose flags are not the YAML's is refused by name; a run
that is missing or unfinished is named by the report. Exit status: 0 done; 1 a run failed, is missing or unfinished;
2 bad input; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.ablations.description import Ablation, load_ablation
from megatron.run_control.errors import LaunchError

ROOT = Path(__file__).resolve().parents[1]


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
        command.add_argument("file", type=Path, metavar="YAML", help="the ablation, scripts/ablations/*.yaml")
    plan.add_argument("--flags", action="store_true", help="print every flag of every variant, not only what differs")
    run.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    run.add_argument("--slurm", action="store_true", help="submit a job array (scripts/slurm/sweep.sbatch)")
    run.add_argument("--sbatch", default="", metavar="OPTIONS", help="with --slurm: more options of sbatch, quoted")
    report.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: the ablation's folder)")
    report.add_argument("--partial", action="store_true", help="exit 0 although runs are missing or unfinished")
    args = parser.parse_args(argv)
    if args.command == "run" and args.parallel < 1:
        parser.error(f"--parallel {args.parallel}: a whole number from 1 is wanted")
    if args.command == "run" and args.sbatch and not args.slurm:
        parser.error("--sbatch means something with --slurm only")
    return args


def run_command(args: argparse.Namespace, ablation: Ablation) -> int:
    """Launch what is not finished."""
    from megatron.ablations.runner import Runner
    from megatron.ablations.state import ablation_lock, check_folders

    check_folders(ablation)
    with ablation_lock(ablation):
        status, failed = Runner(ablation, ROOT, args.parallel).run()
    if failed:
        print(f"error: {len(failed)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return status


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = parse_arguments(argv)
    try:
        from megatron.run_control.known_flags import known_flags

        ablation = load_ablation(args.file, ROOT, known_flags())
        return {"run": run_command}[args.command](args, ablation)
    except (LaunchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
