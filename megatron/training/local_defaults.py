"""Defaults that fit the machine: what upstream's defaults need and this installation lacks is switched off.

Upstream's defaults expect Transformer Engine, apex and a GPU. `set_local_defaults(parser, host)` changes the parser's
defaults for what is absent, so an option that the user gives always wins; `check_local_choices(args, host)` refuses an
explicit option that cannot work here, naming it and the remedy; `describe_local_defaults(...)` is the one log line.

What always holds: with everything installed and a GPU, no default changes but that of --eval-interval, which has none
upstream. No option that the user gave is altered.
"""

from __future__ import annotations

import argparse
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class LocalChoiceError(ValueError):
    """An option was given that this installation cannot serve."""


@contextmanager
def upstream_refusals() -> Iterator[None]:
    """Turn an assertion or error by which upstream refuses options into a LocalChoiceError.

    Only around code that looks at nothing but options: upstream's validation, and a model's configuration.
    """
    try:
        yield
    except LocalChoiceError:
        raise
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        text = " ".join(str(error).split())
        if not text:  # an assertion without words: its own line says what was wanted
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{last.line} ({Path(last.filename).name}, line {last.lineno})"
        raise LocalChoiceError(f"megatron-core does not take these options: {text}") from error


@dataclass(frozen=True)
class Surroundings:
    """What the defaults depend on."""

    host: str
    transformer_engine: bool
    apex: bool
    fused_gradient_kernel: bool

    @classmethod
    def find(cls, host: str) -> Surroundings:
        """Look at the installed packages; `host` is "cuda" or "cpu"."""

        def installed(name: str) -> bool:
            return importlib.util.find_spec(name) is not None

        return cls(
            host=host,
            transformer_engine=host == "cuda" and installed("transformer_engine"),
            apex=host == "cuda" and installed("apex"),
            fused_gradient_kernel=host == "cuda" and installed("fused_weight_gradient_mlp_cuda"),
        )


@dataclass(frozen=True)
class LocalDefault:
    """One changed default: the value used when `absent` holds, and whether another explicit value can work then."""

    dest: str
    value: Any
    flag: str
    needs: str
    absent: Callable[[Surroundings], bool]
    other_values_fail: bool


def _no_engine(found: Surroundings) -> bool:
    return not found.transformer_engine


def _no_apex(found: Surroundings) -> bool:
    return not found.apex


def _on_cpu(found: Surroundings) -> bool:
    return found.host == "cpu"


def _no_gradient_kernel(found: Surroundings) -> bool:
    return not found.fused_gradient_kernel and not found.transformer_engine


DEFAULT_EVAL_INTERVAL = 1000
_CPU_HOST = "a GPU"
LOCAL_DEFAULTS: tuple[LocalDefault, ...] = (
    LocalDefault("transformer_impl", "local", "--transformer-impl", "transformer-engine", _no_engine, True),
    LocalDefault("distributed_backend", "gloo", "--distributed-backend", _CPU_HOST, _on_cpu, True),
    LocalDefault("no_persist_layer_norm", True, "--no-persist-layer-norm", "apex", _no_apex, False),
    LocalDefault(
        "gradient_accumulation_fusion",
        False,
        "--no-gradient-accumulation-fusion",
        "apex or transformer-engine",
        _no_gradient_kernel,
        False,
    ),
    LocalDefault("masked_softmax_fusion", False, "--no-masked-softmax-fusion", "apex", _no_apex, False),
    LocalDefault("apply_rope_fusion", False, "--no-rope-fusion", "transformer-engine", _no_engine, False),
    LocalDefault("bias_gelu_fusion", False, "--no-bias-gelu-fusion", _CPU_HOST, _on_cpu, False),
    LocalDefault("bias_swiglu_fusion", False, "--no-bias-swiglu-fusion", _CPU_HOST, _on_cpu, False),
    LocalDefault("bias_dropout_fusion", False, "--no-bias-dropout-fusion", _CPU_HOST, _on_cpu, False),
)

