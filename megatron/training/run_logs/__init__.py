"""Where a run's numbers go beside its log: TensorBoard files and a Weights & Biases run.

writers (put in the place of upstream's two writers), tensorboard_writer, wandb_feed (the training side of wandb),
wandb_session (the wandb side, in a thread), wandb_checkpoints (what of a checkpoint wandb is told), step_mark.

What always holds: a disk that is full, a folder that cannot be written, a server that is not there, a missing package
or login cost one warning each; they neither end nor delay training.
"""
