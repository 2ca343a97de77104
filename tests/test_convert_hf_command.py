"""convert.py import-hf and export-hf as a user runs them: exit status, what is printed, what is left on the disk.

    pytest tests/test_convert_hf_command.py

The commands run in this process; training and sampling with an imported checkpoint are processes of their own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_hf import VOCABULARY, assert_same_folder, change_config, llama, mamba2, save_model, stored_tensors
from harness_pretrain import ROOT, pretrain
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def convert() -> Callable[..., int]:
    """`main` of convert.py."""
    spec = importlib.util.spec_from_file_location("convert", ROOT / "tools" / "checkpoint" / "convert.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["convert"] = module
    spec.loader.exec_module(module)
    return lambda *words: int(module.main([str(word) for word in words]))


def add_tokenizer(folder: Path) -> Path:
    """Put a tokenizer of whole words into a folder: w0, w1, ..."""
    words = {f"w{number}": number for number in range(VOCABULARY - 1)} | {"<|endoftext|>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", unk_token="w0")
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_verified_there_and_back(
    convert: Callable[..., int], format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", llama())
    status = convert("import-hf", "--input", source, "--output", tmp_path / "ck", "--format", format, "--verify")
    said = capsys.readouterr()
    assert status == 0, said.err
    assert "the same function" in said.out
    assert "padded by 31 rows of zeros to 128" in said.err
    assert "peak memory" in said.err
    assert convert("export-hf", "--input", tmp_path / "ck", "--output", tmp_path / "back", "--verify") == 0
    assert "the same function" in capsys.readouterr().out
    assert_same_folder(tmp_path / "back", source)


def test_widened_on_the_way(convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_model(tmp_path / "source", mamba2())
    wide = ("--num-streams", 3, "--wide-residual-learned-retention", "--wide-residual-retention-max-forget", 0.5)
    assert convert("import-hf", "--input", source, "--output", tmp_path / "ck", *wide) == 0
    assert convert("export-hf", "--input", tmp_path / "ck", "--output", tmp_path / "out", "--verify") == 0
    assert "the same function" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_streams"], config["retention_max_forget"]) == (3, 0.5)


def test_verify_finds_what_was_changed_behind_its_back(
    convert: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.training.huggingface import name_tables

    source = save_model(tmp_path / "source", llama())
    right = name_tables._TO_MEGATRON["gate_up"]
    monkeypatch.setitem(name_tables._TO_MEGATRON, "gate_up", lambda tensors, pair: right(tensors[::-1], pair))
    assert convert("import-hf", "--input", source, "--output", tmp_path / "ck", "--verify") == 1
    assert "NOT the same function" in capsys.readouterr().out


def test_dry_run_names_every_tensor_and_writes_nothing(
    convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "source", llama())
    assert convert("import-hf", "--input", source, "--output", tmp_path / "ck", "--dry-run") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in stored_tensors(source))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source"]
    assert convert("import-hf", "--input", source, "--output", tmp_path / "ck") == 0
    capsys.readouterr()
    assert convert("export-hf", "--input", tmp_path / "ck", "--output", tmp_path / "out", "--dry-run") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in stored_tensors(source))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ck", "source"]


def test_refusals_are_one_line_with_status_2_and_leave_nothing(
    convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: object) -> str:
        assert convert(*words) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1, said
        assert said[0].startswith("error: ")
        assert not (tmp_path / "ck").exists()
        assert not any(entry.name.startswith(".") for entry in tmp_path.iterdir()), "something half-written is left"
        return said[0]

    source = save_model(tmp_path / "source", llama())
    command = ("import-hf", "--input", source, "--output", tmp_path / "ck")
    assert "--num-streams" in refused(*command, "--wide-residual-learned-retention")
    assert "retention_init is 0.5" in refused(
        *command, "--num-streams", 3, "--wide-residual-learned-retention", "--wide-residual-retention-init", 0.5
    )
    change_config(source, sliding_window=16)
    assert "sliding_window = 16" in refused(*command)
    change_config(source, sliding_window=None)
    tensors = stored_tensors(source)
    late = {**tensors, "lm_head.weight": tensors["lm_head.weight"].double()}
    save_file(late, source / "model.safetensors", metadata={"format": "pt"})
    assert "dtype F64" in refused(*command)
    change_config(source, dtype="bfloat16")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "which cannot hold its values" in refused(*command)


def test_an_imported_checkpoint_samples_and_trains_with_its_tokenizer(
    convert: Callable[..., int], tmp_path: Path
) -> None:
    source = add_tokenizer(save_model(tmp_path / "source", llama()))
    assert convert("import-hf", "--input", source, "--output", tmp_path / "ck", "--num-streams", 2) == 0
    command = ["--load", str(tmp_path / "ck"), "--prompt", "w1 w2 w3", "--max-new-tokens", "4", "--json"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate.py"), *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["prompt_tokens"] == [1, 2, 3]
    run = pretrain(
        [
            *("--load", str(tmp_path / "ck"), "--use-checkpoint-args", "--mock-data"),
            *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "2", "--train-iters", "2"),
            *("--lr", "1e-4", "--lr-decay-iters", "10", "--eval-iters", "1", "--log-interval", "1"),
            *("--save", str(tmp_path / "trained"), "--save-interval", "2"),
        ],
        tmp_path,
    )
    assert len(run.losses) == 2
    assert run.losses[1] == pytest.approx(torch.log(torch.tensor(128.0)).item(), abs=0.2), "not a loaded random model's"
    assert convert("export-hf", "--input", tmp_path / "trained", "--output", tmp_path / "out", "--like", source) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert stored_tensors(tmp_path / "out")["lm_head.weight"].shape[0] == VOCABULARY
