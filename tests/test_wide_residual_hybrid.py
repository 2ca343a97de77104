"""A hybrid on wide residual streams computes the ordinary hybrid at its start, and replays its streams bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from harness_models import (
    SEQUENCE,
    WIDTH,
    build_gpt,
    build_hybrid,
    controllers,
    hybrid_config,
    run,
    single_process_megatron,
    token_batch,
    transformer_config,
)
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.core.models.hybrid.local_hybrid_specs import FUSED_NORM_KEYS, local_hybrid_stack_spec
from megatron.core.models.hybrid.wide_residual_hybrid_model import WideResidualHybridModel
from megatron.core.models.hybrid.wide_residual_hybrid_specs import (
    wide_residual_hybrid_stack_spec,
    wide_residual_local_hybrid_stack_spec,
    widen_hybrid_stack_spec,
)
from megatron.core.models.hybrid.wide_residual_hybrid_stack import widen_hybrid_submodules
from megatron.core.ssm.wide_residual_mamba_layer import WideResidualMambaLayer
from megatron.core.transformer.wide_residual_config import WideResidualConfig, widen_transformer_config

TIED = {"share_embeddings_and_output_weights": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "M*-E untied": ("M*-E", {}),
    "M*-E tied": ("M*-E", {"model_options": TIED}),
    "Mamba alone, RMSNorm": ("MM", {"normalization": "RMSNorm"}),
    "rope, shared expert, biases in attention": (
        "*EM",
        {"model_options": {"position_embedding_type": "rope"}, "moe_shared_expert_intermediate_size": 32},
    ),
    "MLP first, swiglu": ("-M*", {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}),
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


@pytest.mark.parametrize("num_streams", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_wide_hybrid_equals_the_ordinary_hybrid_at_init(name: str, num_streams: int) -> None:
    pattern, options = MODELS[name]
    wanted = run(build_hybrid(pattern, **options), token_batch())
    found = run(build_hybrid(pattern, num_streams, **options), token_batch())
    difference = ((found - wanted).abs().max() / wanted.abs().max()).item()
    assert difference <= 1e-6, f"{name}, K={num_streams}: logits differ by {difference:.2e} of the largest"


@pytest.mark.parametrize("name", MODELS)
def test_hybrid_base_weights_are_bit_equal_and_base_names_the_ordinary_ones(name: str) -> None:
    pattern, options = MODELS[name]
    ordinary = dict(build_hybrid(pattern, **options).named_parameters())
    wide_model = build_hybrid(pattern, 4, **options)
    wide = dict(wide_model.named_parameters())
    assert set(wide) - set(ordinary) == set(controllers(wide_model)), "only controllers may be new"
    assert set(ordinary) <= set(wide), f"lost: {set(ordinary) - set(wide)}"
    for key, value in ordinary.items():
        assert torch.equal(value, wide[key]), f"{key} was drawn differently"


def test_hybrid_state_keys_are_the_documented_ones() -> None:
    wide = build_hybrid("M*-", 3, wide_options={"learned_retention": True})
    layers = "decoder.layers."
    wanted = {"decoder.residual_stream_readout.exit_map.logit"}
    for layer, suffix in (("0", ""), ("1", "_self_attn"), ("2", "_mlp")):
        wanted |= {
            f"{layers}{layer}.residual_read{suffix}.read_map.logit",
            f"{layers}{layer}.residual_write{suffix}.write_map.logit",
            f"{layers}{layer}.residual_write{suffix}.retention.retention_logit",
        }
    assert set(controllers(wide)) == wanted


def test_the_older_combined_keys_load_strictly_into_a_hybrid() -> None:
    model = build_hybrid("M*-", 3)
    older = {}
    for key, value in model.state_dict().items():
        older[re.sub(r"\.residual_(read|write)(?=[._])", ".residual_connection", key)] = value
    key = "decoder.layers.0.residual_connection.read_map.logit"
    older[key] = older[key].clone()
    older[key][:3] = 0.5
    before = dict(older)
    model.load_state_dict(older, strict=True)
    assert older.keys() == before.keys(), "the caller's dict was changed"
    assert model.decoder.layers[0].residual_read.read_map.logit[:3].eq(0.5).all()


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_a_hybrid_learns_and_the_padding_does_not(name: str) -> None:
    pattern, options = MODELS[name]
    wide = build_hybrid(pattern, 4, **options, wide_options={"streamwise_sigmoid_init_scale": 1.0})
    run(wide, token_batch(), token_batch(8)).mean().backward()
    for key, param in wide.named_parameters():
        assert param.grad is not None, f"{key} has no gradient"
    for key, param in controllers(wide).items():
        assert param.grad is not None
        assert not param.grad[4:].any(), f"the padding of {key} has a gradient"


def test_the_stream_of_a_mamba_layer_stays_fp32_and_its_branch_in_bf16() -> None:
    model = build_hybrid(
        "MM", 2, bf16=True, params_dtype=torch.bfloat16, fp32_residual_connection=True, use_cpu_initialization=False
    )
    widths: list[tuple[str, torch.dtype, int]] = []
    layer = model.decoder.layers[1]
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(("x", kwargs["hidden_states"].dtype, kwargs["hidden_states"].shape[-1])),
        with_kwargs=True,
    )
    layer.norm.register_forward_pre_hook(lambda _, args: widths.append(("z", args[0].dtype, args[0].shape[-1])))
    layer.register_forward_hook(lambda _, args, output: widths.append(("y", output.dtype, output.shape[-1])))
    run(model, token_batch())
    assert widths == [
        ("x", torch.float32, 2 * WIDTH),
        ("z", torch.bfloat16, WIDTH),
        ("y", torch.float32, 2 * WIDTH),
    ]


def outcome(model: HybridModel) -> dict[str, torch.Tensor]:
    """Losses and all gradients of one training step."""
    MTPLossLoggingHelper.tracker = {}  # sized by the first model of the process that predicts further tokens
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    torch.manual_seed(5)
    losses = run(model, token_batch(), token_batch(8))
    losses.float().mean().backward()
    return {"losses": losses.detach(), **{name: param.grad for name, param in model.named_parameters()}}


REPLAYED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("M*-EM", {}),
    "dropout": ("M*-E", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "bf16 with an fp32 stream": (
        "M*-",
        {"bf16": True, "params_dtype": torch.bfloat16, "fp32_residual_connection": True},
    ),
    "retention, multi-token prediction": ("M*-E/M*", {"wide_options": {"learned_retention": True}}),
}


@pytest.mark.parametrize("block_size", [1, 2, None])
@pytest.mark.parametrize("name", REPLAYED)
def test_replay_of_a_hybrid_is_bit_equal(name: str, block_size: int | None) -> None:
    pattern, options = REPLAYED[name]
    wanted = outcome(build_hybrid(pattern, 3, **options))
    found = outcome(build_hybrid(pattern, 3, replay=True, block_size=block_size, **options))
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        assert torch.equal(value, found[key]), f"{key} is not bit-equal with replay"


def test_replay_frees_the_reads_and_writes_of_a_hybrid() -> None:
    def kept(**options: Any) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                alive.append(tensor)
            return tensor

        alive: list[torch.Tensor] = []
        model = build_hybrid("M*-M", 8, **options)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            losses = run(model, token_batch(), token_batch(8))
        for tensor in alive:
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        del losses
        return sum(sizes.values())

    without, with_replay = kept(), kept(replay=True)
    stream = SEQUENCE * 2 * WIDTH * 8 * 4
    assert without - with_replay >= 3 * stream, f"{without - with_replay} bytes fewer, a stream has {stream}"


def test_multi_token_prediction_stays_at_the_branch_width() -> None:
    wide = build_hybrid("M*/M*", 4)
    assert not [name for name in controllers(wide) if name.startswith("mtp.")], "a prediction depth has read maps"
    seen: list[int] = []
    for layer in wide.mtp.layers[0].mtp_model_layer.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["hidden_states"].shape[-1]), with_kwargs=True
        )
    run(wide, token_batch(), token_batch(8)).mean().backward()
    assert seen == [WIDTH, WIDTH]


def build_predicting_gpt(num_streams: int | None = None) -> Any:
    config: dict[str, Any] = {"mtp_num_layers": 2, "hidden_dropout": 0.0}
    spec = get_gpt_mtp_block_spec(transformer_config(**config), get_gpt_layer_local_spec(), False)
    return build_gpt(num_streams, model_options={"mtp_block_spec": spec}, **config)


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_multi_token_prediction_takes_the_readout_and_so_equals_the_ordinary_model(kind: str) -> None:
    def build(num_streams: int | None) -> Any:
        return build_predicting_gpt(num_streams) if kind == "gpt" else build_hybrid("M*-/M*/M*", num_streams)

    wanted, found = outcome(build(None)), outcome(build(4))
    predicting = [name for name in wanted if name.startswith("mtp.")]
    assert predicting, "no prediction layer was built"
    for name in ["losses", *predicting]:
        error = (found[name] - wanted[name]).norm() / wanted[name].norm()
        assert error <= 1e-5, f"{name}: relative error {error:.2e}"


def test_local_and_transformer_engine_specs_agree_up_to_the_fused_norm_table() -> None:
    """Every norm that Transformer Engine fuses into a linear layer is in the table, and no other."""
    local, engine = local_hybrid_stack_spec.submodules, hybrid_stack_spec.submodules

    def fuses(spec: Any) -> bool:
        if spec is TELayerNormColumnParallelLinear:
            return True
        if isinstance(spec, partial):
            return any(map(fuses, spec.keywords.values()))
        if isinstance(spec, ModuleSpec):
            return fuses(spec.submodules)
        return is_dataclass(spec) and any(fuses(getattr(spec, field.name)) for field in fields(spec))

    kinds = ("mamba_layer", "attention_layer", "mlp_layer", "moe_layer")
    assert {kind for kind in kinds if fuses(getattr(engine, kind))} == set(FUSED_NORM_KEYS)
    for kind, (ours, theirs) in FUSED_NORM_KEYS.items():
        assert getattr(local, kind).submodules.sharded_state_dict_keys_map == {ours: theirs}


def test_sharded_checkpoints_of_the_local_hybrid_have_transformer_engines_names() -> None:
    metadata = {"dp_cp_group": ProcessGroupCollection.use_mpu_process_groups().dp_cp}
    entries = build_hybrid("M*-E", 2).sharded_state_dict(metadata=metadata).values()
    keys = {entry.key for entry in entries if hasattr(entry, "key")}
    for wanted in (
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.final_norm.weight",
        "decoder.residual_stream_readout.exit_map.logit",
        "decoder.layers.0.residual_read.read_map.logit",
    ):
        assert wanted in keys, f"no {wanted} in {sorted(keys)}"


def test_evaluation_keeps_nothing_for_a_backward() -> None:
    model = build_hybrid("M*-E", 2, replay=True).eval()
    with torch.no_grad():
        assert not run(model, token_batch()).requires_grad


def test_an_ordinary_config_is_refused() -> None:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with pytest.raises(ValueError, match="WideResidualHybridModel needs a config that carries"):
        WideResidualHybridModel(hybrid_config("M"), local_hybrid_stack_spec, 256, 32, "M", pg_collection=groups)
    with pytest.raises(ValueError, match="WideResidualMambaLayer needs a config that carries"):
        WideResidualMambaLayer(hybrid_config("M"), local_hybrid_stack_spec.submodules.mamba_layer.submodules)


class ForeignLayer(torch.nn.Module):
    """A layer class that has no wide twin."""


def test_a_layer_or_a_stack_without_a_wide_twin_is_refused_by_name() -> None:
    foreign = replace(local_hybrid_stack_spec.submodules, mlp_layer=ModuleSpec(module=ForeignLayer))
    with pytest.raises(TypeError, match="mlp_layer: the layer class ForeignLayer has no twin"):
        widen_hybrid_submodules(foreign)
    with pytest.raises(TypeError, match="the stack class ForeignLayer has no twin"):
        widen_hybrid_stack_spec(ModuleSpec(module=ForeignLayer))


def test_both_specs_are_wide_and_build_in_upstreams_own_model() -> None:
    assert widen_hybrid_stack_spec(wide_residual_hybrid_stack_spec) is wide_residual_hybrid_stack_spec
    config = widen_transformer_config(hybrid_config("M*"), WideResidualConfig(2))
    model = HybridModel(
        config,
        wide_residual_local_hybrid_stack_spec,
        256,
        SEQUENCE,
        hybrid_layer_pattern="M*",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    assert run(model, token_batch()).shape == (2, SEQUENCE, 256)
