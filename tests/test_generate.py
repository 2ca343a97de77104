"""tools/generate.py: checkpoints of real runs, ordinary and wide, plain and torch_dist, continue text."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_corpus import tool
from harness_models import single_process_megatron
from harness_pretrain import ROOT, pretrain
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.training import destroy_global_state

from megatron.core.models.gpt.wide_residual_gpt_model import WideResidualGPTModel
from megatron.core.models.hybrid.wide_residual_hybrid_model import WideResidualHybridModel
from megatron.cpu.host import training_host
from megatron.cpu.replacements import Replacements
from megatron.patches.offline_tokenizers import install_tokenizers
from megatron.training.generation.checkpoint_location import find_checkpoint
from megatron.training.generation.checkpoint_model import open_checkpoint
from megatron.training.generation.continuation import Continuation, Limits
from megatron.training.generation.decoder import (
    make_decoder,
)
from megatron.training.generation.sampler import Sampler, Sampling
from megatron.training.model_kinds import MODEL_KINDS
from megatron.training.pretrain_entry import parse_training_arguments

CONTEXT = 48
BASE = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", str(CONTEXT)),
    *("--max-position-embeddings", str(CONTEXT), "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--lr", "0.01", "--train-iters", "4", "--save-interval", "2", "--init-method-std", "0.3", "--seed", "7"),
    *("--mock-data", "--tokenizer-type", "ByteLevelTokenizer", "--eval-iters", "0", "--log-interval", "1"),
]
# Dropout (upstream's 0.1), learned positions, LayerNorm, biases, tied embeddings; the plain format.
ORDINARY = [*BASE, "--ckpt-format", "torch"]
# What upstream's own list of restored arguments lacks is here too: the norms' epsilon, RoPE scaling, norms of queries.
WIDE = [
    *BASE,
    *("--wide-residual", "3", "--wide-residual-streamwise-sigmoid-init-scale", "0.5"),
    *("--wide-residual-learned-retention", "--position-embedding-type", "rope", "--rotary-base", "500"),
    *("--use-rope-scaling", "--group-query-attention", "--num-query-groups", "2", "--swiglu", "--qk-layernorm"),
    *("--normalization", "RMSNorm", "--norm-epsilon", "0.01", "--untie-embeddings-and-output-weights"),
    *("--disable-bias-linear", "--recompute-granularity", "selective", "--recompute-modules", "residual_stream"),
]
HYBRID = [
    *BASE[2:],
    *("--hybrid-layer-pattern", "M*-ME", "--wide-residual", "2"),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--mamba-num-groups", "2", "--mamba-head-dim", "16", "--mamba-state-dim", "16"),
]
TWO_RANKS = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
TWO_STAGES = ["--hybrid-layer-pattern", "M*|-ME", "--pipeline-model-parallel-size", "2"]
PROMPT = "Grüße, λ"


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ordinary")
    pretrain([*ORDINARY, "--save", "checkpoints"], folder)
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torch_dist, written by two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("wide")
    pretrain([*WIDE, *TWO_RANKS, "--save", "checkpoints"], folder, processes=2)
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torch_dist, written by two pipeline ranks."""
    folder = tmp_path_factory.mktemp("hybrid")
    pretrain([*HYBRID, *TWO_STAGES, "--save", "checkpoints"], folder, processes=2, script="pretrain_mamba.py")
    return folder / "checkpoints"


