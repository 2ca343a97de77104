"""A Hugging Face folder or checkpoint that cannot be converted is refused by the name of what stands in the way.

pytest tests/test_convert_hf_refusals.py
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_hf import change_config, llama, mamba2, save_model, stored_config, stored_tensors
from safetensors.torch import save_file

from megatron.training.huggingface.errors import HuggingFaceError
from megatron.training.huggingface.export_plan import plan_export, write_export
from megatron.training.huggingface.folder_reader import INDEX, SINGLE, HfFolder
from megatron.training.huggingface.import_plan import ImportPlan, plan_import

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family, and one in shards; tests change copies."""
    base = tmp_path_factory.mktemp("folders")
    return {
        "llama": save_model(base / "llama", llama()),
        "mamba2": save_model(base / "mamba2", mamba2()),
        "sharded": save_model(base / "sharded", llama(), max_shard_size="60KB"),
    }


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copy a folder of `folders`."""
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))


def imported(folder: Path) -> tuple[ImportPlan, dict[str, torch.Tensor]]:
    """The plan and Megatron's tensors of a folder."""
    with HfFolder.open(folder) as opened:
        plan = plan_import(opened, "cpu")
        return plan, dict(plan.tensors(opened))


def refusal(folder: Path) -> str:
    """What importing a folder says."""
    with pytest.raises(HuggingFaceError) as error:
        imported(folder)
    return str(error.value)


