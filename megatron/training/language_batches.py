"""Batches and loss of a language model: what `pretrain()` calls for every micro-batch.

`forward_step(data_iterator, model)` is the function that the trainer takes. The first rank of each tensor-parallel
group reads the micro-batch and the others receive it; each pipeline stage gets what it needs.

Shapes: s sequence, b micro-batch. tokens_bs, labels_bs, loss_mask_bs, position_ids_bs: (b, s); losses_bs (b, s) fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import megatron.core.parallel_state as parallel_state
import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training.global_vars import get_args, get_timers

_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
# Upstream's broadcast looks these up too; they belong to packed sequences and hybrid context parallelism.
_UNUSED_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")

SPIKE_FACTOR = 10  # --check-for-spiky-loss: a loss this many times the largest seen so far

Batch = dict[str, Any]  # a tensor, or None for what this stage does not need


@cache
def _pipeline_layout(text: str | None, stages: int) -> PipelineParallelLayerLayout | None:
    """--pipeline-model-parallel-layout as upstream's model configuration holds it; arguments keep the text."""
    return None if text is None else PipelineParallelLayerLayout.from_str(text, stages)


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None = None) -> Batch:
    """One micro-batch for this rank; a middle pipeline stage gets None everywhere."""
    args = get_args()
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    predicts_more = mtp_on_this_rank(
        layout=_pipeline_layout(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size),
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=vp_stage is None,
        vp_stage=vp_stage,
    )
    if not (is_first or is_last or predicts_more):
        return dict.fromkeys(_KEYS)
    batch: dict[str, Any] = dict.fromkeys(_KEYS + _UNUSED_KEYS)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert data_iterator is not None, "the first rank of a tensor-parallel group has no data iterator"
        loaded = next(data_iterator)
        batch |= {key: loaded[key].cuda(non_blocking=True) for key in _KEYS if loaded.get(key) is not None}
    # Labels and loss mask travel to the first stage, tokens to the last, only when both are on this stage, or when it
    # predicts further tokens, for which it embeds the following ones.
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        tp_rank=tp_rank,
        cp_size=args.context_parallel_size,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        mtp_on_this_rank=predicts_more,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=is_first,
        is_pipeline_last_stage=is_last,
    )
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def masked_loss(
    loss_mask_bs: torch.Tensor, losses_bs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the unmasked token losses, their number, and both as what the trainer logs and averages."""
    args = get_args()
    mask = loss_mask_bs.reshape(-1).float()
    loss_sum = torch.sum(losses_bs.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    if args.check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss_sum,
            rejection_func=lambda loss: not bool(torch.isfinite(loss).all()),
            message="found a NaN or Inf in the loss of a micro-batch",
            tolerance=0.0,
            fatal=True,
        )
    if args.check_for_spiky_loss:
        machine = get_rerun_state_machine()
        machine.validate_result(
            result=loss_sum,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"),
            message="found a spike in the loss of a micro-batch",
            tolerance=0.0,
            fatal=False,
        )
    report = torch.stack([loss_sum.detach(), num_tokens.to(loss_sum.dtype)])
    return loss_sum, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one micro-batch through this stage; returns its output and the loss function."""
    assert not return_schedule_plan, "--overlap-moe-expert-parallel-comm is refused among the arguments"
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(masked_loss, batch["loss_mask"])
