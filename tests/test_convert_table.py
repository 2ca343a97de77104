"""The table of tensors: every row, divided over any layout and put together again, is the same bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.model_sizes import shape_of
from megatron.training.checkpoints.stored_names import (
    combined_controller_name,
    parse_key,
    split_controller_name,
    stored_key,
)
from megatron.training.checkpoints.tensor_splits import Sectioned
from megatron.training.checkpoints.tensor_table import BLOCKS, Row, TensorPlace, find_tensor, registration_order

ROWS = [(block, row) for block, (_, _, rows) in enumerate(BLOCKS) for row in rows if row.shape]
_IDS = [f"{block}-{row.name}" for block, row in ROWS]


def _place(block: int, row: Row, layer: int = 3, depth: int = 1, expert: int = 2) -> TensorPlace:
    prefix = BLOCKS[block][0]
    return TensorPlace(
        row,
        block,
        layer if "{layer}" in prefix else None,
        depth if "{depth}" in prefix else None,
        expert if row.expert else None,
    )


@st.composite
def sizes_and_ranks(draw) -> tuple[dict[str, int], int]:
    """Sizes of a model that `ranks` tensor-parallel ranks can divide, with odd numbers where nothing forbids them."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    small = st.integers(1, 3)
    sizes = {name: ranks * draw(small) for name in ("V", "A", "Q", "F", "f", "s", "I", "G", "H", "D")}
    sizes |= {"P": draw(small), "h": draw(small), "E": draw(small), "S": draw(small), "W": draw(small), "p": 128}
    return {**sizes, "g": draw(st.sampled_from([1, 2]))}, ranks


@pytest.mark.parametrize(("block", "row"), ROWS, ids=_IDS)
@settings(max_examples=12, deadline=None)
@given(case=sizes_and_ranks())
def test_a_divided_tensor_joins_to_itself(block: int, row: Row, case: tuple[dict[str, int], int]) -> None:
    sizes, ranks = case
    shape = tuple(length or 1 for length in shape_of(row.shape, sizes))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    split = _place(block, row).split(gated=sizes["g"] == 2)
    shards = [split.shard(whole, ranks, rank, sizes) for rank in range(ranks)]
    assert all(tuple(shard.shape) == split.shard_shape(shape, ranks) for shard in shards)
    assert split.whole_shape(tuple(shards[0].shape), ranks) == shape
    assert torch.equal(split.join(shards, sizes), whole), f"{row.name} is another tensor after {ranks} ranks"


@pytest.mark.parametrize(("block", "row"), ROWS, ids=_IDS)
def test_names_and_keys_lead_back_to_their_row(block: int, row: Row) -> None:
    place = _place(block, row)
    assert find_tensor(place.name) == place
    assert registration_order(place.name) == registration_order(find_tensor(place.name).name)
    keys = row.split.keys if isinstance(row.split, Sectioned) else ()
    for slot in ("", "exp_avg", "exp_avg_sq", "fp32_param", "param"):
        for stacked in (False, True) if place.in_decoder else (False,):
            for section in range(len(keys)) if keys else (None,):
                key = stored_key(place, slot, stacked=stacked, section=section)
                parsed = parse_key(key)
                found = (parsed.place.row, parsed.place.block, parsed.slot, parsed.stacked, parsed.section)
                assert found == (row, block, slot, stacked, section), f"{key} is read as {parsed}"
                if row.controller not in (None, "exit") and "shortcut" not in row.name:
                    combined = combined_controller_name(key)
                    assert combined != key
                    assert split_controller_name(combined) == key
                    assert parse_key(combined).combined


def test_no_two_rows_share_a_key() -> None:
    keys: dict[str, str] = {}
    for block, row in ROWS:
        for fused in (False, True):
            sections = row.split.keys if isinstance(row.split, Sectioned) else ()
            for section in range(len(sections)) if sections else (None,):
                key = stored_key(_place(block, row, expert=0), "", stacked=False, fused=fused, section=section)
                assert keys.setdefault(key, row.name) == row.name, f"{key} stands for {row.name} and {keys[key]}"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("decoder.layers.3.mlp.linear_fc1.weigth", "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.0.residual_read_mlp.read_map.logits", "decoder.layers.0.residual_read_mlp.read_map.logit"),
        ("embedding.word_embedding.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_known_one(name: str, nearest: str) -> None:
    with pytest.raises(ConversionError, match="no tensor that this converter knows") as caught:
        find_tensor(name)
    assert nearest in str(caught.value)
    with pytest.raises(ConversionError, match="no tensor that this converter knows"):
        parse_key(name)


def test_what_ranks_cannot_divide_is_refused() -> None:
    split = find_tensor("decoder.layers.0.mlp.linear_fc1.weight").split(gated=True)
    with pytest.raises(ConversionError, match="cannot be divided among 4 ranks"):
        split.shard(torch.zeros(12, 2), 4, 0, {})
