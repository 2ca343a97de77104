"""The datasets of a GPT run, from Megatron's data flags: what `pretrain()` takes as its provider.

    check_corpus(args)                                             # right after the arguments: can the data serve?
    pretrain(..., train_valid_test_datasets_provider, ...)         # later, called by the trainer

What always holds: the samples are upstream's (GPTDataset, BlendedMegatronDatasetBuilder); only the key of the index
cache differs, so that a corpus made again under the same name never meets the cached indices of the old one. An index
that a killed run left unfinished is built again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import megatron.core.parallel_state as parallel_state
import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

from megatron.training.data.corpus import corpus_fingerprint
from megatron.training.data.corpus_check import check_corpus, data_sources
from megatron.training.data.errors import DataError
from megatron.training.data.index_cache import BLEND_INDICES, remove_unfinished_indices

__all__ = ["ContentKeyedGPTDataset", "check_corpus", "gpt_dataset_config", "train_valid_test_datasets_provider"]


class ContentKeyedGPTDataset(GPTDataset):
    """Upstream's GPTDataset with the content of the corpus, and every option that shapes the samples, in its cache key.

    Upstream's key names the path but not what the files hold, and leaves out two options that change the sample index.
    """

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *GPTDataset._key_config_attributes(),
            "drop_last_partial_validation_sequence",
            "add_extra_token_to_sequence",
        ]

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        # The last step of construction, and the first that reads the key.
        fingerprint = corpus_fingerprint(self.dataset.path_prefix)
        self.unique_identifiers["content"] = fingerprint  # read by BlendedDataset for the key of the blend
        self.unique_description += f"\ncontent: {fingerprint}\n"
        self.unique_description_hash: str = f"{self.unique_description_hash}-{fingerprint}"
        folder = self.config.path_to_cache or os.path.join(
            self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices"
        )
        remove_unfinished_indices(folder, f"{self.unique_description_hash}-*.npy")
        return super()._build_document_sample_shuffle_indices()

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        if num_tokens_per_epoch == 0:  # upstream would add nothing to nothing for ever
            raise DataError(f"{self.index_split.name}: {self.dataset_path} has no tokens in this split.")
        return super()._get_num_epochs(num_tokens_per_epoch)


def gpt_dataset_config(args: argparse.Namespace, tokenizer: Any) -> GPTDatasetConfig:
    """Return upstream's dataset configuration for Megatron's data flags; raises DataError as check_corpus does."""
    sources = data_sources(args)
    shared_blend = args.data_path is not None or args.data_args_path is not None
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as stream:
            sequences = json.load(stream)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=sources.blends[0] if shared_blend and not sources.mock else None,
        blend_per_split=None if shared_blend or sources.mock else list(sources.blends),
        split=args.split if shared_blend else None,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
        context_parallel_size=args.context_parallel_size,
        sequences_per_dataset=sequences,
    )


def _reads_samples(vp_stage: int | None) -> bool:
    """Whether this rank needs data: the first tensor-parallel rank of the first and of the last pipeline stage."""
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return parallel_state.is_pipeline_first_stage(**stage) or parallel_state.is_pipeline_last_stage(**stage)


def train_valid_test_datasets_provider(
    train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
) -> list[Any]:
    """Build the training, validation and test datasets (None where this rank reads none, or the split has no data).

    `train_val_test_num_samples` gives the samples wanted of each, None for one epoch. Must be called on all ranks.
    """
    from megatron.training.global_vars import get_args, get_tokenizer

    config = gpt_dataset_config(get_args(), get_tokenizer())
    dataset_class: type[GPTDataset] = MockGPTDataset if config.mock else ContentKeyedGPTDataset
    if config.path_to_cache:
        remove_unfinished_indices(config.path_to_cache, BLEND_INDICES)
    reads_samples: Callable[[], bool] = partial(_reads_samples, vp_stage)
    return BlendedMegatronDatasetBuilder(dataset_class, list(train_val_test_num_samples), reads_samples, config).build()


# The trainer then calls it on every rank; upstream's builder decides who builds and who waits.
train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
