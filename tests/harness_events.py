"""TensorBoard files as a training run leaves them, without a run.

    write_run(folder / "tensorboard", {1: 8.0, 2: 6.0}, **{"lm loss validation": {2: float("nan")}})

What always holds: tags and texts are those of the trainer.
"""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


def write_run(folder: Path, losses: dict[int, float], wide: str = "None", **scalars: dict[int, float]) -> None:
    """TensorBoard files with the tags and texts of Megatron's trainer: 2 sequences of 16 tokens a step."""
    with SummaryWriter(str(folder)) as writer:
        texts = {"global_batch_size": "2", "seq_length": "16", "wide_residual": wide}
        texts |= {"parameters/base": "123456789", "parameters/controllers": "36"}
        for name, text in texts.items():
            writer.add_text(name, text)
        for tag, values in ({"lm loss": losses} | scalars).items():
            for step, value in values.items():
                writer.add_scalar(tag, value, step)
