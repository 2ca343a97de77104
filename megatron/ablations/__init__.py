"""Ablations: one YAML names a base recipe, axes and seeds; every combination is a run folder; a report compares them.

    tools/ablate.py plan|run|report scripts/ablations/quickstart_gpt.yaml

One module a concept: axes (what an axis does to the flags), description (YAML to runs), state (what has become of a
run), runner (runs on this machine), slurm_array (runs as a job array), cost (parameters, FLOPs, time), paired (means,
spreads, paired intervals), provenance (when and from what), report (Markdown and CSV), plots.

What always holds: a run is one that scripts/launch.sh makes from a recipe, nothing else; importing any of these modules
imports neither torch nor matplotlib.
"""
