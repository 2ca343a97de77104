"""The FLOPs behind the reported throughput are those that a step really computes, counted another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import megatron.training.training as training
import pytest
from harness_pretrain import TINY_GPT, TINY_HYBRID
from harness_resume import train_here
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_args
from torch.utils.flop_counter import FlopCounterMode

from megatron.cpu.replacements import Replacements
from megatron.training.model_flops import stream_flops_per_token

TOKENS = 4 * 32
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0", "--train-iters", "1", "--eval-iters", "0"]
MOE = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "80", "--disable-bias-linear"]
MAMBA = [*TINY_GPT[2:], "--mamba-head-dim", "16", "--mamba-state-dim", "16", "--mamba-num-groups", "2"]


@dataclass
class Counted:
    """One step of a model: what the trainer reports, what ran, and the weights by name."""

    reported: float = 0.0
    measured: int = 0
    args: Any = None
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def causal_half(self) -> float:
        """Of one attention layer, the half of the scores and their product with V that causality makes needless; the
        step of this host computes it, a count leaves it out."""
        return 3 * 2 * TOKENS * 32 * self.args.kv_channels * self.args.num_attention_heads

    def matrices(self) -> int:
        """FLOPs of a step in the products with weight matrices, an expert's by the share of tokens that it gets."""
        total = 0.0
        for name, shape in self.weights.items():
            if len(shape) == 2 and "embedding" not in name:
                share = self.args.moe_router_topk / self.args.num_experts if "local_experts" in name else 1
                total += 6 * TOKENS * shape[0] * shape[1] * share
        vocabulary = 6 * TOKENS * self.args.hidden_size * self.args.padded_vocab_size
        return int(total + vocabulary * (1 + (self.args.mtp_num_layers or 0)))  # the output layer is the embedding's


def count(options: Sequence[str]) -> Counted:
    """Train one step."""
    found = Counted()

    def observing(step: Any) -> Any:
        def observed(*args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                outcome = step(*args, **kwargs)
            found.measured = counter.get_total_flops()
            found.args = get_args()
            found.reported = training.num_floating_point_operations(found.args, found.args.global_batch_size)
            for name, parameter in unwrap_model(args[2])[0].named_parameters():
                found.weights[name] = tuple(parameter.shape)
            return outcome

        return observed

    with Replacements() as replaced:
        replaced.set(training, "train_step", observing(training.train_step))
        train_here([*options, *NO_DROPOUT])
    return found


GPTS = {
    "dense": ([*TINY_GPT], 2),
    "grouped-swiglu": (
        [*TINY_GPT, "--group-query-attention", "--num-query-groups", "2", "--swiglu", "--ffn-hidden-size", "96"],
        2,
    ),
    "moe": ([*TINY_GPT, *MOE, "--moe-shared-expert-intermediate-size", "48", "--moe-layer-freq", "[0,1]"], 2),
    "wide": ([*TINY_GPT, "--wide-residual", "4"], 2),
}


@pytest.mark.parametrize("name", GPTS)
def test_a_gpt_computes_what_is_reported(name: str) -> None:
    options, attention_layers = GPTS[name]
    found = count(options)
    assert found.reported == found.measured - attention_layers * found.causal_half


def test_multi_token_prediction_is_counted_with_its_norms() -> None:
    found = count([*TINY_GPT, "--mtp-num-layers", "1", "--position-embedding-type", "rope"])
    norms = 6 * TOKENS * 3 * 64
    assert found.reported == found.measured - 3 * found.causal_half + norms


# (options, Mamba layers, their inner width, attention layers)
HYBRIDS = {
    "all-kinds": ([*TINY_HYBRID], 1, 128, 1),
    "more-heads": ([*MAMBA, "--hybrid-layer-pattern", "M-", "--mamba-num-heads", "12"], 1, 192, 0),
    "prediction": (
        [*TINY_HYBRID, "--hybrid-layer-pattern", "M*-E/M*", "--position-embedding-type", "rope"],
        2,
        128,
        2,
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_computes_what_is_reported(name: str) -> None:
    """Against the products with its own weights; the scan is upstream's estimate of 7 * inner width * state size."""
    options, mamba_layers, inner, attention_layers = HYBRIDS[name]
    found = count(options)
    scan = 3 * 7 * TOKENS * inner * 16 * mamba_layers
    attention = attention_layers * found.causal_half
    assert found.reported == pytest.approx(found.matrices() + scan + attention, rel=1e-12)


def test_reads_and_writes_are_counted_for_themselves() -> None:
    assert stream_flops_per_token(1, 64, 4, retention=False) == 0
    # Forward, per branch and element: K products and K-1 sums, then K products and K sums; the readout is a read.
    assert stream_flops_per_token(4, 64, 2, retention=False) == 3 * 64 * (2 * (7 + 8) + 7)
    assert stream_flops_per_token(4, 64, 2, retention=True) == 3 * 64 * (2 * (7 + 12) + 7)
