"""Parameters and floating-point operations of models, from their flags, without training them.

    echo '[["pretrain_gpt.py", ["--num-layers", "2", ...]]]' | python -m megatron.ablations.model_cost OUT.json
    [{"parameters": 1803904, "controllers": 100, "flops_per_step": 3.1e10}]

The flags go through the very parser and checks of the training scripts; the whole model is built with its weights on
PyTorch's meta device (shapes without memory) as if on one rank, for its parameters do not depend on the parallel
layout. FLOPs of a step are those that the trainer's throughput counts (upstream's count and what it leaves out,
megatron/training/model_flops.py): the ordinary model's, for streams add vector operations and no matrix product. Where
the tokenizer cannot be read the vocabulary is not known, and the entry says so in `error`, as it does for flags that
are refused.

What always holds: an entry has numbers or an error, never a guess. It runs in a process of its own, because upstream
keeps its arguments and process groups in globals.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SCRIPT_KINDS = {"pretrain_gpt.py": "gpt", "pretrain_mamba.py": "hybrid"}
# The layout is dropped: one rank holds the whole model.
_ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "moe_grouped_gemm": False,  # needs Transformer Engine, and has the same weights
    "load": None,
    "save": None,
}


class _EmptyOnMeta(TorchFunctionMode):
    """Weights, which modules begin as torch.empty, go to the meta device; small tensors with values stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def _on_one_rank(args: Namespace) -> None:
    for name, value in _ONE_RANK.items():
        setattr(args, name, value)
    args.world_size = 1


def _vocabulary(args: Namespace) -> None:
    """Set the padded vocabulary as the trainer does when it builds the tokenizer."""
    from megatron.training.global_vars import _build_tokenizer, unset_global_variables

    _build_tokenizer(args)
    unset_global_variables()


def model_cost(script: str, flags: list[str]) -> dict[str, Any]:
    """Parameters, controllers and FLOPs per step of one model."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.layer_activations import lone_rank
    from megatron.training.model_flops import left_out_flops
    from megatron.training.model_kinds import MODEL_KINDS
    from megatron.training.model_summary import count_parameters
    from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS, ArgumentExtension, validated_arguments
    from megatron.training.training import num_floating_point_operations

    kind = MODEL_KINDS[SCRIPT_KINDS[script]]
    single = ArgumentExtension(lambda parser: parser, before_restoring=_on_one_rank, before_validation=kind.check)
    sys.argv = [script, *flags]
    args = validated_arguments("cpu", (single, *ARGUMENT_EXTENSIONS))
    args.perform_initialization = False
    _vocabulary(args)
    with lone_rank(args):
        config = kind.config(args)
        config.transformer.perform_initialization = False
        with _EmptyOnMeta():
            groups = ProcessGroupCollection.use_mpu_process_groups()
            model = config.get_builder_cls()(config).build_model(groups, pre_process=True, post_process=True)
        base, controllers = count_parameters([model])
    flops = num_floating_point_operations(args, args.global_batch_size)
    flops += args.global_batch_size * args.seq_length * left_out_flops(args)
    return {"parameters": base, "controllers": controllers, "flops_per_step": float(flops)}


def main(argv: list[str]) -> int:
    """Read [script, flags] pairs from standard input; write one entry each to the file."""
    from megatron.cpu.host import cpu_host
    from megatron.cpu.replacements import Replacements
    from megatron.patches.offline_tokenizers import install_tokenizers
    from megatron.training.model_kinds import MODEL_KINDS

    entries: list[dict[str, Any]] = []
    with cpu_host(), Replacements() as replaced:
        install_tokenizers(replaced)
        MODEL_KINDS["hybrid"].prepare(replaced, "cpu")
        for script, flags in json.load(sys.stdin):
            said, refused = io.StringIO(), io.StringIO()
            if script not in SCRIPT_KINDS:
                entries.append({"error": f"{script} is none of {', '.join(SCRIPT_KINDS)}, whose models are known"})
                continue
            try:
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(refused):
                    entries.append(model_cost(script, flags))
            except SystemExit as error:  # argparse says why on standard error
                entries.append({"error": (refused.getvalue().strip() or str(error) or "no message").splitlines()[-1]})
            except Exception as error:
                text = str(error).strip().splitlines()
                entries.append({"error": f"{type(error).__name__}: {text[0] if text else 'no message'}"})
    Path(argv[0]).write_text(json.dumps(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
