"""Hugging Face folders (config.json and safetensors) and Megatron checkpoints, converted both ways.

    tensor_layouts.py    how weights lie in each other: pairs of functions that undo each other
    name_tables.py       which tensor stands for which: one table a family, read both ways
    model_configs.py     config.json: what it says of a model, what cannot be expressed
    model_arguments.py   Megatron's arguments for such a model, and back
    folder_reader.py, folder_writer.py     folders, tensor by tensor
    import_plan.py, export_plan.py         what is checked before the first tensor, and the conversion
    exported_config.py   config.json of an exported model
    remote_code/         the modelling files that an exported wide model brings along; they import no megatron

How to add a family: its rows in name_tables.RULES and model_configs.NUMBER_FIELDS, and what it lacks in REQUIRED.
What always holds: what cannot be converted exactly is a HuggingFaceError that names it.
"""
