"""Configuration of wide residual streams, and the TransformerConfig classes that carry it.

    wide = WideResidualConfig(num_streams=4)
    config = WideResidualTransformerConfig(num_layers=12, hidden_size=512, ..., wide_residual=wide)
    config = widen_transformer_config(ordinary_config, wide)      # the same from a finished ordinary config

What always holds: `config.hidden_size` is the branch width D in every module; the carried stream has K*D features.
A config that carries a `WideResidualConfig` has been checked against every option that wide streams refuse.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

RESIDUAL_STREAM_MODULE = "residual_stream"
"""The name in recompute_modules (--recompute-modules) that turns the replay of residual-stream operations on."""


def _require_real(name: str, value: Any) -> float:
    """Return value as float; TypeError for bools and everything that is not a real number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); a real number is wanted")
    return float(value)


@dataclass(frozen=True)
class WideResidualConfig:
    """What a stack of wide residual streams looks like (equations: wide_residual.py).

    Args:
        num_streams: K, the number of residual streams of width D. At least 2.
        streamwise_sigmoid_init_scale: the write logits start as linspace(-scale, +scale, K). Not negative; 0 leaves
            the streams identical for ever and warns.
        learned_retention: let each write keep g_k = 1 - F*sigmoid(-q_k) of stream k instead of all of it.
        retention_init: g_k at the start; 1 - retention_max_forget < retention_init < 1.
        retention_max_forget: F, the largest share of a stream that one write can forget; 0 < F < 1.

    Raises:
        TypeError: a bool or non-int stream count, a non-bool learned_retention, a value that is no real number.
        ValueError: a value outside its range. The retention bounds are checked only with learned_retention.
    """

    num_streams: int
    streamwise_sigmoid_init_scale: float = 0.01
    learned_retention: bool = False
    retention_init: float = 0.999
    retention_max_forget: float = 0.10

    def __post_init__(self) -> None:
        if isinstance(self.num_streams, bool) or not isinstance(self.num_streams, int):
            raise TypeError(
                f"num_streams is {self.num_streams!r} ({type(self.num_streams).__name__}); an int >= 2 is wanted"
            )
        if self.num_streams <= 1:
            raise ValueError(
                f"num_streams is {self.num_streams}; 2 or more is wanted (leave wide residuals off for one stream)"
            )
        scale = _require_real("streamwise_sigmoid_init_scale", self.streamwise_sigmoid_init_scale)
        if not 0 <= scale < float("inf"):
            raise ValueError(f"streamwise_sigmoid_init_scale is {scale}; a finite number of 0 or more is wanted")
        if scale == 0:
            warnings.warn(
                "streamwise_sigmoid_init_scale is 0: every stream receives the same updates and the streams stay "
                "identical for ever; a positive scale (0.01) breaks the symmetry",
                stacklevel=3,
            )
        if not isinstance(self.learned_retention, bool):
            raise TypeError(f"learned_retention is {self.learned_retention!r}; True or False is wanted")
        if self.learned_retention:
            self._check_retention()

    def _check_retention(self) -> None:
        forget = _require_real("retention_max_forget", self.retention_max_forget)
        start = _require_real("retention_init", self.retention_init)
        if not 0 < forget < 1:
            raise ValueError(f"retention_max_forget is {forget}; 0 < retention_max_forget < 1 is wanted")
        if not 1 - forget < start < 1:
            raise ValueError(
                f"retention_init is {start}; 1 - retention_max_forget < retention_init < 1 is wanted, "
                f"that is {1 - forget} < retention_init < 1"
            )


@contextmanager
def _residual_stream_module_hidden(config: TransformerConfig) -> Iterator[None]:
    """Keep "residual_stream" out of recompute_modules while Megatron checks them: it refuses modules not its own."""
    modules = config.recompute_modules
    if modules is None or RESIDUAL_STREAM_MODULE not in modules:
        yield
        return
    config.recompute_modules = [module for module in modules if module != RESIDUAL_STREAM_MODULE]
    yield
    config.recompute_modules = [*config.recompute_modules, RESIDUAL_STREAM_MODULE]


@dataclass
class WideResidualTransformerConfig(TransformerConfig):
    """A TransformerConfig whose layers carry wide residual streams (ordinary ones while wide_residual is None)."""

    wide_residual: WideResidualConfig | None = None
    residual_stream_recompute_num_layers: int | None = None
    """Layers in a replay block with "residual_stream" in recompute_modules; None takes all local layers as one."""

    def __post_init__(self) -> None:
        with _residual_stream_module_hidden(self):
            super().__post_init__()
        check_wide_residual_options(self)


@dataclass
class WideResidualMLATransformerConfig(MLATransformerConfig):
    """The same for models with multi-latent attention."""

    wide_residual: WideResidualConfig | None = None
    residual_stream_recompute_num_layers: int | None = None
    """Layers in a replay block with "residual_stream" in recompute_modules; None takes all local layers as one."""

    def __post_init__(self) -> None:
        with _residual_stream_module_hidden(self):
            super().__post_init__()
        check_wide_residual_options(self)


_WIDE_CLASS: dict[type, type] = {
    TransformerConfig: WideResidualTransformerConfig,
    MLATransformerConfig: WideResidualMLATransformerConfig,
}


