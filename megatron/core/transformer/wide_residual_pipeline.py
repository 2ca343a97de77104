"""The config that pipeline schedules see for a model with wide residual streams.

    model.config = pipeline_boundary_config(model.config)

Megatron's schedules size their receive buffers from `get_model_config(model).hidden_size`, while every module uses
`config.hidden_size` as the branch width D. A boundary config is the same config (it shares the attribute dictionary,
so whatever the trainer sets on one is there on the other) except that its hidden_size is the carried width K*D. With
it 1F1B and interleaved schedules, in training, evaluation and inference, exchange fixed-size K*D tensors, and no
message about shapes is needed.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.wide_residual_config import (
    WideResidualMLATransformerConfig,
    WideResidualTransformerConfig,
    require_wide_residual_config,
)


class _CarriedWidth:
    """Reads hidden_size as the width that crosses a pipeline boundary."""

    @property
    def hidden_size(self) -> int:
        """K*D."""
        return self.__dict__["hidden_size"] * self.wide_residual.num_streams  # type: ignore[attr-defined]


class WideResidualBoundaryConfig(_CarriedWidth, WideResidualTransformerConfig):
    """A WideResidualTransformerConfig as pipeline schedules see it."""


class WideResidualMLABoundaryConfig(_CarriedWidth, WideResidualMLATransformerConfig):
    """A WideResidualMLATransformerConfig as pipeline schedules see it."""


_BOUNDARY_CLASS: dict[type, type] = {
    WideResidualTransformerConfig: WideResidualBoundaryConfig,
    WideResidualMLATransformerConfig: WideResidualMLABoundaryConfig,
}


def pipeline_boundary_config(config: Any) -> Any:
    """Return the view of config that a pipeline schedule must be given: the same object but for hidden_size = K*D.

    Raises:
        ValueError: an ordinary config.
        TypeError: a config class without a boundary view.
    """
    require_wide_residual_config(config, "a pipeline boundary")
    if isinstance(config, _CarriedWidth):
        return config
    if type(config) not in _BOUNDARY_CLASS:
        raise TypeError(f"no pipeline boundary is known for a {type(config).__name__}")
    view: Any = object.__new__(_BOUNDARY_CLASS[type(config)])
    view.__dict__ = config.__dict__
    return view
