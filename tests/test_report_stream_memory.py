"""tools/report_stream_memory.py: its table, JSON and plot, checkpoints, refusals and --help."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_pretrain import TINY_GPT, TINY_HYBRID, pretrain
from megatron.core.dist_checkpointing import load_common_state_dict

TOOL = Path(__file__).resolve().parent.parent / "tools" / "report_stream_memory.py"
MODEL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]


@pytest.fixture(scope="module")
def tool() -> Any:
    """The tool as a module: a process start costs seconds."""
    sys.path.insert(0, str(TOOL.parent))
    try:
        spec = importlib.util.spec_from_file_location("report_stream_memory", TOOL)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOL.parent))
    return module


def test_a_user_gets_table_json_and_plot(tmp_path: Path) -> None:
    path, plot = tmp_path / "memory.json", tmp_path / "memory.png"
    options = ["--measure", "--json", str(path), "--plot", str(plot), "--"]
    flags = [*MODEL, "--wide-residual", "4", "--pipeline-model-parallel-size", "2"]
    done = subprocess.run(
        [sys.executable, str(TOOL), *options, *flags], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert [stage["in_flight"] for stage in report["stages"]] == [2, 1]
    for stage in report["stages"]:
        names = [(row["model"], row["block_size"]) for row in stage["rows"]]
        assert names == [("ordinary", None), ("wide", None), ("replay", 1), ("replay", 2)]
        ordinary, wide, *replays = stage["rows"]
        assert ordinary["kept"] < wide["kept"]
        assert all(row["kept"] < wide["kept"] for row in replays)
        for row in stage["rows"]:
            if row["block_size"] in (None, report["best_block_size"]):
                assert row["kept"] == pytest.approx(row["measured_kept"], rel=0.05)
    assert plot.read_bytes().startswith(b"\x89PNG")
    for words in ("stage 0: 2 layers, 2 micro-batches in flight", "stage 1", "ordinary", "best", "kept*"):
        assert words in done.stdout
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["memory.json", "memory.png"], "something was left"


def test_a_checkpoint_says_what_the_model_is(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = ["--train-iters", "1", "--save", "saved", "--save-interval", "1", "--wide-residual", "3"]
    pretrain([*TINY_GPT, *saving], tmp_path)
    # The plain format keeps the same arguments in another file.
    stored = load_common_state_dict(str(tmp_path / "saved" / "iter_0000001"))
    plain = tmp_path / "plain" / "iter_0000001" / "mp_rank_00"
    plain.mkdir(parents=True)
    args = Namespace(**{**vars(stored["args"]), "ckpt_format": "torch"})
    torch.save({"args": args, "iteration": 1, "checkpoint_version": 3.0}, plain / "model_optim_rng.pt")
    (tmp_path / "plain" / "latest_checkpointed_iteration.txt").write_text("1")
    reports = []
    for folder, options in (("saved", []), ("plain", ["--ckpt-format", "torch"])):
        path = tmp_path / f"{folder}.json"
        status = tool.main(["--checkpoint", str(tmp_path / folder), "--json", str(path), *options])
        assert status == 0, capsys.readouterr().err
        reports.append(json.loads(path.read_text()))
    assert reports[0] == reports[1]
    model = reports[0]["model"]
    assert (model["num_layers"], model["hidden_size"], model["num_streams"], model["seq_length"]) == (2, 64, 3, 32)
    torch.save(
        {"args": Namespace(**{**vars(args), "wide_residual": None}), "iteration": 1, "checkpoint_version": 3.0},
        plain / "model_optim_rng.pt",
    )
    assert tool.main(["--checkpoint", str(tmp_path / "plain"), "--ckpt-format", "torch"]) == 2
    assert "the checkpoint's model has one residual stream" in capsys.readouterr().err
    status = tool.main(["--checkpoint", str(tmp_path / "saved"), "--wide-residual", "4"])
    assert status == 2
    assert "--wide-residual is 4 on the command line and 3 in the checkpoint" in capsys.readouterr().err


def test_a_checkpoint_of_a_hybrid_is_reported_like_its_flags(
    tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY_HYBRID, "--wide-residual", "2"]
    saving = ["--train-iters", "1", "--save", "saved", "--save-interval", "1"]
    pretrain([*flags, *saving], tmp_path, script="pretrain_mamba.py")
    reports = []
    stored = ["--checkpoint", str(tmp_path / "saved"), "--micro-batch-size", "2"]  # which is the run's, not the model's
    for name, options in (("checkpoint", stored), ("flags", flags)):
        path = tmp_path / f"{name}.json"
        status = tool.main(["--measure", "--json", str(path), *options])
        said = capsys.readouterr()
        assert status == 0, said.err
        assert "M*-E" in said.out
        reports.append(json.loads(path.read_text()))
    assert reports[0]["stages"] == reports[1]["stages"]
    assert reports[0]["model"]["hybrid_layer_pattern"] == "M*-E"
    for row in reports[0]["stages"][0]["rows"]:
        if row["measured_kept"] is not None:
            assert row["kept"] == pytest.approx(row["measured_kept"], rel=0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no --wide-residual K given"),
        (
            ["--wide-residual", "4", "--recompute-granularity", "full", "--recompute-method", "uniform"],
            "granularity full",
        ),
        (["--wide-residual", "4", "--num-attention-heads", "5"], "megatron-core does not take these options"),
        (
            ["--wide-residual=4", "--num-experts=4", "--disable-bias-linear", "--tensor-model-parallel-size=2"],
            "report on --tensor-model-parallel-size 1",
        ),
        (["--wide-residual=4", "--mtp-num-layers=1", "--position-embedding-type=rope"], "--mtp-num-layers: "),
        (["--wide-residual=4", "--hybrid-layer-pattern=M*-M/M"], 'give --hybrid-layer-pattern "M*-M"'),
        (["--wide-residual=4", "--hybrid-override-pattern=M*-M/M"], "the layers of multi-token prediction"),
        (["--wide-residual=4", "--hybrid-layer-pattern=M*-M|M"], "--hybrid-layer-pattern has 5 layers"),
        (["--wide-residual=4", "--hybrid-layer-pattern=M*-G"], "(gated delta net) needs transformer-engine"),
        (["--wide-residual=4", "--hybrid-layer-pattern=M-M+"], "(multi-latent attention) needs transformer-engine"),
        (
            [
                *("--wide-residual=4", "--hybrid-layer-pattern=*-*E", "--num-experts=4", "--disable-bias-linear"),
                "--tensor-model-parallel-size=2",
            ],
            "report on --tensor-model-parallel-size 1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_model_that_cannot_be_reported_is_refused(
    flags: list[str], message: str, tool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([*MODEL, *flags]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert message in said[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "/no/such/folder/x.json"], "--json: the folder /no/such/folder does not exist"),
        (["--plot", "memory.jpg"], "--plot: a name that ends in .png is wanted, got 'memory.jpg'"),
        (["--checkpoint", "/no/such"], "--checkpoint: /no/such holds no latest_checkpointed_iteration.txt"),
        (["--wide-residual", "1"], "1 is too few; 2 or more streams are wanted"),
        (["--wide-residual", "4", "--no-such-flag"], "--no-such-flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_end_with_exit_2(
    arguments: list[str], message: str, tool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main([*arguments, *MODEL])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_explains_every_option_without_importing_torch() -> None:
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(TOOL.parent)!r})\n"
        f"sys.argv = [{str(TOOL)!r}, '--help']\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('IMPORTED', 'torch' in sys.modules or 'megatron' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED False" in done.stdout
    for word in ("--checkpoint", "--measure", "--json", "--plot", "--wide-residual 4"):
        assert word in done.stdout
