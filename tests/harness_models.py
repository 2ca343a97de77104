"""Small GPT and hybrid models on one process: the same architecture ordinary and wide, from one seed.

    with single_process_megatron():
        ordinary, wide = build_gpt(), build_gpt(num_streams=4)
        hybrid = build_hybrid("M*-E", num_streams=4)
        logits_bsv = run(wide, token_batch())

What always holds: gloo with one process, real megatron-core models, on the host that `training_host` chooses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_total_layer_count, parse_hybrid_pattern
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.core import parallel_state
from megatron.core.models.gpt.wide_residual_gpt_model import WideResidualGPTModel
from megatron.core.models.gpt.wide_residual_layer_specs import widen_layer_spec
from megatron.core.models.hybrid.local_hybrid_specs import local_hybrid_stack_spec
from megatron.core.models.hybrid.wide_residual_hybrid_model import WideResidualHybridModel
from megatron.core.ssm.torch_mamba_operators import use_torch_mamba_operators
from megatron.core.transformer.wide_residual_config import WideResidualConfig, widen_transformer_config
from megatron.cpu.host import training_host
from megatron.cpu.replacements import Replacements
from megatron.training.earlier_experts import set_aside_earlier_experts

VOCABULARY, SEQUENCE, BATCH, WIDTH, HEADS, LAYERS = 256, 32, 2, 64, 4, 3


@contextmanager
def single_process_megatron() -> Iterator[None]:
    """Initialise torch.distributed and Megatron's groups for this process alone, and end them afterwards."""
    with training_host() as host, Replacements() as replaced:
        use_torch_mamba_operators(replaced, host)
        set_aside_earlier_experts(replaced)
        backend = "nccl" if host == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def transformer_config(**options: Any) -> TransformerConfig:
    """A small ordinary config without dropout; options override. `multi_latent_attention=True` makes it an MLA one."""
    config_class = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    chosen: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        **options,
    }
    return config_class(**chosen)


def build_gpt(
    num_streams: int | None = None,
    *,
    seed: int = 1234,
    model_options: dict[str, Any] | None = None,
    wide_options: dict[str, Any] | None = None,
    replay: bool = False,
    block_size: int | None = None,
    **config_options: Any,
) -> GPTModel:
    """Build an ordinary GPT, or with num_streams a wide one, drawing from the same seed; replay in blocks on demand."""
    if replay:
        config_options = {"recompute_granularity": "selective", "recompute_modules": [], **config_options}
    config = transformer_config(**config_options)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    model_class: type[GPTModel] = GPTModel
    if num_streams is not None:
        config = widen_transformer_config(
            config,
            WideResidualConfig(num_streams, **(wide_options or {})),
            recompute_residual_stream=replay,
            residual_stream_recompute_num_layers=block_size,
        )
        spec, model_class = widen_layer_spec(spec), WideResidualGPTModel
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return model_class(config, spec, VOCABULARY, SEQUENCE, **(model_options or {}))


def hybrid_config(pattern: str, **options: Any) -> TransformerConfig:
    """A small ordinary config for layers of that pattern; options override."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
    depths = parse_hybrid_pattern(pattern).mtp_num_depths
    return transformer_config(
        **{
            "num_layers": get_hybrid_total_layer_count(pattern),
            "is_hybrid_model": True,
            "add_bias_linear": False,
            "mamba_head_dim": 16,
            "mamba_state_dim": 16,
            "mamba_num_groups": 2,
            **(experts if "E" in pattern else {}),
            **({"mtp_num_layers": depths} if depths else {}),
            **options,
        }
    )


def build_hybrid(
    pattern: str,
    num_streams: int | None = None,
    *,
    seed: int = 1234,
    model_options: dict[str, Any] | None = None,
    wide_options: dict[str, Any] | None = None,
    replay: bool = False,
    block_size: int | None = None,
    stack_spec: ModuleSpec = local_hybrid_stack_spec,
    **config_options: Any,
) -> HybridModel:
    """Build an ordinary hybrid, or with num_streams a wide one, drawing from the same seed. Arguments as build_gpt."""
    if replay:
        config_options = {"recompute_granularity": "selective", "recompute_modules": [], **config_options}
    config = hybrid_config(pattern, **config_options)
    model_class: type[HybridModel] = HybridModel
    if num_streams is not None:
        config = widen_transformer_config(
            config,
            WideResidualConfig(num_streams, **(wide_options or {})),
            recompute_residual_stream=replay,
            residual_stream_recompute_num_layers=block_size,
        )
        model_class = WideResidualHybridModel
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return model_class(
        config,
        stack_spec,
        VOCABULARY,
        SEQUENCE,
        hybrid_layer_pattern=pattern,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **(model_options or {}),
    )


def token_batch(seed: int = 7) -> torch.Tensor:
    """Random tokens [b, s]."""
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def run(model: GPTModel | HybridModel, tokens_bs: torch.Tensor, labels_bs: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits [b, s, v], or per-token losses [b, s] with labels."""
    positions_bs = torch.arange(SEQUENCE).expand_as(tokens_bs)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return model(tokens_bs, positions_bs, mask, labels=labels_bs)


def controllers(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The padded controller vectors of a wide model, by name."""
    return {name: param for name, param in model.named_parameters() if hasattr(param, "residual_controller")}


def graph_nodes(output: torch.Tensor) -> list[str]:
    """Names of the operations that `output` was computed by."""
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return [node.name() for node in seen]


def stream_operations(output: torch.Tensor) -> Counter[str]:
    """How often `output` was computed by which streamwise operator: StreamwiseRead, StreamwiseWriteRead, ..."""
    pattern = re.compile(r"Streamwise[A-Za-z]*?(?=Backward|>|$)")
    return Counter(found[0] for name in graph_nodes(output) if (found := pattern.search(name)))
