"""Hugging Face folders become Megatron checkpoints and folders again: bit-equal tensors, equal logits, wide ones too.

    pytest tests/test_convert_hf.py

Everything is on disk: folders that transformers saved, torch_dist checkpoints, loaded strictly as tools/generate.py
loads them. Logits are compared in fp32.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from harness_hf import (
    VOCABULARY,
    assert_same_folder,
    change_config,
    hf_logits,
    llama,
    mamba2,
    save_model,
    stored_config,
    stored_tensors,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.cpu.allocator import keep_freed_memory
from megatron.cpu.host import training_host
from megatron.training.checkpoints.checkpoint_state import Entry
from megatron.training.checkpoints.conversion import Outcome, Plan, execute
from megatron.training.checkpoints.open_checkpoint import open_reader
from megatron.training.generation.checkpoint_location import find_checkpoint
from megatron.training.generation.checkpoint_model import open_checkpoint
from megatron.training.huggingface.conversion import (
    as_conversion,
    export_checkpoint,
    folder_reader,
    plan_of_reader,
)
from megatron.training.huggingface.folder_reader import INDEX, HfFolder
from megatron.training.huggingface.import_plan import plan_import

TOLERANCE = 1e-5

LLAMA3_ROPE = {
    **{"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, grouped queries": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama, biases, wide heads, scaled rope": lambda: llama(
        attention_bias=True, mlp_bias=True, head_dim=32, num_key_value_heads=4, rope_parameters=LLAMA3_ROPE
    ),
    "llama, no padding": lambda: llama(vocab_size=128, rms_norm_eps=1e-5),
    "mamba2": mamba2,
    "mamba2, tied": lambda: mamba2(tie_word_embeddings=True, n_groups=1, num_heads=4, head_dim=32),
}


@pytest.fixture(scope="module", autouse=True)
def _modules_of_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers copies modelling files of folders to a cache: keep it out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("modules")
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(cache))
        yield


def imported(source: Path, target: Path, **options: Any) -> Outcome:
    """Run import-hf."""
    with training_host() as host, HfFolder.open(source) as folder:
        return execute(as_conversion(plan_import(folder, host, **options), folder), folder_reader(folder), target)


def exported(source: Path, target: Path, max_shard_bytes: int = 5_000_000_000, **options: Any) -> Outcome:
    """Run export-hf."""
    with training_host() as host, open_reader(source) as reader:
        plan = plan_of_reader(reader, host, **options)
        return export_checkpoint(plan, reader, target, max_shard_bytes=max_shard_bytes)


def megatron_logits(checkpoint: Path, tokens_bs: Tensor) -> Tensor:
    """Logits [b, s, v] of the tokens' vocabulary by the model of a checkpoint."""
    location = find_checkpoint(checkpoint)
    said = contextlib.redirect_stdout(io.StringIO())
    with said, training_host() as host, open_checkpoint(location, host) as loaded, torch.no_grad():
        positions_bs = torch.arange(tokens_bs.shape[1]).expand_as(tokens_bs)
        logits_bsv: Tensor = loaded.model(tokens_bs, positions_bs, None, runtime_gather_output=True)
    return logits_bsv.float()


