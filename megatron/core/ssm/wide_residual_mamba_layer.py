"""A Mamba layer whose mixer reads from and writes to wide residual streams.

Used through a layer spec: `ModuleSpec(module=WideResidualMambaLayer, submodules=<those of the ordinary layer>)`.

What always holds: upstream's forward runs, not a copy of it: on z (width D), which the layer reads from the stream,
with the write in the place of `mamba_bda`. With an fp32 residual stream z already has the branch dtype; the stream is
never cast as a whole. Parameter names of the ordinary layer are unchanged.
"""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.core.transformer.wide_residual_branches import BranchNorm, WideResidualBranches
from megatron.core.transformer.wide_residual_config import require_wide_residual_config


class WideResidualMambaLayer(WideResidualBranches, MambaLayer):
    """MambaLayer on a stream of shape [s, b, K*D]; its mixer computes at width D.

    Arguments as MambaLayer.

    Raises:
        ValueError: an ordinary config.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        require_wide_residual_config(config, type(self).__name__)
        super().__init__(config, submodules, layer_number, pg_collection, pp_layer_offset, name)
        self._add_branches(("mamba",), norms={"mamba": BranchNorm(self.norm)}, pg_collection=pg_collection, name=name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer: [s, b, K*D] -> [s, b, K*D]. Arguments as MambaLayer.forward."""
        y_sbw: Tensor = self._run_branch("mamba", super().forward, hidden_states, *args, **kwargs)
        return y_sbw