# Options that are off by default and cannot work when what they need is absent: (dest, flag, needs, absent).
_OPT_IN: tuple[tuple[str, str, str, Callable[[Surroundings], bool]], ...] = (
    ("fp8", "--fp8-format", "transformer-engine", _no_engine),
    ("multi_latent_attention", "--multi-latent-attention", "transformer-engine", _no_engine),
    ("fp4", "--fp4-format", "transformer-engine", _no_engine),
    ("moe_grouped_gemm", "--moe-grouped-gemm", _CPU_HOST, _on_cpu),
    ("moe_permute_fusion", "--moe-permute-fusion", "transformer-engine", _no_engine),
    ("moe_router_fusion", "--moe-router-fusion", "transformer-engine", _no_engine),
    ("moe_latent_size", "--moe-latent-size", "transformer-engine", _no_engine),
    ("layernorm_zero_centered_gamma", "--apply-layernorm-1p", "transformer-engine", _no_engine),
    ("tp_comm_overlap", "--tp-comm-overlap", "transformer-engine", _no_engine),
    ("use_torch_fsdp2", "--use-torch-fsdp2", _CPU_HOST, _on_cpu),
    ("use_megatron_fsdp", "--use-megatron-fsdp", _CPU_HOST, _on_cpu),
    ("optimizer_cpu_offload", "--optimizer-cpu-offload", _CPU_HOST, _on_cpu),
    ("async_save", "--async-save", _CPU_HOST, _on_cpu),
    ("cpu_offloading_num_layers", "--cpu-offloading-num-layers", "transformer-engine", _no_engine),
    ("log_energy", "--log-energy", _CPU_HOST, _on_cpu),
    ("use_te_activation_func", "--use-te-activation-func", "transformer-engine", _no_engine),
    ("use_transformer_engine_op_fuser", "--use-transformer-engine-op-fuser", "transformer-engine", _no_engine),
    ("save_activations_interval", "--save-activations-interval", "transformer-engine", _no_engine),
    ("save_dgrads_interval", "--save-dgrads-interval", "transformer-engine", _no_engine),
)


# What the batches and the loss of the pretraining scripts do not serve, on any host: (dest, flag).
_NOT_SERVED: tuple[tuple[str, str], ...] = (
    ("sft", "--sft"),
    ("dataloader_inter_document_masking", "--dataloader-inter-document-masking"),
    ("hybrid_context_parallel", "--hybrid-context-parallel"),
    ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm"),
    ("perform_rl_step", "--perform-rl-step"),
    ("inprocess_restart", "--inprocess-restart"),
    ("logits_load_dir", "--logits-load-dir"),
    # Upstream's model building and trainer pass these over, or end with an error of their own.
    ("freeze_all_layers", "--freeze-all-layers"),
    ("rampup_batch_size", "--rampup-batch-size"),
    ("phase_transition_iterations", "--phase-transition-iterations"),
    ("apply_residual_connection_post_layernorm", "--apply-residual-connection-post-layernorm"),
    ("openai_gelu", "--openai-gelu"),
    ("onnx_safe", "--onnx-safe"),
)


def set_local_defaults(parser: argparse.ArgumentParser, host: str) -> list[LocalDefault]:
    """Change the parser's defaults for what is absent; returns the changed ones."""
    found = Surroundings.find(host)
    changed = [default for default in LOCAL_DEFAULTS if default.absent(found)]
    parser.set_defaults(**{default.dest: default.value for default in changed})
    if parser.get_default("eval_interval") is None:
        # Upstream has no value, on any machine, and its trainer divides by it.
        parser.set_defaults(eval_interval=DEFAULT_EVAL_INTERVAL)
    return changed


def repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape stray percent signs in upstream's help texts: argparse ends --help with a ValueError on the first one."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help is None or action.help is argparse.SUPPRESS:
            continue
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def check_local_choices(args: argparse.Namespace, host: str) -> None:
    """Raise LocalChoiceError for an explicit option that cannot work here."""
    found = Surroundings.find(host)
    for default in LOCAL_DEFAULTS:
        value = getattr(args, default.dest)
        if default.other_values_fail and default.absent(found) and value != default.value:
            raise LocalChoiceError(
                f"{default.flag} {value} needs {default.needs}, which is not here (host {host}): leave the option out "
                f"or give {default.flag} {default.value}."
            )
    for dest, flag, needs, absent in _OPT_IN:
        if getattr(args, dest, None) and absent(found):
            raise LocalChoiceError(f"{flag} needs {needs}, which is not here (host {host}): leave the option out.")
    for dest, flag in _NOT_SERVED:
        if getattr(args, dest, None):
            raise LocalChoiceError(f"{flag} is not served by this script: leave the option out.")
    _check_recompute_modules(args, found)
    if args.save is not None and args.save_interval is None:
        raise LocalChoiceError("--save needs --save-interval: give the number of steps between two checkpoints.")
    if args.num_experts is not None and args.add_bias_linear and _no_engine(found):
        raise LocalChoiceError(
            "--num-experts without transformer-engine needs --disable-bias-linear: the experts of --transformer-impl "
            "local cannot add linear biases."
        )
    _check_multi_token_prediction(args)
    _check_model_shape(args)
    _check_run(args)
    if args.context_parallel_size > 1 and _no_engine(found):
        raise LocalChoiceError(
            f"--context-parallel-size {args.context_parallel_size} needs transformer-engine: the attention of "
            f"--transformer-impl local cannot split a sequence. Use 1."
        )