def assert_close(found: Tensor, wanted: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Fail unless logits over the vocabulary of `wanted` are equal up to rounding."""
    difference = (found[..., : wanted.shape[-1]] - wanted).abs().max().item()
    assert difference <= tolerance, f"{what}: logits differ by {difference:.2e}, their largest is {wanted.abs().max()}"


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_equal_and_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", MODELS[name]())
    tokens_bs = tokens()
    imported(source, tmp_path / "checkpoint")
    assert_close(megatron_logits(tmp_path / "checkpoint", tokens_bs), hf_logits(source, tokens_bs), name)
    exported(tmp_path / "checkpoint", tmp_path / "back")
    assert_same_folder(tmp_path / "back", source)


def test_padding_of_the_vocabulary_is_zeros_that_are_stripped_again(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", llama())
    imported(source, tmp_path / "checkpoint")
    with open_reader(tmp_path / "checkpoint") as reader:
        table = reader.read(Entry("embedding.word_embeddings.weight"))
        assert reader.common.args.padded_vocab_size == 128
    assert torch.equal(table[:VOCABULARY], stored_tensors(source)["model.embed_tokens.weight"])
    assert table.shape[0] == 128
    assert not table[VOCABULARY:].any()
    imported(source, tmp_path / "unpadded", vocabulary_multiple=1)
    with open_reader(tmp_path / "unpadded") as reader:
        assert reader.read(Entry("output_layer.weight")).shape[0] == VOCABULARY


def test_half_precision_and_shards_come_back_bit_equal(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", mamba2().to(torch.bfloat16), max_shard_size="60KB")
    assert (source / INDEX).is_file()
    imported(source, tmp_path / "checkpoint")
    exported(tmp_path / "checkpoint", tmp_path / "back", max_shard_bytes=50_000)
    assert (tmp_path / "back" / INDEX).is_file()
    assert_same_folder(tmp_path / "back", source)
    assert_close(hf_logits(tmp_path / "back", tokens()), hf_logits(source, tokens()), "shards", tolerance=0)


def test_without_the_original_config_the_model_is_the_same(tmp_path: Path) -> None:
    """A training run stores arguments of its own: what Megatron knows must be enough."""
    source = save_model(tmp_path / "source", MODELS["llama, biases, wide heads, scaled rope"]())
    with training_host() as host, HfFolder.open(source) as folder:
        plan = as_conversion(plan_import(folder, host), folder)
        del plan.common.args.hf_config
        execute(plan, folder_reader(folder), tmp_path / "checkpoint")
    exported(tmp_path / "checkpoint", tmp_path / "back")
    assert_close(hf_logits(tmp_path / "back", tokens()), hf_logits(source, tokens()), "without config.json", 0)
    assert stored_config(tmp_path / "back")["eos_token_id"] is None, "a token id was made up"
    exported(tmp_path / "checkpoint", tmp_path / "like", like=source)
    assert_same_folder(tmp_path / "like", source)


# ---- Wide models

LAYOUTS = {
    "at the start": WideResidualConfig(3),
    "changed": WideResidualConfig(3),
    "changed, with retention": WideResidualConfig(
        4, learned_retention=True, retention_init=0.9, retention_max_forget=0.3
    ),
}


def _constant(value: Tensor, source: Tensor | None) -> Tensor:
    del source
    return value


def moved_controllers(plan: Plan, num_streams: int) -> None:
    """Let a plan write other controllers than those of the start."""
    generator = torch.Generator().manual_seed(8)
    for number, step in enumerate(plan.steps):
        if "residual_" in step.entry.name:
            value = torch.zeros(step.info.shape)
            value[:num_streams] = torch.randn(num_streams, generator=generator)
            plan.steps[number] = replace(step, make=partial(_constant, value))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [llama, mamba2], ids=["llama", "mamba2"])
def test_a_wide_model_runs_in_transformers_and_comes_back(
    model: Callable[[], PreTrainedModel], layout: str, tmp_path: Path
) -> None:
    source, tokens_bs = save_model(tmp_path / "source", model()), tokens()
    wide = LAYOUTS[layout]
    with training_host() as host, HfFolder.open(source) as folder:
        plan = as_conversion(plan_import(folder, host, wide=wide), folder)
        if layout != "at the start":
            moved_controllers(plan, wide.num_streams)
        execute(plan, folder_reader(folder), tmp_path / "checkpoint")
    exported(tmp_path / "checkpoint", tmp_path / "wide")
    controllers = [tensor for name, tensor in stored_tensors(tmp_path / "wide").items() if "residual_" in name]
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in controllers} == {((wide.num_streams,), torch.float32)}
    found = hf_logits(tmp_path / "wide", tokens_bs, trust_remote_code=True)
    assert_close(found, megatron_logits(tmp_path / "checkpoint", tokens_bs)[..., :VOCABULARY], layout)
    ordinary = hf_logits(source, tokens_bs)
    if layout == "at the start":
        assert_close(found, ordinary, "the start of a wide model is the ordinary model")
    else:
        assert (found - ordinary).abs().max() > 100 * TOLERANCE, "the changed controllers changed nothing"
    imported(tmp_path / "wide", tmp_path / "again")
    exported(tmp_path / "again", tmp_path / "back")
    assert_same_folder(tmp_path / "back", tmp_path / "wide")


RUNS_ALONE = """
import sys, torch
sys.modules["megatron"] = None
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    load = lambda **options: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)
    model, tokens = load(), torch.arange(1, 12)[None]
    one, other = (model.generate(tokens, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False))
    assert torch.equal(one, other), "the cache changes what is generated"
    model.train()(tokens, labels=tokens).loss.backward()
    lost = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not lost, f"no gradient: {lost}"
    half = load(dtype=torch.bfloat16)
    wide = {p.dtype for n, p in half.named_parameters() if "residual_" in n}
    assert wide == {torch.float32}, f"controllers were cast to {wide}"
    print(model.config.model_type, model.config.num_streams)
