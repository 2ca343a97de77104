"""Configuration of Mamba-2 models on wide residual streams: Mamba2Config and the layout of the streams.

Travels beside config.json of an exported model; `AutoConfig.from_pretrained(folder, trust_remote_code=True)` finds it.
"""

from transformers import Mamba2Config


class WideMamba2Config(Mamba2Config):
    """Mamba2Config with K streams; the fields are those of Megatron's --wide-residual flags."""

    model_type = "wide_mamba2"

    num_streams: int = 4
    streamwise_sigmoid_init_scale: float = 0.01
    learned_retention: bool = False
    retention_init: float = 0.999
    retention_max_forget: float = 0.10