def _check_model_shape(args: argparse.Namespace) -> None:
    """Refuse what megatron-core 0.19.2 finds wrong only while it builds the model, by an assertion or another error."""
    if args.position_embedding_type == "relative":
        raise LocalChoiceError(
            "--position-embedding-type relative is T5's; GPT and hybrids take learned_absolute, rope, yarn, mrope "
            "or none."
        )
    experts, chosen = args.num_experts, args.moe_router_topk
    if experts is not None and not 1 <= chosen <= experts:
        raise LocalChoiceError(
            f"--moe-router-topk {chosen} with --num-experts {experts}: from 1 to {experts} experts can be chosen."
        )
    layers, frequency = args.num_layers, args.moe_layer_freq
    if experts is not None and layers is not None and isinstance(frequency, list) and len(frequency) != layers:
        raise LocalChoiceError(
            f"--moe-layer-freq names {len(frequency)} layers, --num-layers {layers}: a 0 or 1 for each layer is wanted."
        )


def _check_run(args: argparse.Namespace) -> None:
    """Refuse what ends a run of megatron-core 0.19.2 by an error of its own, and what would change nothing in it."""
    if args.moe_use_upcycling:
        raise LocalChoiceError(
            "--moe-use-upcycling: megatron-core 0.19.2 loads the dense checkpoint by an argument that its own "
            "load_checkpoint does not have. Leave it out."
        )
    kitchen = [getattr(args, name, None) for name in ("kitchen_config_file", "kitchen_recipe_number")]
    if args.use_kitchen_attention and kitchen == [None, None]:
        raise LocalChoiceError(
            "--use-kitchen-attention changes nothing without --kitchen-config-file or --kitchen-recipe-number, options "
            "that are there with the package nvidia-kitchen: leave it out."
        )
    if args.first_last_layers_bf16 and not (args.fp8 or args.fp4):
        raise LocalChoiceError(
            "--first-last-layers-bf16 keeps layers of FP8 or FP4 training in bf16 and changes nothing otherwise: add "
            "--fp8-format or --fp4-format, or leave it out."
        )
    if args.full_validation and not args.multiple_validation_sets:
        raise LocalChoiceError(
            "--full-validation ends with an error at an evaluation of megatron-core 0.19.2: leave it out, and give "
            "--eval-iters."
        )


def _check_multi_token_prediction(args: argparse.Namespace) -> None:
    """Refuse two combinations on which megatron-core 0.19.2 ends with an assertion, one of them at the first save."""
    if not (args.mtp_num_layers or "/" in (args.hybrid_layer_pattern or args.hybrid_override_pattern or "")):
        return
    what = "multi-token prediction (--mtp-num-layers, or / in a layer pattern)"
    if args.position_embedding_type not in ("rope", "none"):
        raise LocalChoiceError(
            f"{what} cannot shift the positions of --position-embedding-type {args.position_embedding_type}: give rope "
            "or none."
        )
    if args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights:
        raise LocalChoiceError(
            f"{what} on a pipeline cannot save tied embeddings: give --untie-embeddings-and-output-weights."
        )


def _check_recompute_modules(args: argparse.Namespace, found: Surroundings) -> None:
    """Refuse two recompute modules that megatron-core 0.19.2 cannot run as asked."""
    modules = args.recompute_modules or ()
    if "layernorm" in modules and _no_engine(found):
        raise LocalChoiceError("--recompute-modules layernorm needs transformer-engine: leave layernorm out.")
    if "mlp" in modules and args.add_bias_linear:
        # The checkpointed MLP returns its bias parameter, which so becomes an output of its own checkpoint.
        raise LocalChoiceError(
            "--recompute-modules mlp recurses for ever with linear biases: add --disable-bias-linear, or leave mlp out."
        )


def describe_local_defaults(changed: list[LocalDefault], args: argparse.Namespace) -> str | None:
    """The log line on the defaults in use, or None when none changed."""
    parts = []
    for default in changed:
        if getattr(args, default.dest) != default.value:
            continue  # the user chose another value
        text = default.flag if isinstance(default.value, bool) else f"{default.flag} {default.value}"
        parts.append(f"{text} (no {default.needs.removeprefix('a ')})")
    return f"> defaults for this machine: {', '.join(parts)}" if parts else None
