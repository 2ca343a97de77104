"""What shortcut MoE needs and what it refuses, for a transformer config and for parsed arguments alike.

    check_shortcut_options(config)      # or the namespace of the arguments: they have the same names

What always holds: an option is refused where upstream's code for it would compute something else, or reads parameters
or activations that are not there when the routed experts run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHORTCUT_FLAG = "--moe-shortcut-connection"
PARALLEL_FLAG = "--moe-shortcut-parallel"

_GRAPHS = "a captured layer cannot take the routed experts' output, which is computed before the layer ahead of it"
_SHARDED_UNITS = "it gathers the parameters of a layer when that layer runs; the routed experts run before theirs"
_ORDER = "it stores and fetches activations in the order of layers; the routed experts run before their layer"

# (attribute, the option as a user writes it, predicate on the value, why).
_REFUSED: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    (
        "moe_shared_expert_overlap",
        "--moe-shared-expert-overlap",
        bool,
        "the token dispatcher would feed the shared expert with the input of the routed experts",
    ),
    (
        "recompute_granularity",
        "--recompute-granularity full",
        lambda value: value == "full",
        "it recomputes single layers, and the routed experts of a pair run in one layer and end in the next (selective "
        "recomputation works)",
    ),
    ("cuda_graph_impl", "--cuda-graph-impl", lambda value: value not in (None, "none"), _GRAPHS),
    ("enable_cuda_graph", "--enable-cuda-graph", bool, _GRAPHS),
    ("external_cuda_graph", "--external-cuda-graph", bool, _GRAPHS),
    (
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm",
        bool,
        "its schedule runs pieces of one layer, and the routed experts of a pair run in the layer before",
    ),
    (
        "fused_residual_rmsnorm",
        "--fused-residual-rmsnorm",
        bool,
        "such a norm returns a residual of its own, and those of the shortcut have none",
    ),
    (
        "transformer_impl",
        "--transformer-impl inference_optimized",
        lambda value: value == "inference_optimized",
        "its token dispatcher runs the shared expert itself",
    ),
    ("fine_grained_activation_offloading", "--fine-grained-activation-offloading", bool, _ORDER),
    ("moe_paged_stash", "--moe-paged-stash", bool, _ORDER),
    ("use_megatron_fsdp", "--use-megatron-fsdp", bool, _SHARDED_UNITS),
    ("use_torch_fsdp2", "--use-torch-fsdp2", bool, _SHARDED_UNITS),
)


# The same for the routed experts on a CUDA stream of their own. Transformer Engine's dense matrix products share one
# workspace per device, which two streams must not use at once; its grouped ones, the experts', have others.
_REFUSED_IN_PARALLEL: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    (
        "overlap_param_gather",
        "--overlap-param-gather",
        bool,
        "the gathered parameters are awaited on the stream that needs them first, and both streams need them",
    ),
    (
        "moe_latent_size",
        "--moe-latent-size",
        bool,
        "its projections share the workspace of Transformer Engine's matrix products with the layer ahead",
    ),
)


def _refuse(options: Any, table: tuple[tuple[str, str, Callable[[Any], bool], str], ...], flag: str) -> None:
    for attribute, option, refused, reason in table:
        if refused(getattr(options, attribute, None)):
            raise ValueError(f"{option} cannot be used with {flag}: {reason}. Leave {option} out, or {flag}.")


def check_shortcut_options(options: Any, *, parallel: bool = False) -> None:
    """Raise ValueError unless shortcut MoE can run under these options; the message names the option and the reason.

    Args:
        options: a TransformerConfig, or the namespace of Megatron's arguments.
        parallel: whether the routed experts are to run on a CUDA stream of their own.
    """
    if getattr(options, "moe_shared_expert_intermediate_size", None) is None:
        raise ValueError(
            f"{SHORTCUT_FLAG} needs a shared expert, which reads the stream after the layer ahead: give "
            "--moe-shared-expert-intermediate-size"
        )
    _refuse(options, _REFUSED, SHORTCUT_FLAG)
    if not parallel:
        return
    _refuse(options, _REFUSED_IN_PARALLEL, PARALLEL_FLAG)
    if options.transformer_impl == "transformer_engine" and options.moe_router_dtype != "fp64":
        raise ValueError(
            f"{PARALLEL_FLAG} with Transformer Engine needs --moe-router-dtype fp64: the router's other matrix "
            "products share Transformer Engine's workspace with the layer ahead, which runs beside it"
        )
