"""Layers hand the norm of a branch to its read: same model, fewer operations; a norm that must be called is called.

pytest tests/test_wide_residual_norm.py
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness_models import WIDTH, build_gpt, build_hybrid, graph_nodes, run, single_process_megatron, token_batch
from megatron.core.distributed import DistributedDataParallel
from torch.distributed import ProcessGroup

from megatron.core.transformer.residual_connection import ResidualConnectionState
from megatron.core.transformer.streamwise_residual_norm import StreamNorm, stream_norm_of
from megatron.core.transformer.wide_residual_branches import WideResidualBranches

BUILDERS: dict[str, Callable[..., Any]] = {
    "gpt": lambda **options: build_gpt(4, num_layers=2, **options),
    "hybrid": lambda **options: build_hybrid("M*-E", 4, **options),
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def norms_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The norms that reads of the model's layers take."""
    layers = [layer for layer in model.modules() if isinstance(layer, WideResidualBranches)]
    return [norm for layer in layers for norm, _ in layer._norms.values()]


def norm_nodes(loss: torch.Tensor) -> int:
    """How many norms of a model's graph are operations of their own."""
    names = Counter(graph_nodes(loss))
    return names["NativeLayerNormBackward0"] + names["PowBackward0"]


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("model_kind", BUILDERS)
def test_a_model_with_fused_norms_is_the_model_with_hooked_ones(model_kind: str, kind: str) -> None:
    """A hook on a norm sees what was read, so the norm is then called; all but the final norm are fused otherwise."""
    losses, gradients, own, seen = [], [], [], []
    for hooked in (False, True):
        model = BUILDERS[model_kind](normalization=kind)
        norms = norms_of(model)
        assert len(norms) == 4
        for norm in norms if hooked else ():
            norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-1]))
        loss_bs = run(model, token_batch(), token_batch(8))
        own.append(norm_nodes(loss_bs))
        loss_bs.mean().backward()
        losses.append(loss_bs.detach())
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    assert own == [1, 5]
    assert seen == [WIDTH] * 4
    assert (losses[0] - losses[1]).abs().max() < 1e-6 * losses[1].abs().max()
    scale = max(float(gradient.abs().max()) for gradient in gradients[1].values())
    for name, gradient in gradients[1].items():
        assert (gradients[0][name] - gradient).abs().max() < 1e-6 * scale, name


def test_a_norm_that_is_called_by_itself_norms_and_a_copy_of_a_layer_has_its_own() -> None:
    layer = build_gpt(4, num_layers=1).decoder.layers[0]
    mask = torch.ones(1, 1, 8, 8).triu(1).bool()
    x_sbw = torch.randn(8, 2, 4 * WIDTH)
    wanted, _ = layer(x_sbw, attention_mask=mask)
    z_sbd = torch.randn(8, 2, WIDTH)
    assert torch.equal(layer.input_layernorm(z_sbd), torch.nn.functional.layer_norm(z_sbd, (WIDTH,), eps=1e-5))
    shared = [held for module in layer.modules() for held in vars(module).values() if isinstance(held, ProcessGroup)]
    shared += [layer.pg_collection]
    copied = copy.deepcopy(layer, {id(held): held for held in [*shared, *vars(layer.pg_collection).values()]})
    with torch.no_grad():
        copied.input_layernorm.weight.mul_(2)
    changed, _ = copied(x_sbw, attention_mask=mask)
    again, _ = layer(x_sbw, attention_mask=mask)
    assert torch.equal(again, wanted)
    assert not torch.equal(changed, wanted)
    layer.input_layernorm.forward = lambda z: 2 * z
    replaced, _ = layer(x_sbw, attention_mask=mask)
    assert not torch.equal(replaced, wanted), "a forward that someone replaced was not called"


def test_the_hook_that_waits_for_gathered_parameters_runs_before_the_fused_norm() -> None:
    """Upstream's own hook, of --overlap-param-gather: the path is the same with and without it."""
    waited: list[Any] = []
    parallel = SimpleNamespace(
        use_forward_hook=True,
        ddp_config=SimpleNamespace(align_param_gather=False),
        overlap_param_gather_with_optimizer_step=False,
    )
    norm = torch.nn.RMSNorm(4, eps=1e-5)
    group = SimpleNamespace(finish_param_sync=lambda **_: waited.append(norm))
    parallel.param_to_bucket_group = {norm.weight: group}
    norm.register_forward_pre_hook(DistributedDataParallel._make_forward_pre_hook(parallel))
    assert stream_norm_of(norm) == StreamNorm("RMSNorm", 4, 1e-5, norm.weight)
    assert waited == [norm]


def test_a_write_alone_takes_no_norm() -> None:
    layer = build_gpt(2, num_layers=1).decoder.layers[0]
    update, state = (torch.ones(1, 1, WIDTH), None), ResidualConnectionState(torch.ones(1, 1, 2 * WIDTH))
    with pytest.raises(TypeError, match="norm was given without next_read"):
        layer.residual_write_mlp(
            branch_output=update,
            state=state,
            dropout_probability=0.0,
            training=False,
            norm=StreamNorm("RMSNorm", WIDTH, 1e-5),
        )
