"""What submits a SLURM job again: `sbatch` with every option that the job was given.

    resubmission(job_record, submit_line)      # ["sbatch", "--account=physics", "--mem=100G", ...], without the file

`job_record` is what `scontrol show job` prints. `submit_line` is the command that was typed, which newer versions of
SLURM keep (SubmitLine of scontrol, or of sacct where there is accounting), else empty. With it, its options are taken,
and what SBATCH_ACCOUNT and the like added comes from the record. Without it all options come from the record, which
does not have `--signal`, `--export`, `--output` and what only concerns srun: those of the .sbatch file hold then.

What always holds: the words are options that sbatch takes, also where SLURM shows them in a form that it does not
(`gres/gpu:8`); nothing that meant this one submission (array, dependency, begin, wait) is among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

# {field of the record: option of sbatch}
_ADDED = {"Account": "--account", "QOS": "--qos", "Partition": "--partition", "Reservation": "--reservation"}
_FIELDS = {
    **_ADDED,
    "NumNodes": "--nodes",
    "TimeLimit": "--time",
    "TimeMin": "--time-min",
    "CPUs/Task": "--cpus-per-task",
    "MinMemoryNode": "--mem",
    "MinMemoryCPU": "--mem-per-cpu",
    "MinTmpDiskNode": "--tmp",
    "Features": "--constraint",
    "ReqNodeList": "--nodelist",
    "ExcNodeList": "--exclude",
    "Licenses": "--licenses",
    "Network": "--network",
    "JobName": "--job-name",
    "Comment": "--comment",
    "MailUser": "--mail-user",
    "MailType": "--mail-type",
}
_TRES = {"TresPerNode": "--gres", "TresPerJob": "--gpus", "TresPerTask": "--gpus-per-task"}
_TRES |= {"TresPerSocket": "--gpus-per-socket", "MemPerTres": "--mem-per-gpu", "CpusPerTres": "--cpus-per-gpu"}
_SHORT = {"--account": "-A", "--qos": "-q", "--partition": "-p"}
# Of one submission alone: {option: whether a value follows}.
_ONCE = {"--array": True, "--dependency": True, "--begin": True, "--wait": False, "--parsable": False}
_ONCE |= {"--test-only": False, "--hold": False, "-a": True, "-d": True, "-b": True, "-W": False, "-H": False}
_NOTHING = ("", "(null)", "0", "N/A", "UNLIMITED", "Partition_Limit")


def fields_of(record: str) -> dict[str, str]:
    """{"JobId": "17", "Account": "physics", ...}; of several jobs the first one's."""
    found: dict[str, str] = {}
    for line in record.splitlines():
        for part in re.split(r" (?=[A-Z][A-Za-z/:]*=)", line.strip()):
            name, equals, value = part.partition("=")
            if equals:
                found.setdefault(name, value)
    return found


def resubmission(record: str, submit_line: str = "") -> list[str]:
    """sbatch and its options."""
    fields = fields_of(record)
    options = _typed(submit_line.split(), PurePath(fields.get("Command", "").partition(" ")[0]).name)
    if options is None:
        return ["sbatch", *_recorded(fields)]
    added = [
        f"{option}={fields[name]}"
        for name, option in _ADDED.items()
        if fields.get(name, "") not in _NOTHING and not _has(options, option)
    ]
    return ["sbatch", *options, *added]


def _has(options: Sequence[str], option: str) -> bool:
    return any(
        word.partition("=")[0] == option or (option in _SHORT and word.startswith(_SHORT[option])) for word in options
    )


def _typed(words: Sequence[str], script: str) -> list[str] | None:
    """The options of a submit line that can be used again; None where there is no line, or it cannot be taken apart:
    SLURM keeps it without quotes, so that a value with blanks looks like several words."""
    if not words or PurePath(words[0]).name != "sbatch" or not script:
        return None
    at = next((n for n, word in enumerate(words) if n and PurePath(word).name == script), None)
    if at is None:
        return None
    kept: list[str] = []
    drop_value = value_may_follow = False
    for word in words[1:at]:
        if not word.startswith("-"):
            if not value_may_follow:
                return None
            if not drop_value:
                kept.append(word)
            drop_value = value_may_follow = False
            continue
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        alone = "=" not in word if word.startswith("--") else len(word) == 2
        value_may_follow = alone and _ONCE.get(name, True)
        drop_value = name in _ONCE
        if name not in _ONCE:
            kept.append(word)
    return kept


def _recorded(fields: Mapping[str, str]) -> Iterator[str]:
    """The options that the record shows."""
    for name, option in _FIELDS.items():
        value = fields.get(name, "")
        if value not in _NOTHING and not (name == "CPUs/Task" and value == "1"):
            yield f"{option}={value}"
    for name, option in _TRES.items():
        # gres:gpu:8 or gres/gpu:8, several with commas, beside others such as cpu=4
        asked = [part[5:] for part in fields.get(name, "").split(",") if re.match(r"gres[:/]", part)]
        if asked and option == "--gres":
            yield f"--gres={','.join(asked)}"
        elif asked:
            yield f"{option}={','.join(part.removeprefix('gpu:').removeprefix('gpu=') for part in asked)}"
    if fields.get("OverSubscribe") == "NO":
        yield "--exclusive"
    if fields.get("Requeue") == "0":
        yield "--no-requeue"
