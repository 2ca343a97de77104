"""Retention logits follow weight decay.

Megatron's standard overrides take every one-dimensional parameter out of weight decay. The trainer computes them itself
and offers no way to add to them. With this patch a parameter whose `follows_weight_decay` attribute is true is left in.
Decay pulls a retention logit towards 0, where a write keeps 1 - max_forget/2 of a stream. Applied to runs with
--wide-residual-learned-retention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate, ParamWithNamePredicate
from megatron.patches import UpstreamPatch


def _follows(param: Any) -> bool:
    return getattr(param, "follows_weight_decay", False)


def _spare(key: ParamKey) -> ParamKey:
    """Return key narrowed by the parameters that follow weight decay."""
    if isinstance(key.predicate, ParamPredicate):
        one = key.predicate
        key = replace(
            key, predicate=ParamPredicate(f"{one.name}_spared", lambda param: one(param) and not _follows(param))
        )
    if isinstance(key.with_name_predicate, ParamWithNamePredicate):
        named = key.with_name_predicate
        key = replace(
            key,
            with_name_predicate=ParamWithNamePredicate(
                f"{named.name}_spared", lambda param, name: named(param, name) and not _follows(param)
            ),
        )
    return key


def _decay_retention(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_standard_config_overrides(config: Any) -> dict[ParamKey, Any]:
        overrides = original(config)
        return {
            (_spare(key) if override.get("wd_mult") == 0.0 else key): override for key, override in overrides.items()
        }

    return get_standard_config_overrides


PATCH = UpstreamPatch(
    module="megatron.training.training",
    name="get_standard_config_overrides",
    reason="the trainer computes the weight-decay overrides itself and takes none from its caller",
    source_sha256="f0718fbbe331d077895948e1b0659c508cc78dfb7b5fb0a28781a555cb173f4a",
    make=_decay_retention,
)
