"""What conversion does to a weight can be undone bit for bit, and its name tables cover every tensor exactly once.

pytest tests/test_convert_hf_layouts.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness_hf import TINY_LLAMA, llama, mamba2
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron.core.transformer.wide_residual import _MIN_CONTROLLER_NUMEL
from megatron.training.huggingface.model_arguments import megatron_flags, parse_flags
from megatron.training.huggingface.model_configs import HfModel, read_config
from megatron.training.huggingface.name_tables import CONTROLLER_ELEMENTS, RULES, SIZES, tensor_table
from megatron.training.huggingface.tensor_layouts import (
    fuse_gate_up,
    fuse_qkv,
    pad_rows,
    split_gate_up,
    split_qkv,
    strip_rows,
)

DIMENSION = st.integers(1, 5)
TRAILING = st.lists(DIMENSION, max_size=2)


def numbered(*shape: int) -> Tensor:
    """A tensor whose elements all differ."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@given(DIMENSION, DIMENSION, DIMENSION, TRAILING)
def test_qkv_comes_apart_as_it_was_put_together(groups: int, share: int, channels: int, rest: list[int]) -> None:
    q = numbered(groups * share * channels, *rest)
    k, v = (numbered(groups * channels, *rest) + offset for offset in (1e4, 2e4))
    fused = fuse_qkv(q, k, v, groups=groups)
    assert fused.shape == (groups * (share + 2) * channels, *rest)
    for found, wanted in zip(split_qkv(fused, groups=groups, head_channels=channels), (q, k, v), strict=True):
        assert torch.equal(found, wanted)
    parts = split_qkv(numbered(*fused.shape), groups=groups, head_channels=channels)
    assert torch.equal(fuse_qkv(*parts, groups=groups), numbered(*fused.shape))


@given(DIMENSION, TRAILING)
def test_gate_and_up_come_apart_as_they_were_put_together(width: int, rest: list[int]) -> None:
    gate, up = numbered(width, *rest), numbered(width, *rest) + 1e4
    fused = fuse_gate_up(gate, up)
    assert torch.equal(fused[:width], gate), "SwiGLU's first half is the gate in Megatron"
    for found, wanted in zip(split_gate_up(fused), (gate, up), strict=True):
        assert torch.equal(found, wanted)


@given(DIMENSION, st.integers(0, 7), TRAILING)
def test_padding_is_zero_and_goes_as_it_came(rows: int, more: int, rest: list[int]) -> None:
    table = numbered(rows, *rest) + 1
    padded = pad_rows(table, rows + more)
    assert padded.shape[0] == rows + more
    assert not padded[rows:].any()
    assert torch.equal(strip_rows(padded, rows), table)


def test_rows_of_a_query_group_stand_together() -> None:
    """Two groups of two heads with one channel: Megatron's order is q0 q1 k0 v0 q2 q3 k1 v1."""
    q, k, v = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert fuse_qkv(q, k, v, groups=2).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fuse_qkv(numbered(6), numbered(4), numbered(4), groups=2), "do not divide into 2"),
        (lambda: split_qkv(numbered(9), groups=2, head_channels=1), "9 rows do not divide"),
        (lambda: split_qkv(numbered(8), groups=2, head_channels=2), "no whole number of heads"),
        (lambda: fuse_gate_up(numbered(3), numbered(4)), "halves of a SwiGLU"),
        (lambda: split_gate_up(numbered(3)), "3 rows are not the two halves"),
        (lambda: pad_rows(numbered(5), 4), "do not fit into 4"),
        (lambda: strip_rows(numbered(3), 4), "4 rows are wanted"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def models() -> list[tuple[HfModel, Any]]:
    """Every switch of the tables, with transformers' own model beside it."""
    built = [
        llama(),
        llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        mamba2(),
        mamba2(tie_word_embeddings=True),
    ]
    return [(read_config({**model.config.to_dict(), "architectures": None}), model) for model in built]


def test_every_parameter_of_transformers_models_is_in_the_table_once_with_its_shape() -> None:
    for described, model in models():
        table = tensor_table(described.family, described.sizes(128), described.switches)
        wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        named = [name for pair in table for name in pair.hf]
        assert len(named) == len(set(named)), "a tensor stands in two rows"
        found = {name: shape for pair in table for name, shape in zip(pair.hf, pair.hf_shapes, strict=True)}
        assert found == wanted


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3), st.integers(2, 200), st.booleans())
def test_every_row_of_the_table_can_be_undone(which: int, streams: int, retention: bool) -> None:
    described, _ = MODELS[which]
    fields = {**described.fields, "num_streams": streams, "learned_retention": retention}
    model = HfModel(described.family, fields)
    for pair in tensor_table(model.family, model.sizes(128), model.switches):
        tensors = [numbered(*shape) + 1 + 1e5 * n for n, shape in enumerate(pair.hf_shapes)]
        whole = pair.to_megatron(tensors)
        assert tuple(whole.shape) == pair.megatron_shape
        for name, found, wanted in zip(pair.hf, pair.to_hf(whole), tensors, strict=True):
            assert torch.equal(found, wanted), name


MODELS = models()


def test_the_tables_use_known_sizes_and_the_padding_of_the_model() -> None:
    used = {size for rules in RULES.values() for rule in rules for shape in rule.shapes for size in shape}
    assert used <= set(SIZES)
    assert CONTROLLER_ELEMENTS == _MIN_CONTROLLER_NUMEL


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_rotary_angles_are_those_of_transformers_up_to_long_contexts(rope: dict[str, Any]) -> None:
    config = LlamaConfig(**TINY_LLAMA | {"head_dim": 64, "max_position_embeddings": 65536, "rope_parameters": rope})
    described = read_config({**config.to_dict(), "architectures": None})
    args, _ = parse_flags([*megatron_flags(described, sequence_length=64), "--padded-vocab-size", "128"], "cpu")
    ours = RotaryEmbedding(
        args.kv_channels,
        args.rotary_percent,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        use_cpu_initialization=True,
        cp_group=torch.distributed.GroupMember.NON_GROUP_MEMBER,
    )
    positions = torch.tensor([0, 1, 500, 9000, 60000])
    found = ours.get_freqs_non_repeated(65536)[positions].double()
    theirs = LlamaRotaryEmbedding(config)
    wanted = positions[:, None].double() * theirs.inv_freq.double()
    assert theirs.attention_scaling == 1
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
