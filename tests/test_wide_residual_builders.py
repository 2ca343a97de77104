"""What pretrain_gpt.py builds: upstream's own GPT without --wide-residual, the wide one with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from harness_models import single_process_megatron
from harness_pretrain import TINY_GPT
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.training import destroy_global_state

from megatron.core.models.gpt.wide_residual_gpt_model import WideResidualGPTModel
from megatron.core.transformer.wide_residual_transformer_layer import WideResidualTransformerLayer
from megatron.training.model_kinds import gpt_model_config
from megatron.training.pretrain_entry import parse_training_arguments
from megatron.training.stream_layout import choose_block_size


@pytest.fixture(autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield
        destroy_global_state()


def build(config: GPTModelConfig) -> GPTModel:
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    return config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def test_without_the_flag_the_model_is_upstreams_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT, "--train-iters", "1"])
    args = parse_training_arguments("cpu")
    config = gpt_model_config(args)
    assert type(config) is GPTModelConfig
    assert config.get_builder_cls() is GPTModelBuilder
    ours, upstreams = build(config), build(gpt_config_from_args(args))
    assert type(ours) is GPTModel
    for (name, value), (upstream_name, wanted) in zip(
        ours.named_parameters(), upstreams.named_parameters(), strict=True
    ):
        assert name == upstream_name
        assert torch.equal(value, wanted), f"{name} differs from upstream's"


def test_with_the_flag_the_model_is_wide_and_its_base_weights_are_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = ["--recompute-granularity=selective", "--recompute-modules=residual_stream"]
    flags = ["--wide-residual=3", *replay, "--residual-stream-recompute-num-layers=auto"]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT, "--train-iters", "1", *flags])
    args = parse_training_arguments("cpu")
    wide = build(gpt_model_config(args))
    assert type(wide) is WideResidualGPTModel
    assert wide.config.recompute_modules == ["residual_stream"]
    assert wide.config.residual_stream_recompute_num_layers == choose_block_size(args, wide.config, 3)
    args.recompute_modules, args.recompute_granularity = None, None
    upstreams = build(gpt_config_from_args(args))
    found = dict(wide.named_parameters())
    for name, wanted in upstreams.named_parameters():
        assert torch.equal(found[name], wanted), f"{name} differs from upstream's"


class OwnAttention(DotProductAttention):
    """What a user's own layer spec may name."""


@pytest.mark.parametrize("kind", ["spec", "function", "function of the stage"])
def test_a_layer_spec_of_the_users_own_is_widened(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT, "--train-iters", "1", "--wide-residual=3"])
    config = gpt_model_config(parse_training_arguments("cpu"))
    own = get_gpt_layer_local_spec()
    own.submodules.self_attention.submodules.core_attention = OwnAttention
    config.transformer_layer_spec = {
        "spec": own,
        "function": lambda config: own,
        "function of the stage": lambda config, vp_stage: own,
    }[kind]
    layer = build(config).decoder.layers[0]
    assert type(layer) is WideResidualTransformerLayer
    assert type(layer.self_attention.core_attention) is OwnAttention, "the user's spec was not taken"
    config.attention_backend = AttnBackend.local  # as upstream's builder takes it
    local = config.get_builder_cls()(config)._layer_spec(None)
    assert local.submodules.self_attention.submodules.core_attention is DotProductAttention
