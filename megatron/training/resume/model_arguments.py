"""A training run and the arguments of its checkpoint's model: restored, or compared, never quietly another model.

    MODEL_ARGUMENTS.parser = parser            # before it parses
    MODEL_ARGUMENTS.note(args)                 # right after: what the command line itself gives
    MODEL_ARGUMENTS.restore(args)              # --use-checkpoint-args, after upstream took over its own list
    MODEL_ARGUMENTS.check(args)                # validated arguments

Many flags change what a model computes and no shape of a weight (--norm-epsilon, --rotary-base, --use-rope-scaling,
--squared-relu, ...). Upstream's --use-checkpoint-args takes over a fixed list that lacks several of them, and a resumed
run that leaves one out goes on as another model without a word.

What always holds: a flag that the command line gives is never changed, and where it differs from the checkpoint's a
line says so; one that it leaves out has the checkpoint's value (--use-checkpoint-args) or ends the run when its default
is another one. The stream layout and shortcut MoE have checks of their own (wide_residual_checkpoint.py).
"""

from __future__ import annotations

import copy
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any

from megatron.training.model_argument_names import model_argument_names
from megatron.training.resume.differences import NON_STRICT_FLAG
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.preflight import checkpoint_to_load
from megatron.training.resume.stored import stored_arguments

_OWN_CHECKS = ("wide_residual", "moe_shortcut_")
# Derived from each other, or from a hybrid model's pattern, which has its own check: left as upstream restores them.
_NOT_RESTORED = {
    *("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern", "num_layers", "mtp_num_layers"),
    *("bf16", "fp16", "padded_vocab_size"),
}
# Never a reason to refuse: sizes of data and vocabulary, what acts on fresh weights alone, and the precision, which the
# comparison of all keys, shapes and dtypes covers.
_NOT_COMPARED = {
    *("seq_length", "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by", "padded_vocab_size"),
    *("pad_vocab_size", "init_method_std", "embedding_init_method_std", "bf16", "fp16", "hybrid_layer_pattern"),
    *("hybrid_override_pattern", "mtp_hybrid_override_pattern", "enable_experimental", "spec", "bert_binary_head"),
}
_ABSENT = object()


def given_names(parser: ArgumentParser, argv: Iterable[str]) -> set[str]:
    """Return the names, in the namespace, of the options that a command line gives, its default values included."""
    blank = Namespace()
    for action in parser._actions:
        if action.dest != SUPPRESS:
            # What appends, extends or counts adds to what is there: nothing must be there.
            adds = type(action).__name__.strip("_").startswith(("Append", "Extend", "Count"))
            setattr(blank, action.dest, None if adds else _ABSENT)
    parser.parse_known_args(list(argv), blank)
    return {name for name, value in vars(blank).items() if value is not _ABSENT and value is not None}


def _tokenizer_names(parser: ArgumentParser) -> set[str]:
    return {
        action.dest for group in parser._action_groups if group.title == "tokenizer" for action in group._group_actions
    }


def _option(actions: list[Action], name: str, value: Any) -> str:
    """Return how a command line gives this value, or the name and the value where none does."""
    mine = [action for action in actions if action.dest == name and action.option_strings]
    for action in mine:
        if action.nargs == 0 and action.const == value:
            return action.option_strings[0]
    if value is None or isinstance(value, bool) or not any(action.nargs != 0 for action in mine):
        return f"({name} {value})"
    values = value if isinstance(value, list | tuple) else [value]
    option = next(action for action in mine if action.nargs != 0).option_strings[0]
    return " ".join([option, *map(str, values)])


class ModelArguments:
    """The arguments of one command line that describe a model, beside those of the checkpoint that it loads."""

    parser: ArgumentParser

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._names: set[str] = set()
        self._tokenizer: set[str] = set()
        self._given: dict[str, Any] = {}

    def note(self, args: Namespace) -> None:
        """Remember which options the command line (sys.argv) gives, and their values."""
        parser = self.parser
        self._actions = parser._actions
        self._names = {name for name in model_argument_names(parser) if not name.startswith(_OWN_CHECKS)}
        self._tokenizer = _tokenizer_names(parser)
        given = given_names(parser, sys.argv[1:])
        self._given = {name: copy.copy(getattr(args, name)) for name in given & self._names}

    def restore(self, args: Namespace) -> None:
        """Set what the command line leaves out to the checkpoint's value, and what it gives back to the given one."""
        stored = self._stored(args)
        if stored is None:
            return
        for name in sorted(self._names - _NOT_RESTORED):
            if name in self._tokenizer and not args.use_tokenizer_model_from_checkpoint_args:
                continue
            if name in self._given:
                setattr(args, name, self._given[name])
            elif hasattr(stored, name):
                setattr(args, name, getattr(stored, name))

    def check(self, args: Namespace) -> None:
        """Compare validated arguments with the checkpoint's, restored or not.

        Raises:
            CheckpointError: a flag of the model is left out whose default is not the checkpoint's value.
        """
        stored = self._stored(args)
        if stored is None:
            return
        changed, forgotten = [], []
        compared = self._names - _NOT_COMPARED - self._tokenizer
        if not (args.group_query_attention or getattr(stored, "group_query_attention", True)):
            compared.discard("num_query_groups")  # upstream's count of operations overwrites it while it trains
        for name in sorted(compared):
            value, have = getattr(stored, name, _ABSENT), getattr(args, name, None)
            if value is _ABSENT or value == have:
                continue
            if name in self._given:
                changed.append((name, value))
            elif not args.use_checkpoint_args and (have is None or self._default(name) is not None):
                forgotten.append((name, value))
            # Else it is derived from another argument, whose difference says it all.
        self._say(args, changed)
        if not forgotten:
            return
        flags = " ".join(_option(self._actions, *pair) for pair in forgotten)
        here = ", ".join(f"{name} {getattr(args, name, None)}" for name, _ in forgotten)
        if args.load_non_strict:
            if args.rank == 0:
                print(f"> {NON_STRICT_FLAG}: the checkpoint was trained with {flags}; this run has {here}", flush=True)
            return
        raise CheckpointError(
            f"the checkpoint in {args.load or args.pretrained_checkpoint} was trained with {flags}; this command line "
            f"leaves that out and would go on with {here}: another model. Give it (or --use-checkpoint-args); to "
            f"change it on purpose give the new value, or {NON_STRICT_FLAG} where a flag has no value to give."
        )

    def _default(self, name: str) -> Any:
        return next((action.default for action in self._actions if action.dest == name), None)

    def _stored(self, args: Namespace) -> Namespace | None:
        location = checkpoint_to_load(args)
        return None if location is None else stored_arguments(location)

    def _say(self, args: Namespace, differing: list[tuple[str, Any]]) -> None:
        if differing and args.rank == 0:
            pairs = "; ".join(
                f"{_option(self._actions, name, self._given[name])} (the checkpoint: {value})"
                for name, value in differing
            )
            print(f"> WARNING: the model differs from the checkpoint's as the command line says: {pairs}", flush=True)


# Of the command line of this process.
MODEL_ARGUMENTS = ModelArguments()
