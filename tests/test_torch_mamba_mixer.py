"""megatron-core's own MambaMixer runs on the PyTorch operators, and gets its own names back.

pytest tests/test_torch_mamba_mixer.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_mamba import relative_error
from harness_models import WIDTH, single_process_megatron, transformer_config
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron.core.ssm import torch_mamba_operators
from megatron.core.ssm.torch_mamba_operators import use_torch_mamba_operators
from megatron.cpu.replacements import Replacements

mamba_mixer: Any = importlib.import_module("megatron.core.ssm.mamba_mixer")

LENGTH = 37
WITHOUT_MAMBA_SSM = pytest.mark.skipif(mamba_mixer.HAVE_MAMBA_SSM, reason="mamba-ssm is installed here")


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """One process of Megatron whose mixer uses the PyTorch operators."""
    with single_process_megatron(), Replacements() as replaced:
        assert use_torch_mamba_operators(replaced, "cpu")
        yield


def build_mixer(**options: Any) -> Any:
    """A MambaMixer with local linear layers; options override the configuration."""
    chosen = {"mamba_state_dim": 16, "mamba_head_dim": 8, "mamba_num_groups": 2, **options}
    config = transformer_config(**chosen)
    submodules = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    torch.manual_seed(5)
    return mamba_mixer.MambaMixer(config, submodules, config.hidden_size, layer_number=1, pg_collection=groups)


def hidden_states(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Input [s, b, d]."""
    values = torch.randn(LENGTH, batch, WIDTH, generator=torch.Generator().manual_seed(6))
    return values.to(dtype).requires_grad_()


def output_and_gradients(mixer: Any, hidden: Tensor) -> list[Tensor]:
    """The mixer's output, and the gradients of its input and of every parameter."""
    y, _ = mixer(hidden)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype)
    return [y, *torch.autograd.grad((y * weights).sum(), [hidden, *mixer.parameters()])]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_paths_of_the_mixer_give_the_same(groups: int, params_dtype: torch.dtype) -> None:
    """The memory-efficient path is one operator, the other is convolution, scan and gated norm apart."""
    bf16 = params_dtype == torch.bfloat16
    options = {"mamba_num_groups": groups, "params_dtype": params_dtype, "bf16": bf16}
    one, other = (build_mixer(use_mamba_mem_eff_path=path, **options) for path in (True, False))
    other.load_state_dict(one.state_dict())
    hidden = hidden_states(dtype=params_dtype)
    results = [output_and_gradients(mixer, hidden) for mixer in (one, other)]
    names = ["output", "hidden", *(name for name, _ in one.named_parameters())]
    for name, found, wanted in zip(names, *results, strict=True):
        assert found.isfinite().all()
        assert found.abs().max() > 0, f"{name} is all zero"
        error = relative_error(found, wanted)
        assert error < (5e-2 if bf16 else 1e-5), f"{name} differs by {error:.1e}"


def test_decoding_with_the_state_cache_equals_the_whole_sequence() -> None:
    mixer = build_mixer().eval()
    hidden = hidden_states(batch=1)
    with torch.no_grad():
        wanted, _ = mixer(hidden)
        context = static_context(1)
        with InferenceMode.active():
            found = [mixer(hidden[:20], context)[0]]
            for position in range(20, LENGTH):
                context.sequence_len_offset = context.seqlen_offset = position
                found.append(mixer(hidden[position : position + 1], context)[0])
    assert relative_error(torch.cat(found), wanted) < 1e-5


def static_context(batch: int) -> Any:
    """An empty cache; HybridStack sets `seqlen_offset` for its layers, which here it is not there to do."""
    context: Any = StaticInferenceContext(batch, 64)
    context.seqlen_offset = 0
    return context


def test_decoding_a_batch_is_refused_because_upstream_mixes_its_sequences() -> None:
    mixer = build_mixer().eval()
    hidden, context = hidden_states(batch=2), static_context(2)
    with torch.no_grad(), InferenceMode.active():
        mixer(hidden[:20], context)
        context.sequence_len_offset = context.seqlen_offset = 20
        with pytest.raises(ValueError, match="decode one at a time"):
            mixer(hidden[20:21], context)


def test_packed_sequences_train_as_if_alone() -> None:
    mixer = build_mixer()
    hidden = hidden_states(batch=1)
    lengths = (5, 20, 12)
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int()[None]
    together, _ = mixer(hidden, packed_seq_params=PackedSeqParams(qkv_format="thd", seq_idx=seq_idx))
    alone = torch.cat([mixer(part)[0] for part in hidden.split(lengths)])
    assert relative_error(together, alone) < 1e-5


def test_norm_weight_is_sharded_in_checkpoints() -> None:
    mixer = build_mixer()
    sharded = mixer.sharded_state_dict("m.", metadata={"dp_cp_group": torch.distributed.group.WORLD})
    weight = sharded["m.norm.weight"]
    assert weight.key == "m.norm.weight"
    assert weight.data is not None
    assert weight.data.data_ptr() == mixer.norm.weight.data_ptr()
    assert weight.global_shape == (mixer.d_inner,)


