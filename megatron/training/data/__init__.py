"""Turning raw text into what Megatron trains on, and reading it safely: readers, tokenizers, writers, checks.

Used by tools/preprocess_data.py, tools/train_tokenizer.py and megatron/training/text_datasets.py. Importing this
package alone imports nothing further of ours; every module names its own needs.
"""
