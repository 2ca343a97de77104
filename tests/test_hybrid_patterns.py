"""Layer patterns: what upstream takes passes, and each mistake is shown where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_total_layer_count, parse_hybrid_pattern

from megatron.training.hybrid_patterns import (
    DEPTH,
    LAYER_SYMBOLS,
    PIPE,
    check_hybrid_pattern,
    check_layer_count,
    check_pipeline_segments,
    check_uneven_stages,
)

FLAG = "--hybrid-layer-pattern"
HERE = "M*-E"  # what a host without Transformer Engine builds


def complaint(check: Callable[..., None], *arguments: Any, **options: Any) -> str:
    """What a check says of its arguments; empty when it takes them."""
    try:
        check(*arguments, **options)
    except ValueError as error:
        return str(error)
    return ""


def complaint_on(pattern: str) -> str:
    """What is said of a pattern on a host without Transformer Engine."""
    return complaint(check_hybrid_pattern, pattern, FLAG, transformer_engine=False)


def pointed_at(message: str) -> int:
    """The position, from 0, at which the message's caret stands."""
    lines = message.rsplit("\n", 2)
    assert len(lines) == 3, f"no pattern with a caret under it:\n{message}"
    assert lines[2].strip() == "^", f"no caret under the pattern:\n{message}"
    return lines[2].index("^") - 4


@pytest.mark.parametrize(
    ("pattern", "position", "reason"),
    [
        ("M*X-", 2, "'X' at position 3"),
        ("m*", 0, "'m' at position 1"),
        ("M* -", 2, "' ' at position 3"),
        ("M-G", 2, "needs transformer-engine"),
        ("M-+", 2, "needs transformer-engine"),
        ("", 0, "has no layer"),
        ("|", 0, "has no layer"),
        ("/M", 0, "has no layer"),
        ("M*/", 2, "without a layer"),
        ("M*//M", 2, "without a layer"),
        ("M*/M|M", 4, "cuts a prediction depth"),
        ("M*/M/*", 5, "prediction depth 2"),
        ("M*/MM/M", 6, "prediction depth 2"),
    ],
)
def test_a_mistake_is_shown_where_it_stands(pattern: str, position: int, reason: str) -> None:
    message = complaint_on(pattern)
    assert reason in message, message
    assert pointed_at(message) == position, message


def test_two_kinds_of_attention_are_refused_at_the_second() -> None:
    with pytest.raises(ValueError, match=r"'\+' at position 3 .*either attention") as error:
        check_hybrid_pattern("*-+", FLAG, transformer_engine=True)
    assert pointed_at(str(error.value)) == 2


@given(st.text(alphabet="M*-E", max_size=6), st.text(alphabet="M*-E|", min_size=1, max_size=8), st.integers(0, 3))
def test_a_pattern_that_passes_means_the_same_to_upstream(depth: str, main: str, depths: int) -> None:
    pattern = main + (DEPTH + depth) * depths
    message = complaint_on(pattern)
    if (depths and not depth) or not main.strip(PIPE):
        assert message, f"{pattern} has a part without a layer and was taken"
        return
    assert not message, f"{pattern} is a good pattern:\n{message}"
    parsed = parse_hybrid_pattern(pattern)
    assert (parsed.main_pattern, parsed.mtp_num_depths) == (main, depths)
    check_layer_count(pattern, FLAG, get_hybrid_total_layer_count(pattern))


@given(st.text(max_size=8))
def test_any_text_is_taken_or_pointed_at(pattern: str) -> None:
    message = complaint_on(pattern)
    if not message:
        assert set(pattern) <= {*HERE, PIPE, DEPTH}
    elif pattern.isprintable():
        assert 0 <= pointed_at(message) <= len(pattern)


@pytest.mark.parametrize(("num_layers", "position"), [(3, 4), (2, 3), (5, 5), (0, 0)])
def test_a_layer_count_that_disagrees_is_shown_in_the_pattern(num_layers: int, position: int) -> None:
    with pytest.raises(ValueError, match=rf"--num-layers is {num_layers}, {FLAG} has 4 layers") as error:
        check_layer_count("M*|-E/MM", FLAG, num_layers)
    assert pointed_at(str(error.value)) == position


@pytest.mark.parametrize("pattern", ["M*|-E", "M|", "M*|-E/M"])
def test_a_cut_pattern_on_one_stage_is_pointed_at(pattern: str) -> None:
    with pytest.raises(ValueError, match="--pipeline-model-parallel-size is 1") as error:
        check_pipeline_segments(pattern, FLAG, 1)
    assert pointed_at(str(error.value)) == pattern.index(PIPE)


@given(st.lists(st.text("M*", max_size=2), min_size=2, max_size=8).filter(lambda parts: len(parts) % 2 == 0))
def test_only_the_first_and_the_last_segment_may_be_empty(parts: list[str]) -> None:
    pattern = PIPE.join(parts)
    message = complaint(check_pipeline_segments, pattern, FLAG, 2)
    if all(parts[1:-1]):
        assert not message, message
    else:
        empty = parts.index("", 1)
        assert f"segment {empty + 1} of" in message, message or f"{pattern} was taken"
        assert pattern[pointed_at(message) :].startswith(PIPE * 2)


@given(st.integers(1, 9), st.integers(2, 4), st.none() | st.integers(-1, 9), st.none() | st.integers(-1, 9))
def test_uneven_stages_are_taken_only_when_upstream_gives_every_layer_one_stage(
    layers: int, stages: int, first: int | None, last: int | None
) -> None:
    pattern = "M*-E"[: layers % 4] + "M" * (layers - layers % 4)
    ends = [first, *[None] * (stages - 2), last]
    rest, others = layers - (first or 0) - (last or 0), ends.count(None)
    whole = min(first or 0, last or 0) >= 0 and rest >= 0 and (rest % others == 0 if others else rest == 0)
    message = complaint(check_uneven_stages, pattern, FLAG, stages, first, last)
    assert bool(message) != whole, f"{layers} layers, {ends}: {message or 'taken'}"


@pytest.mark.parametrize(("pattern", "stages"), [("M*-", 2), ("M|*|-", 2), ("M*|-E", 3), ("M*|-E", 4)])
def test_a_pattern_that_does_not_divide_among_the_stages_is_refused(pattern: str, stages: int) -> None:
    with pytest.raises(ValueError, match=rf"divide among {stages} pipeline stages") as error:
        check_pipeline_segments(pattern, FLAG, stages)
    assert 0 <= pointed_at(str(error.value)) <= len(pattern)


def test_every_symbol_of_upstream_is_known() -> None:
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

    assert set(LAYER_SYMBOLS) == Symbols.VALID_LAYERS