def test_dynamic_batching_is_refused_with_the_reason() -> None:
    available, reason = mamba_mixer._check_mamba_sequence_packing_support(for_inference_not_training=True)
    assert not available
    assert "use static batching" in str(reason)


# ---- Signatures


def _calls() -> list[ast.Call]:
    """Every call that megatron-core's mixer makes to a name that is replaced."""
    tree = ast.parse(inspect.getsource(mamba_mixer))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    replaced = torch_mamba_operators._SCAN_OPERATORS | torch_mamba_operators._DECODING_OPERATORS
    return [node for node in nodes if isinstance(node.func, ast.Name) and callable(replaced.get(node.func.id))]


@pytest.mark.parametrize("call", _calls(), ids=lambda call: f"{call.func.id}, line {call.lineno}")
def test_every_argument_that_upstream_passes_is_accepted(call: ast.Call) -> None:
    assert isinstance(call.func, ast.Name)
    operator: Any = getattr(mamba_mixer, call.func.id)
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    if any(keyword.arg is None for keyword in call.keywords):
        keywords["state_dtype"] = None  # the only argument that upstream passes as a dictionary
    inspect.signature(operator).bind(*call.args, **keywords)


def test_every_operator_is_called_by_upstream() -> None:
    called = {call.func.id for call in _calls() if isinstance(call.func, ast.Name)}
    assert called == {
        "ExtendedRMSNorm",
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "mamba_chunk_scan_combined",
        "mamba_split_conv1d_scan_combined",
        "selective_state_update",
        "_check_mamba_sequence_packing_support",
    }


# ---- Replacing and restoring


@WITHOUT_MAMBA_SSM
def test_nothing_is_pretended_to_be_installed() -> None:
    from transformers.utils import is_causal_conv1d_available, is_mamba_2_ssm_available

    assert importlib.util.find_spec("mamba_ssm") is None
    assert importlib.util.find_spec("causal_conv1d") is None
    assert not is_mamba_2_ssm_available()
    assert not is_causal_conv1d_available()


@pytest.fixture
def untouched() -> Iterator[dict[str, Any]]:
    """megatron-core's own names for the length of one test, as a copy of the module's dictionary."""
    names = torch_mamba_operators._SCAN_OPERATORS | torch_mamba_operators._DECODING_OPERATORS
    own = {name: _OWN[name] for name in names}
    with Replacements() as replaced:
        for name, value in own.items():
            replaced.set(mamba_mixer, name, value)
        yield dict(vars(mamba_mixer))


_OWN = dict(vars(mamba_mixer))  # collected before any test: the fixture above has not run


def test_cpu_host_replaces_everything_and_restores_it(
    untouched: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with Replacements() as replaced:
        assert use_torch_mamba_operators(replaced, "cpu")
        assert use_torch_mamba_operators(replaced, "cpu"), "a second call must change nothing"
        assert {name for _, name in replaced.names} == {
            *torch_mamba_operators._SCAN_OPERATORS,
            *torch_mamba_operators._DECODING_OPERATORS,
        }
        assert capsys.readouterr().out.count("> Mamba operators: PyTorch (") == 1
    changed = [name for name, value in vars(mamba_mixer).items() if value is not untouched.get(name)]
    assert not changed, f"not restored: {changed}"


def test_other_ranks_say_nothing(
    untouched: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with Replacements() as replaced:
        assert use_torch_mamba_operators(replaced, "cpu")
    assert capsys.readouterr().out == ""


def test_cuda_with_mamba_ssm_is_left_alone(untouched: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with Replacements() as installed, Replacements() as replaced:
        installed.set(mamba_mixer, "HAVE_MAMBA_SSM", True)
        assert not use_torch_mamba_operators(replaced, "cuda")
        assert replaced.names == []
    assert capsys.readouterr().out == ""


@WITHOUT_MAMBA_SSM
def test_cuda_without_mamba_ssm_keeps_upstreams_decoding_step(untouched: dict[str, Any]) -> None:
    with Replacements() as replaced:
        assert use_torch_mamba_operators(replaced, "cuda")
        for name in torch_mamba_operators._DECODING_OPERATORS:
            assert getattr(mamba_mixer, name) is untouched[name]
        assert mamba_mixer.HAVE_MAMBA_SSM


def test_cpu_host_of_a_machine_with_mamba_ssm_uses_pytorch(
    untouched: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with Replacements() as installed, Replacements() as replaced:
        installed.set(mamba_mixer, "HAVE_MAMBA_SSM", True)
        assert use_torch_mamba_operators(replaced, "cpu")
    assert "the kernels of mamba-ssm need CUDA" in capsys.readouterr().out


def test_an_upstream_without_one_of_the_names_is_an_error(
    untouched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mamba_mixer, "selective_state_update")
    with Replacements() as replaced, pytest.raises(RuntimeError, match="has no selective_state_update"):
        use_torch_mamba_operators(replaced, "cpu")