LLAMA3 = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"model_type": "qwen2"}, "model_type 'qwen2'; llama and mamba2"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM is wanted"),
        ("llama", {"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map"),
        ("llama", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"qk_norm": True}, "qk_norm = True, which transformers' own configuration"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; 'silu' is wanted"),
        ("llama", {"attention_bias": True}, "attention_bias = True and mlp_bias = False"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}}, "type 'yarn'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.5}}, "scaling by 2.5"),
        ("llama", {"rope_parameters": {"rope_theta": 10000.5, "rope_type": "default"}}, "rope_theta = 10000.5"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 4096}},
            "original_max_position_embeddings = 4096",
        ),
        ("llama", {"num_attention_heads": 5}, "cannot be read"),
        ("mamba2", {"use_bias": True}, "use_bias = True; False is wanted"),
        ("mamba2", {"use_conv_bias": False}, "use_conv_bias = False; True is wanted"),
        ("mamba2", {"conv_kernel": 3}, "conv_kernel = 3; 4 is wanted"),
        ("mamba2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06"),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\]"),
    ],
)
def test_what_megatron_cannot_express_is_named(
    copy: Callable[[str], Path], family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(HuggingFaceError, match=message):
        imported(change_config(copy(family), **fields))


def test_fields_that_say_nothing_are_left_alone(copy: Callable[[str], Path]) -> None:
    fields = {"attention_dropout": 0.1, "use_cache": False, "sliding_window": None, "eos_token_id": [2, 5]}
    plan, _ = imported(change_config(copy("llama"), **fields, some_switch=False))
    assert plan.args.attention_dropout == 0.1


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the tensors of a folder."""
    tensors = stored_tensors(folder)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def test_missing_unknown_and_misshaped_tensors_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    assert f"missing: {Q_PROJ}" in refusal(rewrite(folder, lambda tensors: tensors.pop(Q_PROJ)))
    said = refusal(rewrite(folder, lambda tensors: tensors.update({f"{Q_PROJ}_lora": torch.zeros(2)})))
    assert f"missing: {Q_PROJ}" in said
    assert f"unknown: {Q_PROJ}_lora" in said
    said = refusal(
        rewrite(folder, lambda tensors: (tensors.pop(f"{Q_PROJ}_lora"), tensors.update({Q_PROJ: torch.zeros(64, 32)})))
    )
    assert f"{Q_PROJ} has shape [64, 32], [64, 64] is wanted" in said


def test_other_dtypes_are_refused_and_no_value_is_rounded(copy: Callable[[str], Path]) -> None:
    folder = copy("mamba2")
    said = refusal(rewrite(folder, lambda tensors: tensors.update({"backbone.norm_f.weight": torch.zeros(64).int()})))
    assert "dtype I32" in said
    folder = save_model(folder.with_name("half"), llama().to(torch.bfloat16))
    exact = torch.full((64,), 0.5)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": exact}))
    _, tensors = imported(folder)
    assert tensors["decoder.final_layernorm.weight"].dtype == torch.bfloat16
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": exact + 1e-5}))
    assert "model.norm.weight is float32 and the model bfloat16" in refusal(folder)


def test_a_tied_head_that_differs_is_refused_and_an_equal_one_taken(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tied", llama(tie_word_embeddings=True))
    embedding = stored_tensors(folder)["model.embed_tokens.weight"]
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    _, tensors = imported(folder)
    assert "output_layer.weight" not in tensors
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    assert "lm_head.weight differs from the embedding" in refusal(folder)


def test_folders_that_are_not_whole_are_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "absent")
    folder = copy("llama")
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])
    assert f"{SINGLE} cannot be read" in refusal(folder)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    assert "pickled weights" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "is no JSON" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_shards_and_index_must_agree(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    imported(folder)
    changed = {**index["weight_map"], Q_PROJ: next(name for name in shards if name != index["weight_map"][Q_PROJ])}
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": changed}))
    assert Q_PROJ in refusal(folder)
    (folder / INDEX).write_text(json.dumps(index))
    (folder / shards[-1]).unlink()
    assert f"{shards[-1]} is not there" in refusal(folder)


# ---- Export


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"normalization": "LayerNorm"}, "normalization = 'LayerNorm' \\('RMSNorm' is wanted\\)"),
        ("llama", {"qk_layernorm": True}, "qk_layernorm = True"),
        ("llama", {"num_experts": 8}, "num_experts = 8"),
        ("llama", {"rotary_percent": 0.5}, "rotary_percent = 0.5"),
        ("llama", {"swiglu": False}, "swiglu = False"),
        ("llama", {"add_qkv_bias": True}, "add_qkv_bias = True"),
        ("llama", {"mtp_num_layers": 1}, "mtp_num_layers = 1"),
        ("mamba2", {"hybrid_layer_pattern": "MM*"}, "layer pattern is 'MM\\*'"),
    ],
)
def test_models_that_transformers_lacks_are_named(
    folders: dict[str, Path], family: str, change: dict[str, Any], message: str
) -> None:
    plan, tensors = imported(folders[family])
    args = Namespace(**{**vars(plan.args), **change})
    with pytest.raises(HuggingFaceError, match=message):
        plan_export(args, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, "cpu")


def test_a_failed_export_leaves_nothing_and_never_overwrites(folders: dict[str, Path], tmp_path: Path) -> None:
    plan, tensors = imported(folders["llama"])
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with pytest.raises(HuggingFaceError, match=r"missing: decoder.final_layernorm.weight"):
        plan_export(plan.args, {n: s for n, s in shapes.items() if n != "decoder.final_layernorm.weight"}, "cpu")
    export = plan_export(plan.args, shapes, "cpu")

    def fails_late(name: str) -> torch.Tensor:
        if name == "output_layer.weight":
            raise HuggingFaceError("the disk is gone")
        return tensors[name]

    with pytest.raises(HuggingFaceError, match="the disk is gone"):
        write_export(export, fails_late, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [], "something half-written is left"
    (tmp_path / "out").mkdir()
    with pytest.raises(HuggingFaceError, match="is there already"):
        write_export(export, tensors.__getitem__, tmp_path / "out")


def test_config_of_another_model_is_refused_as_reference(folders: dict[str, Path]) -> None:
    plan, tensors = imported(folders["llama"])
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with pytest.raises(HuggingFaceError, match="a mamba2's, the model is a llama"):
        plan_export(plan.args, shapes, "cpu", like=folders["mamba2"])
    assert stored_config(folders["llama"]) == plan_export(plan.args, shapes, "cpu").config
