"""Arguments of a hybrid: what upstream would ignore, or meet with an assertion in the model, is one sentence."""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from typing import Any

import pytest
import torch
from harness_models import build_hybrid, run, single_process_megatron, token_batch

from megatron.core.models.hybrid.local_hybrid_specs import local_hybrid_stack_spec, with_query_key_norms
from megatron.training.hybrid_arguments import check_hybrid_arguments, refuse_hybrid_arguments


def arguments(**given: Any) -> Namespace:
    """The parsed arguments that the check looks at."""
    defaults: dict[str, Any] = {
        "hybrid_layer_pattern": None,
        "hybrid_override_pattern": None,
        "mtp_hybrid_override_pattern": None,
        "mtp_num_layers": None,
        "num_layers": None,
        "num_experts": None,
        "moe_layer_freq": 1,
        "transformer_impl": "local",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "hidden_size": 64,
        "mamba_head_dim": 16,
        "mamba_num_groups": 4,
        "mamba_num_heads": None,
        "use_checkpoint_args": False,
    }
    assert not given.keys() - defaults.keys()
    return Namespace(**{**defaults, **given})


def complaint(**given: Any) -> str:
    """What is said of these arguments; empty when they are taken."""
    try:
        check_hybrid_arguments(arguments(**given))
    except ValueError as error:
        return str(error)
    return ""


M = {"hybrid_layer_pattern": "M*-"}
TP4, PP2 = {"tensor_model_parallel_size": 4}, {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "needs --hybrid-layer-pattern"),
        ({"hybrid_layer_pattern": "M", "hybrid_override_pattern": "M"}, "two names of one option"),
        ({"hybrid_override_pattern": "MX"}, "'X' at position 2 of --hybrid-override-pattern"),
        ({**M, "num_layers": 4}, "--num-layers is 4"),
        ({"hybrid_layer_pattern": "ME"}, "needs --num-experts"),
        ({**M, "num_experts": 4}, "'M*-' has no E"),
        ({"hybrid_layer_pattern": "ME", "num_experts": 4, "moe_layer_freq": 2}, "leave --moe-layer-freq out"),
        ({**M, **PP2}, "2 pipeline stages"),
        ({**M, **PP2, "decoder_first_pipeline_num_layers": 9}, "of the 3 layers of --hybrid-layer-pattern leave -6"),
        ({"hybrid_layer_pattern": "M*|-"}, "--pipeline-model-parallel-size is 1"),
        ({**M, "mtp_num_layers": 2}, 'for example --hybrid-layer-pattern "M*-/*/*"'),
        ({"hybrid_layer_pattern": "M/*", "mtp_num_layers": 2}, "has 1 depths; leave --mtp-num-layers out"),
        ({**M, "mtp_num_layers": 2, "mtp_hybrid_override_pattern": "M"}, '--hybrid-layer-pattern "M*-/M/M"'),
        ({**M, "mtp_hybrid_override_pattern": "M"}, '--hybrid-layer-pattern "M*-/M"'),
        ({"hybrid_layer_pattern": "M/*", "mtp_hybrid_override_pattern": "M"}, "--mtp-hybrid-override-pattern"),
        ({**M, "mamba_head_dim": 48}, "2 x --hidden-size 64 / --mamba-head-dim 48 heads, which is no whole number"),
        ({**M, "mamba_num_groups": 3}, "the 8 heads of a Mamba layer"),
        ({**M, "mamba_num_groups": 0}, "--mamba-num-groups is 0"),
        ({**M, "mamba_num_heads": 6}, "the 6 heads of a Mamba layer (--mamba-num-heads)"),
        ({**M, "mamba_num_groups": 2, **TP4}, "2 groups (--mamba-num-groups) do not divide"),
        ({**M, "mamba_num_groups": 2, "mamba_num_heads": 6, **TP4}, "6 heads of a Mamba layer (--mamba-num-heads) do"),
    ],
    ids=str,
)
def test_arguments_that_no_hybrid_can_be_built_from_are_refused(given: dict[str, Any], reason: str) -> None:
    said = complaint(**given)
    assert reason in said, said or "taken"


@pytest.mark.parametrize(
    "given",
    [
        {**M, **PP2, "decoder_first_pipeline_num_layers": 1},
        {"hybrid_layer_pattern": "M|*-", **PP2},
        {"hybrid_layer_pattern": "M/*/*", "mtp_num_layers": 2, "mtp_hybrid_override_pattern": "*"},
        {"hybrid_layer_pattern": "*-", "mamba_num_groups": 3},
        {**M, **TP4},
        {**M, "mamba_num_heads": 12, "mamba_head_dim": 7},
    ],
    ids=str,
)
def test_arguments_that_fit_are_taken(given: dict[str, Any]) -> None:
    assert complaint(**given) == ""


def test_mamba_sizes_are_taken_exactly_when_the_layer_can_be_built() -> None:
    taken = 0
    with single_process_megatron():
        for groups, head_dim, heads in product((1, 2, 3, 5, 8), (8, 48), (None, 1, 6, 8)):
            sizes = {"mamba_num_groups": groups, "mamba_head_dim": head_dim, "mamba_num_heads": heads}
            said = complaint(hybrid_layer_pattern="M", **sizes)
            try:
                build_hybrid("M", **sizes)
                builds = True
            except AssertionError:
                builds = False
            assert builds != bool(said), f"{sizes}: {said or 'taken'}"
            taken += builds
    assert 0 < taken < 40, "the sizes tried are all of one kind"


@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_either_name_of_the_pattern_is_taken_here_and_refused_for_a_gpt(name: str) -> None:
    given = arguments(**{name: "M*-"}, num_layers=3)
    check_hybrid_arguments(given)
    with pytest.raises(ValueError, match=r"give it to pretrain_mamba\.py"):
        refuse_hybrid_arguments(given)


def test_the_older_name_is_taken_again_on_a_resume_with_the_arguments_of_the_checkpoint() -> None:
    both = {"hybrid_layer_pattern": "M*-", "hybrid_override_pattern": "M*-", "use_checkpoint_args": True}
    restored = arguments(**both)
    check_hybrid_arguments(restored)
    assert (restored.hybrid_layer_pattern, restored.hybrid_override_pattern) == ("M*-", None)  # upstream takes one
    said = complaint(**{**both, "hybrid_override_pattern": "M|*-"})
    assert "give --hybrid-layer-pattern instead" in said, said or "taken"
    with pytest.raises(ValueError, match="--use-checkpoint-args takes it from the checkpoint"):
        refuse_hybrid_arguments(restored)


@pytest.mark.parametrize("num_streams", [None, 2])
def test_normed_queries_and_keys_run_in_a_hybrid_without_transformer_engine(num_streams: int | None) -> None:
    spec = with_query_key_norms(local_hybrid_stack_spec)
    with single_process_megatron():
        model = build_hybrid("M*/*", num_streams, qk_layernorm=True, stack_spec=spec)
        run(model, token_batch(), token_batch(8)).mean().backward()
        norms = {name: norm for name, norm in model.named_modules() if name.endswith(("q_layernorm", "k_layernorm"))}
        assert len(norms) == 4, f"two in the stack and two in the prediction depth are wanted: {list(norms)}"
        for name, norm in norms.items():
            assert isinstance(norm, torch.nn.LayerNorm)
            assert norm.weight.grad is not None, name
