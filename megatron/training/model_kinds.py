"""The kinds of model that the pretraining scripts build: what differs between them, in one place.

    sys.exit(main(MODEL_KINDS["hybrid"]))     # pretrain_mamba.py; "gpt" is pretrain_gpt.py

How to add to it: a kind is a `ModelKind` in MODEL_KINDS. What always holds: the modules of a model are imported when
the model is configured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.cpu.host import Host
from megatron.cpu.replacements import Replacements


@contextmanager
def as_choice_error() -> Iterator[None]:
    """Turn the ValueError or TypeError of a value that the user chose into a LocalChoiceError."""
    from megatron.training.local_defaults import LocalChoiceError

    try:
        yield
    except (TypeError, ValueError) as error:
        raise LocalChoiceError(str(error)) from error


@dataclass(frozen=True)
class ModelKind:
    """A kind of model.

    Args:
        config: from the validated arguments to upstream's ModelConfig, whose `builder` builds the model.
        check: raises LocalChoiceError for arguments that this kind cannot use; before upstream validates them.
        prepare: replaces what the model's operators need replaced on this host; undone when the run ends.
    """

    config: Callable[[argparse.Namespace], Any]
    check: Callable[[argparse.Namespace], None]
    prepare: Callable[[Replacements, Host], None]


def gpt_model_config(args: argparse.Namespace) -> Any:
    """The configuration of a GPT for these arguments: upstream's own, or the wide one with --wide-residual."""
    from megatron.training.wide_residual_builders import gpt_model_config_from_args

    with as_choice_error():
        return gpt_model_config_from_args(args)


def hybrid_model_config(args: argparse.Namespace) -> Any:
    """The same for a hybrid of Mamba, attention, MLP and MoE layers."""
    from megatron.training.hybrid_builders import hybrid_model_config_from_args

    with as_choice_error():
        return hybrid_model_config_from_args(args)


def _check_gpt(args: argparse.Namespace) -> None:
    from megatron.training.hybrid_arguments import refuse_hybrid_arguments

    with as_choice_error():
        refuse_hybrid_arguments(args)


def _check_hybrid(args: argparse.Namespace) -> None:
    from megatron.training.hybrid_arguments import check_hybrid_arguments

    with as_choice_error():
        check_hybrid_arguments(args)


def _prepare_nothing(replaced: Replacements, host: Host) -> None:
    """A kind whose modules run on any host."""


def _prepare_hybrid(replaced: Replacements, host: Host) -> None:
    from megatron.core.ssm.torch_mamba_operators import use_torch_mamba_operators

    use_torch_mamba_operators(replaced, host)


MODEL_KINDS = {
    "gpt": ModelKind(gpt_model_config, _check_gpt, _prepare_nothing),
    "hybrid": ModelKind(hybrid_model_config, _check_hybrid, _prepare_hybrid),
}
