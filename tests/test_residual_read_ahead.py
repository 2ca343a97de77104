"""The last write of a layer reads for the next layer: fewer operations, the same model bit for bit.

pytest tests/test_residual_read_ahead.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness_models import build_gpt, build_hybrid, run, single_process_megatron, stream_operations, token_batch

from megatron.core.transformer import residual_read_ahead
from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE

LAYERS = 3
BUILDERS: dict[str, Callable[..., Any]] = {
    "gpt": lambda **options: build_gpt(4, num_layers=LAYERS, **options),
    "hybrid": lambda **options: build_hybrid("M*-E", 4, **options),
}
Outcome = tuple[torch.Tensor, dict[str, torch.Tensor | None]]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def outcome(model: Any) -> Outcome:
    """The losses of a model and all its gradients, from a fixed state of the generator."""
    torch.manual_seed(5)
    loss_bs = run(model, token_batch(), token_batch(8))
    loss_bs.mean().backward()
    return loss_bs.detach(), {name: param.grad for name, param in model.named_parameters()}


def assert_same(one: Outcome, other: Outcome) -> None:
    assert torch.equal(one[0], other[0]), "the losses differ"
    for name, gradient in one[1].items():
        assert gradient is not None, f"{name} has no gradient"
        assert torch.equal(gradient, other[1][name]), f"the gradient of {name} differs"  # type: ignore[arg-type]


def held(model: Any) -> list[Any]:
    return [layer._held for layer in model.decoder.layers]


@pytest.mark.parametrize("backend", ["compiled", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_model_that_reads_ahead_has_the_bits_of_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, kind: str, normalization: str, dtype: torch.dtype, backend: str
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    options: dict[str, Any] = {"normalization": normalization, "hidden_dropout": 0.1}
    if dtype is torch.bfloat16:
        options |= {"bf16": True, "params_dtype": dtype}
    ahead = outcome(BUILDERS[kind](**options).to(dtype))
    monkeypatch.setattr(residual_read_ahead, "reads_ahead_across_layers", lambda *_: False)
    assert_same(ahead, outcome(BUILDERS[kind](**options).to(dtype)))


def test_each_layer_but_the_first_is_read_for_by_the_one_before() -> None:
    gpt, hybrid = BUILDERS["gpt"](), BUILDERS["hybrid"]()
    loss = run(gpt, token_batch(), token_batch(8))
    wanted = {"StreamwiseRead": 2, "StreamwiseWriteRead": 2 * LAYERS - 1, "StreamwiseWrite": 1}  # with the readout
    assert stream_operations(loss) == wanted
    loss = run(hybrid, token_batch(), token_batch(8))
    assert stream_operations(loss) == {"StreamwiseRead": 2, "StreamwiseWriteRead": 3, "StreamwiseWrite": 1}


def test_what_is_kept_for_the_backward_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the different storages that the graph holds."""

    def kept(model: Any) -> int:
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = run(model, token_batch(), token_batch(8))
        loss.mean().backward()
        return sum(storages.values())

    ahead = kept(BUILDERS["gpt"]())
    monkeypatch.setattr(residual_read_ahead, "reads_ahead_across_layers", lambda *_: False)
    assert ahead == kept(BUILDERS["gpt"]())


@pytest.mark.parametrize(
    "options", [{"wide_options": {"learned_retention": True}}, {"recompute": True}], ids=["retention", "full"]
)
def test_where_it_would_cost_memory_or_be_wrong_layers_read_for_themselves(options: dict[str, Any]) -> None:
    if options.pop("recompute", False):
        options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        model, plain = BUILDERS["gpt"](**options), BUILDERS["gpt"]()
        assert_same(outcome(model), outcome(plain))
        return
    loss = run(BUILDERS["gpt"](**options), token_batch(), token_batch(8))
    assert stream_operations(loss) == {
        "StreamwiseRead": LAYERS + 1,
        "StreamwiseWriteRead": LAYERS,
        "StreamwiseWrite": LAYERS,
    }


def test_a_hook_on_a_layer_or_its_read_sees_and_changes_what_it_would_without() -> None:
    """A layer that is given another tensor reads that; a hook on the read is called."""
    model, seen = BUILDERS["gpt"](), []
    changed = model.decoder.layers[1].register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}), with_kwargs=True
    )
    model.decoder.layers[2].residual_read_self_attn.register_forward_hook(lambda *_: seen.append(1))
    found = outcome(model)
    assert seen == [1]
    changed.remove()
    other = BUILDERS["gpt"]()
    other.decoder.layers[0].register_forward_hook(lambda _, __, output: (output[0] * 2, *output[1:]))
    other.decoder.layers[2].residual_read_self_attn.register_forward_hook(lambda *_: None)
    assert_same(found, outcome(other))


def test_a_layer_whose_parameters_a_hook_gathers_is_not_read_for() -> None:
    """As FSDP does, with hooks before and behind each layer: outside its forward a layer's parameters are not there."""
    model, plain = BUILDERS["gpt"](), BUILDERS["gpt"]()
    layer = model.decoder.layers[1]
    gathered = {param: param.data for param in layer.parameters()}

    def gather(*_: Any) -> None:
        for param, data in gathered.items():
            param.data = data

    def release(*_: Any) -> None:
        for param in gathered:
            param.data = torch.full_like(param, torch.nan)

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(release)
    release()
    with torch.no_grad():
        assert torch.equal(run(model, token_batch()), run(plain, token_batch()))


def test_nothing_is_left_behind_also_where_a_layer_fails() -> None:
    model = BUILDERS["gpt"]()
    outcome(model)
    assert not any(layer.following or layer.read_ahead or layer.carried or layer.normed for layer in held(model))

    def fail(*_: Any) -> None:
        raise RuntimeError("a layer failed")

    hook = model.decoder.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a layer failed"):
        run(model, token_batch())
    hook.remove()
    assert not any(layer.following or layer.read_ahead or layer.carried or layer.normed for layer in held(model))
