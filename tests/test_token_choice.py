"""Choosing tokens and turning them into text: what is drawn, what can never be drawn, and what is printed when."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.generation.errors import GenerationError
from megatron.training.generation.sampler import Sampler, Sampling, candidates, stream_seed
from megatron.training.generation.token_stream import TokenStream

# Whole numbers among them, so that equal logits are common.
LOGITS = st.lists(st.one_of(st.floats(-20, 20), st.integers(-3, 3).map(float)), min_size=1, max_size=40)
SEEDS = st.integers(0, 2**31)


def by_definition(logits: list[float], temperature: float, top_k: int | None, top_p: float | None) -> set[int]:
    """The ids that may be drawn, found one by one in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    allowed: set[int] = set()
    reached = 0.0
    for i, weight in zip(order, weights, strict=True):
        allowed.add(i)
        reached += weight / sum(weights)
        if top_p is not None and top_p < 1 and reached >= top_p:
            break
    return allowed


@settings(deadline=None, max_examples=200)
@given(
    logits=LOGITS,
    temperature=st.floats(0.05, 5),
    top_k=st.one_of(st.none(), st.integers(1, 50)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1)),
    seed=SEEDS,
)
def test_a_token_outside_top_k_and_top_p_is_never_drawn(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    ids, probabilities = candidates(torch.tensor(logits, dtype=torch.float64), sampling)
    allowed = by_definition(logits, temperature, top_k, top_p)
    # A sum that meets P exactly may fall on either side by rounding: then they differ by the least likely token.
    assert len(set(ids.tolist()) ^ allowed) <= 1, f"{sorted(ids.tolist())} may be drawn, {sorted(allowed)} should"
    assert probabilities.sum().item() == pytest.approx(1)
    sampler = Sampler(sampling, seed)
    drawn = {sampler(torch.tensor(logits)).token for _ in range(20)}
    assert drawn <= set(candidates(torch.tensor(logits), sampling)[0].tolist())


@settings(deadline=None)
@given(logits=LOGITS, seed=SEEDS)
def test_greedy_is_the_first_of_the_largest_logits(logits: list[float], seed: int) -> None:
    values = torch.tensor(logits)
    choice = Sampler(Sampling(), seed)(values)
    assert choice.token == values.tolist().index(max(values.tolist()))
    assert choice.logprob == pytest.approx(torch.log_softmax(values.double(), 0)[choice.token].item())


@settings(deadline=None)
@given(logits=LOGITS, seed=SEEDS)
def test_top_k_of_one_is_greedy(logits: list[float], seed: int) -> None:
    values = torch.tensor(logits)
    assert Sampler(Sampling(1.0, top_k=1), seed)(values) == Sampler(Sampling(), seed)(values)


@settings(deadline=None, max_examples=30)
@given(logits=LOGITS, seed=SEEDS)
def test_a_seed_draws_the_same_tokens_again(logits: list[float], seed: int) -> None:
    first, second = Sampler(Sampling(1.5), seed), Sampler(Sampling(1.5), seed)
    values = torch.tensor(logits)
    assert [first(values) for _ in range(10)] == [second(values) for _ in range(10)]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits, temperature, draws = torch.tensor([2.0, 1.0, 0.0, -1.0]), 0.7, 20000
    sampler = Sampler(Sampling(temperature, top_k=3), seed=11)
    counts = torch.bincount(torch.tensor([sampler(logits).token for _ in range(draws)]), minlength=4).double()
    expected = torch.softmax(logits[:3].double() / temperature, 0) * draws
    assert counts[3] == 0
    chi_squared = ((counts[:3] - expected) ** 2 / expected).sum().item()
    assert chi_squared < 13.8, f"{counts.tolist()} drawn, {expected.tolist()} expected"  # 2 degrees: p = 0.001


def test_each_prompt_and_sample_has_draws_of_its_own() -> None:
    seeds = {stream_seed(seed, prompt, sample) for seed in range(3) for prompt in range(5) for sample in range(5)}
    assert len(seeds) == 75
    assert stream_seed(1, 2, 3) == stream_seed(1, 2, 3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"temperature": math.inf}, "--temperature inf"),
        ({"temperature": 1.0, "top_k": 0}, "--top-k 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p 0.0"),
        ({"temperature": 1.0, "top_p": 1.01}, "--top-p 1.01"),
        ({"temperature": 1.0, "top_p": math.nan}, "--top-p nan"),
        ({"temperature": 0.0, "top_k": 5}, "--top-k and --top-p change nothing"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, float], named: str) -> None:
    with pytest.raises(GenerationError, match=named):
        Sampling(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    with pytest.raises(GenerationError, match="not finite"):
        Sampler(Sampling())(torch.tensor([0.0, bad]))


def as_utf8(ids: list[int]) -> str:
    """A byte-level tokenizer: an id is a byte."""
    return bytes(ids).decode("utf-8", "replace")


@settings(deadline=None, max_examples=300)
@given(prompt=st.text(max_size=8), tail=st.one_of(st.text(max_size=12).map(str.encode), st.binary(max_size=12)))
def test_the_pieces_are_the_text_and_none_ends_inside_a_character(prompt: str, tail: bytes) -> None:
    stream = TokenStream(as_utf8, list(prompt.encode()))
    pieces = [stream.add(byte) for byte in tail]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + stream.finish() == as_utf8(list(tail))


def test_a_character_appears_with_its_last_byte() -> None:
    stream = TokenStream(as_utf8, [])
    assert [stream.add(byte) for byte in "aλ🙂".encode()] == ["a", "", "λ", "", "", "", "🙂"]


def test_a_tokenizer_that_treats_the_start_of_a_text_in_its_own_way_does_so_once() -> None:
    words = ["", "In", "the", "end"]

    def detokenize(ids: list[int]) -> str:
        return " ".join(words[i] for i in ids)  # no space before the first word

    stream = TokenStream(detokenize, [1])
    assert [stream.add(2), stream.add(3), stream.finish()] == [" the", " end", ""]
