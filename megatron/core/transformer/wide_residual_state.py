"""Names of residual connections in state dicts: today's, and those of the older combined layout.

    layer.register_load_state_dict_pre_hook(load_residual_state)

Imported through `megatron.core.transformer.wide_residual`. What always holds: only the working copy that
`load_state_dict` makes of the caller's dict is changed.
"""

from __future__ import annotations

from typing import Any

import torch

_RESIDUAL_STATE_PREFIXES = (
    # (prefix of the older combined connection, prefix of today's read, prefix of today's write)
    ("residual_connection_self_attn.", "residual_read_self_attn.", "residual_write_self_attn."),
    ("residual_connection_mlp.", "residual_read_mlp.", "residual_write_mlp."),
    ("residual_connection.", "residual_read.", "residual_write."),
)
"""Key prefixes of a layer's residual connections, older and current. The first pairs belong to Transformer layers, the
last to Mamba layers."""


def load_residual_state(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Accept existing residual model keys with strict loading.

    A load_state_dict pre-hook of the layers (`register_load_state_dict_pre_hook(load_residual_state)`): keys of the
    older combined layout, `residual_connection[_self_attn|_mlp].{read_map,write_map,retention}...`, are renamed to the
    split one in the working copy that `load_state_dict` makes of the caller's dict. A key that is there in both
    layouts is left in both, so that the old one is reported as unexpected.
    """
    for combined, read, write in _RESIDUAL_STATE_PREFIXES:
        for key in [key for key in state_dict if key.startswith(prefix + combined)]:
            rest = key[len(prefix) + len(combined) :]
            target = prefix + (read if rest.startswith("read_map.") else write) + rest
            if rest.split(".", 1)[0] in ("read_map", "write_map", "retention") and target not in state_dict:
                state_dict[target] = state_dict.pop(key)
