"""Checkpoints of the trainer: found, judged, loaded strictly and saved so that a kill loses nothing.

    location.py      the step that is meant, its folder and format
    completeness.py  what is missing of a checkpoint; the steps that are whole
    stored.py        what a checkpoint stores beside tensors: arguments, iteration
    preflight.py     the flags, and the check of --load before anything is built
    differences.py   keys, shapes and dtypes of a checkpoint beside those of a model
    sharded.py, plain.py    that comparison for the formats torch_dist and torch
    strict_load.py   upstream's load_checkpoint with it
    staged_save.py   upstream's save_checkpoint beside the final place, then moved there; --keep-last

What always holds: what cannot be used is a CheckpointError that says what was found, what was wanted and what to do.
"""
