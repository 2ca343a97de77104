"""Megatron on a host without a GPU: `from megatron.cpu.host import training_host`.

    with training_host():          # a CUDA device: nothing happens; none (or MEGATRON_DEVICE=cpu): the CPU host
        pretrain(...)              # upstream's unmodified trainer

What always holds: on a GPU nothing is replaced; on the CPU host everything that was replaced is recorded and put back
on exit, and `torch.cuda.is_available()` is False throughout.
"""
