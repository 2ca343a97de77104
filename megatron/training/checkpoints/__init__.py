"""Checkpoints as files: what every tensor in them is, reading and writing them tensor by tensor, converting them.

    tensor_table        one row for each kind of tensor: name, shape, how it is sharded, its optimizer companions
    open_checkpoint     reads torch_dist and plain (torch) checkpoints alike, one whole tensor at a time
    companions          what every trained weight has in a checkpoint with optimizer states
    output_folder       writes a checkpoint beside its place and renames it there
    widen, resize, rekey, reshard, inspection, verification      what tools/checkpoint/convert.py does

What always holds: a name that the table does not know is an error; nothing is skipped.
"""