@pytest.fixture
def generate(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the tool in this process; return (status, standard output, standard error)."""

    def run(load: Path, *options: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = tool("generate").main(["--load", str(load), *options])
        return (status, *capsys.readouterr())

    return run


def records(generate: Any, load: Path, *options: str) -> list[dict[str, Any]]:
    status, out, err = generate(load, "--json", *options)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


# ---- the checkpoints


@pytest.mark.parametrize("name", ["ordinary", "wide", "hybrid"])
def test_the_cache_changes_nothing(name: str, request: pytest.FixtureRequest, generate: Any) -> None:
    load = request.getfixturevalue(name)
    compared = 0
    for choice in ([], ["--temperature", "1.5", "--top-p", "0.95", "--seed", "5", "--num-samples", "2"]):
        cached = records(generate, load, "--prompt", PROMPT, *choice)
        anew = records(generate, load, "--prompt", PROMPT, "--no-cache", *choice)
        for with_cache, without in zip(cached, anew, strict=True):
            assert with_cache["tokens"] == without["tokens"]
            assert with_cache["logprobs"] == pytest.approx(without["logprobs"], abs=1e-4)
            compared += len(with_cache["tokens"])
            fills_context = len(with_cache["tokens"]) + len(PROMPT.encode()) == CONTEXT
            assert with_cache["stopped"] == ("context" if fills_context else "end of text")
    assert compared > 30


def test_text_goes_to_stdout_alone_and_is_the_one_of_json(wide: Path, generate: Any) -> None:
    options = ["--prompt", PROMPT, "--max-new-tokens", "12"]
    (record,) = records(generate, wide, *options)
    status, out, err = generate(wide, *options)
    assert (status, out) == (0, PROMPT + record["text"] + "\n")
    assert record["text"] == bytes(record["tokens"]).decode("utf-8", "ignore")  # as this tokenizer does
    assert (record["stopped"], len(record["tokens"])) == ("max-new-tokens", 12)
    assert record["prompt_tokens"] == list(PROMPT.encode())
    assert "GPT, 3 residual streams, step 4, float32" in err
    assert "12 tokens" in err


def test_a_seed_repeats_its_samples_whatever_else_is_asked_for(wide: Path, generate: Any) -> None:
    draw = ["--temperature", "1", "--max-new-tokens", "10", "--seed", "3"]
    four = records(generate, wide, "--prompt", "a", "--prompt", "b", "--num-samples", "2", *draw)
    one = records(generate, wide, "--prompt", "a", *draw)
    assert one == four[:1]
    assert len({tuple(record["tokens"]) for record in four}) == 4
    other = records(generate, wide, "--prompt", "a", *draw[:-1], "4")
    assert other[0]["tokens"] != one[0]["tokens"]


def test_padding_of_the_vocabulary_is_never_chosen(ordinary: Path, generate: Any) -> None:
    """258 ids are padded to 384; at a high temperature a third of the draws would be padding."""
    found = records(generate, ordinary, "--prompt", "a", "--temperature", "100", "--num-samples", "4")
    tokens = [token for record in found for token in record["tokens"]]
    assert len(tokens) > 60
    assert max(tokens) < 257


def test_ckpt_step_takes_that_step(ordinary: Path, generate: Any) -> None:
    second = records(generate, ordinary, "--prompt", "abc", "--ckpt-step", "2")
    fourth = records(generate, ordinary, "--prompt", "abc", "--ckpt-step", "4")
    assert fourth == records(generate, ordinary, "--prompt", "abc")
    assert second[0]["logprobs"] != fourth[0]["logprobs"]


def test_prompts_come_from_files_and_standard_input_too(
    ordinary: Path, generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_bytes("über\nalles\r\n".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("λ\n\n".encode())))
    options = ["--prompt", "-", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "1"]
    assert [record["prompt"] for record in records(generate, ordinary, *options)] == ["λ\n", "über\nalles"]


def test_an_end_of_text_ends_the_continuation(ordinary: Path, generate: Any) -> None:
    (record,) = records(generate, ordinary, "--prompt", "abc")
    tokens = record["tokens"]
    end = tokens[5]  # as if the tokenizer ended texts with the sixth token
    with training_host() as host, open_checkpoint(find_checkpoint(ordinary), host) as loaded:
        run = Continuation(
            make_decoder(loaded.model, CONTEXT, cached=True), Sampler(Sampling()), Limits(40, CONTEXT, 258, end)
        )
        chosen = [choice.token for choice in run.tokens(list(b"abc"))]
    assert (chosen, run.stopped) == (tokens[: tokens.index(end)], "end of text")


@pytest.mark.parametrize("name", ["ordinary", "wide", "hybrid"])
def test_the_model_is_the_one_that_was_trained(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration is that of the training command line, field by field, but for what concerns the run alone."""
    flags = {"ordinary": ORDINARY, "wide": WIDE, "hybrid": HYBRID}[name]
    wanted = {"ordinary": GPTModel, "wide": WideResidualGPTModel, "hybrid": WideResidualHybridModel}[name]
    load = request.getfixturevalue(name)
    with training_host() as host, open_checkpoint(find_checkpoint(load), host) as loaded:
        rebuilt = get_model_config(loaded.model)
        built = unwrap_model(loaded.model)
        assert type(built) is wanted
        assert not built.training
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags])
    with single_process_megatron(), Replacements() as replaced:
        install_tokenizers(replaced)
        trained = (
            MODEL_KINDS["hybrid" if name == "hybrid" else "gpt"].config(parse_training_arguments("cpu")).transformer
        )
        destroy_global_state()
    of_the_run = {field.name for field in fields(trained) if field.name.startswith("recompute_")}
    of_the_run |= {"residual_stream_recompute_num_layers", "init_method", "output_layer_init_method"}
    of_the_run |= {"embedding_init_method", "inference_sampling_seed", "timers", "variable_seq_lengths"}
    for field in fields(trained):
        if field.name not in of_the_run:
            assert getattr(rebuilt, field.name) == getattr(trained, field.name), f"{field.name} was not restored"