"""


def test_wide_models_generate_with_and_without_a_cache_and_train_where_megatron_is_not(tmp_path: Path) -> None:
    folders = []
    for name, model in (("llama", llama), ("mamba2", mamba2)):
        source = save_model(tmp_path / f"{name}-source", model())
        imported(source, tmp_path / name, wide=WideResidualConfig(3, learned_retention=True))
        exported(tmp_path / name, tmp_path / f"{name}-wide")
        folders.append(str(tmp_path / f"{name}-wide"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNS_ALONE, *folders],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "wide_llama 3\nwide_mamba2 3\n", done.stderr[-3000:]


def test_config_of_a_wide_folder_says_its_layout(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", llama())
    imported(source, tmp_path / "checkpoint", wide=LAYOUTS["changed, with retention"])
    exported(tmp_path / "checkpoint", tmp_path / "wide")
    config = stored_config(tmp_path / "wide")
    assert (config["model_type"], config["num_streams"]) == ("wide_llama", 4)
    assert (config["learned_retention"], config["retention_max_forget"]) == (True, 0.3)
    with pytest.raises(Exception, match="4 streams already"):
        imported(tmp_path / "wide", tmp_path / "other", wide=WideResidualConfig(2))
    with pytest.raises(Exception, match="num_streams = 4, which transformers' own"):
        imported(change_config(tmp_path / "wide", model_type="llama", auto_map=None), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def _torn_heap(seed: int) -> list[Any]:
    """Return objects that lie all over a heap whose freed memory stays in the process, as after other work."""
    keep_freed_memory()
    random = Random(seed)
    tensors = [torch.ones(random.randrange(1, 9_000_000)) for _ in range(40)]
    small = []
    while len(tensors) > 10:
        tensors.pop(random.randrange(len(tensors)))
        small.append([bytes(random.randrange(10, 2000)) for _ in range(50)])
    return [tensors, small]


@pytest.mark.parametrize("seed", [None, 5, 6, 7])
def test_conversion_holds_less_than_two_of_the_largest_tensor(seed: int | None, tmp_path: Path) -> None:
    """An embedding of 32 MiB among 71 MiB, in a heap of any shape: padding and stripping rows makes no second copy."""
    held = None if seed is None else _torn_heap(seed)
    source = save_model(tmp_path / "source", llama(hidden_size=512, vocab_size=16001, num_attention_heads=8))
    outcomes = {
        "import-hf": imported(source, tmp_path / "checkpoint"),
        "export-hf": exported(tmp_path / "checkpoint", tmp_path / "back"),
    }
    for command, outcome in outcomes.items():
        assert outcome.nbytes > 2 * outcome.largest_layer, "the model is too small to tell"
        assert outcome.peak_bytes < 2 * outcome.largest_layer, (
            f"{command} held {outcome.peak_bytes:,} bytes; its largest layer has {outcome.largest_layer:,}"
        )
    del held