def widen_transformer_config(
    config: TransformerConfig,
    wide_residual: WideResidualConfig,
    *,
    recompute_residual_stream: bool = False,
    residual_stream_recompute_num_layers: int | None = None,
) -> Any:
    """Return a wide twin of a finished ordinary config, which is left as it was.

    recompute_residual_stream adds "residual_stream" to its recompute modules, which an ordinary config cannot hold.

    Every attribute is taken over as it stands, also those that Megatron sets after construction (YaRN's), because
    running `__post_init__` a second time would derive some of them again.

    Raises:
        TypeError: config is neither a TransformerConfig nor an MLATransformerConfig (a heterogeneous one, for example).
        ValueError: an option that wide residual streams refuse.
    """
    try:
        wide_class = _WIDE_CLASS[type(config)]
    except KeyError:
        names = " or ".join(cls.__name__ for cls in _WIDE_CLASS)
        raise TypeError(
            f"wide residual streams cannot extend a {type(config).__name__}; {names} is wanted "
            "(heterogeneous block specs, --heterogeneous-layers-config-path, are not supported)"
        ) from None
    wide: Any = object.__new__(wide_class)
    wide.__dict__.update(config.__dict__)
    wide.wide_residual = wide_residual
    wide.residual_stream_recompute_num_layers = residual_stream_recompute_num_layers
    if recompute_residual_stream:
        wide.recompute_modules = [*(wide.recompute_modules or ()), RESIDUAL_STREAM_MODULE]
    check_wide_residual_options(wide)
    return wide


def get_wide_residual_config(config: TransformerConfig) -> WideResidualConfig | None:
    """Return the stream layout that config carries, or None for an ordinary config."""
    return getattr(config, "wide_residual", None)


def require_wide_residual_config(config: TransformerConfig, owner: str) -> WideResidualConfig:
    """Return the stream layout that config carries; ValueError naming owner when it carries none."""
    wide_residual = get_wide_residual_config(config)
    if wide_residual is None:
        raise ValueError(
            f"{owner} needs a config that carries a WideResidualConfig; this {type(config).__name__} has none "
            "(use WideResidualTransformerConfig or widen_transformer_config)"
        )
    return wide_residual


# What wide streams refuse: (attribute, the option as a user writes it, predicate on the value, why).
_REFUSED_OPTIONS = (
    (
        "heterogeneous_block_specs",
        "--heterogeneous-layers-config-path",
        bool,
        "a layer without attention or MLP has no branch to read into",
    ),
    (
        "cuda_graph_impl",
        "--cuda-graph-impl",
        lambda value: value not in (None, "none"),
        "the captured layer boundary has the wrong width",
    ),
    ("enable_cuda_graph", "--enable-cuda-graph", bool, "the captured layer boundary has the wrong width"),
    ("external_cuda_graph", "--external-cuda-graph", bool, "the captured layer boundary has the wrong width"),
    (
        "inference_fuse_tp_communication",
        "--inference-fuse-tp-communication",
        bool,
        "the fused kernel adds the residual itself",
    ),
    (
        "init_model_with_meta_device",
        "--init-model-with-meta-device",
        bool,
        "controllers start at values that a model without memory cannot hold",
    ),
    ("fused_residual_rmsnorm", "--fused-residual-rmsnorm", bool, "such a norm returns its own residual"),
    (
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm",
        bool,
        "its schedule runs pieces of a layer that know one residual stream only",
    ),
)


def check_wide_residual_options(config: TransformerConfig) -> None:
    """Raise unless config's other options can run with its wide streams.

    Raises:
        TypeError: wide_residual is neither None nor a WideResidualConfig.
        ValueError: an option that wide residual streams refuse; the message names the option and the reason.
    """
    _check_residual_stream_recompute(config)
    wide_residual = get_wide_residual_config(config)
    if wide_residual is None:
        return
    if not isinstance(wide_residual, WideResidualConfig):
        raise TypeError(
            f"wide_residual is {wide_residual!r} ({type(wide_residual).__name__}); a WideResidualConfig is wanted"
        )
    if config.mtp_num_layers and config.pipeline_model_parallel_layout is not None:
        raise ValueError(
            "--pipeline-model-parallel-layout cannot be used with wide residual streams and --mtp-num-layers: a stage "
            "of prediction layers alone would receive the width D, the stages before it exchange K*D. Leave the layout "
            "out: the prediction layers then stand on the last stage."
        )
    for attribute, option, refused, reason in _REFUSED_OPTIONS:
        value = getattr(config, attribute, None)
        if refused(value):
            raise ValueError(
                f"{option} ({attribute}={value!r}) cannot be used with wide residual streams: {reason}. "
                f"Leave {option} out, or --wide-residual."
            )


def _check_residual_stream_recompute(config: TransformerConfig) -> None:
    """Raise ValueError unless the replay options fit together; the message names the flag."""
    replays = RESIDUAL_STREAM_MODULE in (config.recompute_modules or ())
    size: Any = getattr(config, "residual_stream_recompute_num_layers", None)
    if size is not None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"residual_stream_recompute_num_layers is {size!r}; an int of 1 or more is wanted")
        if not replays:
            raise ValueError(
                "--residual-stream-recompute-num-layers given without residual_stream among --recompute-modules; add "
                "--recompute-granularity selective --recompute-modules residual_stream, or leave it out"
            )
    if not replays:
        return
    if get_wide_residual_config(config) is None:
        raise ValueError("--recompute-modules residual_stream needs wide residual streams (--wide-residual K)")
    if config.recompute_granularity != "selective":
        raise ValueError(
            "--recompute-modules residual_stream needs --recompute-granularity selective; it is "
            f"{config.recompute_granularity!r}"
        )
    others = set(config.recompute_modules or ())
    if "layernorm" in others:
        raise ValueError(
            "--recompute-modules residual_stream replays the norms that reads feed already; leave layernorm out"
        )
    if "mlp" in others and config.add_bias_linear:
        # megatron-core 0.19.2: the checkpointed MLP returns its bias parameter, which then becomes an output of the
        # checkpoint and so an input of its own backward.
        raise ValueError(
            "--recompute-modules mlp recurses for ever with linear biases; add --disable-bias-linear, or leave mlp out"
        )
