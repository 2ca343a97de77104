"""A resumed run is the checkpoint's model: flags that change what a model computes and no shape of a weight.

One training writes a checkpoint with such flags; command lines that resume it are then parsed as pretrain_gpt.py does,
and one of them trains on.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_models import single_process_megatron
from harness_pretrain import TINY_GPT, pretrain

from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS, validated_arguments
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.model_arguments import given_names

# Upstream keeps the values of some of these in another form than the command line's (lists; a count that is not used).
BASE = [
    *(*TINY_GPT, "--num-query-groups", "2", "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-router-load-balancing-type", "aux_loss"),
]
# None of these changes a key or a shape, and upstream's --use-checkpoint-args takes over the base alone.
FUNCTION = {
    "--norm-epsilon": "0.05",
    "--rotary-base": "500",
    "--rope-scaling-factor": "4.0",
    "--rotary-seq-len-interpolation-factor": "2",
    "--position-embedding-type": "rope",
    "--use-rope-scaling": "",
    "--squared-relu": "",
}
NAMES = {
    "layernorm_epsilon": 0.05,
    "rotary_base": 500,
    "rope_scaling_factor": 4.0,
    "rotary_seq_len_interpolation_factor": 2,
    "position_embedding_type": "rope",
    "use_rope_scaling": True,
    "squared_relu": True,
}


def flags(without: str = "") -> list[str]:
    return [part for flag, value in FUNCTION.items() if flag != without for part in (flag, value) if part]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A checkpoint of step 2, and the losses of the run that wrote it and went on."""
    folder = tmp_path_factory.mktemp("function")
    run = pretrain([*BASE, *flags(), "--train-iters", "3", "--save", "ck", "--save-interval", "2"], folder)
    (folder / "ck" / "latest_checkpointed_iteration.txt").write_text("2")
    return folder / "ck", run.losses


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def parsed(options: list[str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *BASE, "--train-iters", "3", *options])
    return validated_arguments("cpu", ARGUMENT_EXTENSIONS)


def test_a_run_with_use_checkpoint_args_goes_on_as_the_checkpoints_model(
    uninterrupted: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    checkpoint, losses = uninterrupted
    options = [*BASE, "--train-iters", "3", "--load", str(checkpoint), "--use-checkpoint-args"]
    assert pretrain(options, tmp_path).losses == {3: losses[3]}


def test_use_checkpoint_args_restores_every_flag_of_the_model(
    uninterrupted: tuple[Path, dict[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parsed(["--load", str(uninterrupted[0]), "--use-checkpoint-args"], monkeypatch)
    assert {name: getattr(args, name) for name in NAMES} == NAMES


@pytest.mark.parametrize("flag", FUNCTION)
def test_a_flag_of_the_model_that_is_left_out_is_named_and_refused(
    flag: str, uninterrupted: tuple[Path, dict[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        parsed([*flags(without=flag), "--load", str(uninterrupted[0])], monkeypatch)
    assert f"{flag} {FUNCTION[flag]}".strip() in str(refusal.value)
    assert "--use-checkpoint-args" in str(refusal.value)


@pytest.mark.parametrize("restore", [[], ["--use-checkpoint-args"]], ids=["plain", "use-checkpoint-args"])
def test_the_same_flags_are_taken_without_a_word(
    restore: list[str],
    uninterrupted: tuple[Path, dict[int, float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    parsed([*flags(), "--load", str(uninterrupted[0]), *restore], monkeypatch)
    assert "differs from the checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("restore", [[], ["--use-checkpoint-args"]], ids=["plain", "use-checkpoint-args"])
def test_another_value_on_the_command_line_is_taken_and_said(
    restore: list[str],
    uninterrupted: tuple[Path, dict[int, float]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    # 1e-5 and 10000 are the defaults: given, they are a choice all the same.
    chosen = ["--norm-epsilon", "1e-5", "--rotary-base", "10000"]
    args = parsed([*flags(), *chosen, "--load", str(uninterrupted[0]), *restore], monkeypatch)
    assert (args.layernorm_epsilon, args.rotary_base, args.squared_relu) == (1e-5, 10000, True)
    said = capsys.readouterr().out
    assert "--norm-epsilon 1e-05 (the checkpoint: 0.05)" in said
    assert "--rotary-base 10000 (the checkpoint: 500)" in said


def test_load_non_strict_says_what_is_another_model(
    uninterrupted: tuple[Path, dict[int, float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    more = ["--load", str(uninterrupted[0]), "--load-non-strict", "--no-load-optim"]
    assert not parsed([*flags(without="--squared-relu"), *more], monkeypatch).squared_relu
    assert "> --load-non-strict: the checkpoint was trained with --squared-relu" in capsys.readouterr().out


def test_given_options_are_told_from_defaults() -> None:
    parser = ArgumentParser()
    parser.add_argument("--number", type=int, default=3)
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--no-other", action="store_false", dest="other")
    parser.add_argument("--many", nargs="*", default=["a"])
    parser.add_argument("--add", action="append", default=["b"])
    assert given_names(parser, []) == set()
    assert given_names(parser, ["--number", "3", "--many"]) == {"number", "many"}
    assert given_names(parser, ["--num=3", "--flag", "--no-other", "--add", "c"]) == {"number", "flag", "other", "add"}