# ---- what cannot work


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x" * CONTEXT], f"has {CONTEXT} tokens, and the context of the checkpoint.* has {CONTEXT}"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1.0"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p 1.5"),
        (["--prompt", "a", "--top-k", "0"], "--top-k 0"),
        (["--prompt", "a", "--greedy", "--top-k", "5"], "--greedy and --top-k contradict each other"),
        (["--prompt", "a", "--temperature", "0", "--top-k", "5"], "change nothing"),
        (["--prompt", "a", "--num-samples", "2"], "--num-samples 2 would print the same text"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt cannot be read"),
        (["--prompt", "a", "--ckpt-step", "3"], "iter_0000003 is not there.*: 2, 4 "),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(
    ordinary: Path, generate: Any, options: list[str], named: str
) -> None:
    assert_refused(generate(ordinary, *options), named)


def assert_refused(result: tuple[int, str, str], named: str) -> None:
    status, out, err = result
    assert status == 2, f"status {status}:\n{out}{err}"
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("> ")]
    assert len(lines) == 1, err
    assert re.search(f"^error: .*{named}", lines[0]), lines[0]


def test_a_folder_without_a_usable_checkpoint_says_what_is_wrong(ordinary: Path, generate: Any, tmp_path: Path) -> None:
    def refused(load: Path, named: str) -> None:
        assert_refused(generate(load, "--prompt", "a"), named)

    refused(tmp_path / "nowhere", "no such folder")
    refused(ordinary / "iter_0000002", "is the folder of one step: give --load")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    refused(tmp_path, "no checkpoint in .*latest_checkpointed_iteration.txt is not there")
    tracker.write_text("soon")
    refused(tmp_path, r"holds 'soon', a step number is wanted.*no whole checkpoint is there")
    tracker.write_text("7")
    refused(tmp_path, "iter_0000007 is not there")
    (tmp_path / "iter_0000007").mkdir()
    refused(tmp_path, "holds no checkpoint: neither")


def test_a_checkpoint_that_is_not_the_models_is_not_loaded(
    ordinary: Path, wide: Path, generate: Any, tmp_path: Path
) -> None:
    """A key too many or too few, stored arguments of another model, and a damaged file."""
    file = ordinary / "iter_0000004/mp_rank_00/model_optim_rng.pt"
    whole = torch.load(file, weights_only=False)
    copy = tmp_path / "iter_0000004/mp_rank_00/model_optim_rng.pt"
    copy.parent.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")

    def refused(named: str) -> None:
        assert_refused(generate(tmp_path, "--prompt", "a"), named)

    key = "decoder.final_layernorm.bias"
    torch.save({**whole, "model": {k: v for k, v in whole["model"].items() if k != key}}, copy)
    refused(f"is not this model's: not in the checkpoint: {key}")
    torch.save({**whole, "model": {**whole["model"], "one.more": torch.zeros(1)}}, copy)
    refused("is not this model's: not in the model: one.more")
    torch.save({k: v for k, v in whole.items() if k != "args"}, copy)
    refused("stores no training arguments")
    whole["args"].tensor_model_parallel_size = 2
    torch.save(whole, copy)
    refused("mp_rank_01/model_optim_rng.pt is missing")
    shutil.copytree(copy.parent, copy.parents[1] / "mp_rank_01")
    refused("saved by TP 2 in the plain format")
    copy.write_bytes(copy.read_bytes()[:1000])
    refused("cannot be read")

    shutil.copytree(wide, tmp_path / "wide")
    (data, *_) = sorted((tmp_path / "wide/iter_0000004").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    assert_refused(generate(tmp_path / "wide", "--prompt", "a"), "is not whole: .*distcp has 1,000 bytes")


def test_a_torch_dist_checkpoint_with_other_keys_is_not_loaded(wide: Path) -> None:
    from megatron.training.generation.errors import GenerationError
    from megatron.training.generation.strict_loading import load_sharded

    location = find_checkpoint(wide)
    with training_host() as host, open_checkpoint(location, host) as loaded:
        model = unwrap_model(loaded.model)
        del model.decoder.residual_stream_readout
        with pytest.raises(GenerationError, match=r"not in the model: decoder.residual_stream_readout.exit_map.logit"):
            load_sharded(model, location, {})
        model.decoder.another = torch.nn.LayerNorm(4)
        with pytest.raises(GenerationError, match=r"not in the checkpoint: decoder.another.bias.*; not in the model"):
            load_sharded(model, location, {})


# ---- the command


def test_help_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = [sys.argv[1], '--help']\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
    )
    path = str(ROOT / "tools/generate.py")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "example:" in done.stdout


def test_the_command_streams_valid_utf8_and_leaves_stderr_readable(ordinary: Path) -> None:
    """One real process: its writes to standard output arrive piece by piece, each of whole characters."""
    options = ["--load", str(ordinary), "--prompt", PROMPT, "--temperature", "1", "--seed", "1"]
    process = subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "tools/generate.py"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    pieces = list(iter(lambda: process.stdout.read(65536), b""))  # type: ignore[union-attr]
    err = process.stderr.read().decode()
    assert process.wait() == 0, err
    assert len(pieces) > 3, f"everything came at once: {pieces}"
    text = "".join(piece.decode("utf-8") for piece in pieces)
    assert text.startswith(PROMPT)
    assert text.endswith("\n")
    assert all(line.startswith("> ") for line in err.splitlines()), err
