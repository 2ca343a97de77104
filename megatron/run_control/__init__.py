"""Runs that go on by themselves: recipes, run folders, restarts, and what a trainer tells about itself.

    python -m megatron.run_control --help          what scripts/launch.sh and the .sbatch files call
    tools/recipe_flags.py, tools/runs.py    what people call

One module a concept: strict_yaml (reading YAML), recipes (YAML to flags), environment (a recipe's variables),
known_flags (which flags exist), limits (numbers of the environment), run_folder (where everything lies), snapshot (what
a rerun needs), resubmission (what submits a job again), attempts (starts, ends, the guard), node_agent (torchrun on one
node), watchdog (hung ranks), heartbeat and trainer_side (what the training process does), wandb_identity (one run id).

What always holds: nothing here imports torch or megatron.training at import time; node_agent does when it runs.
"""
