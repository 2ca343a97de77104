#!/usr/bin/env bash
# Trains a recipe on this machine, as the .sbatch files do on a cluster: run folder, saving on request, restarts, guard.
#
#   ./scripts/launch.sh scripts/recipes/tiny-gpt.yaml
#   ./scripts/launch.sh scripts/recipes/quickstart-gpt.yaml --run-dir runs/wide --wide-residual 4 --train-iters 400
#   ./scripts/launch.sh --rerun runs/wide
#
#   --run-dir DIR        where everything is kept (default runs/RECIPE-DATE-TIME); the same folder again goes on there
#   --processes N        training processes (default: the recipe's)
#   --without FLAG ...   flags of the recipe to leave out; several --without add up
#   --rerun DIR          goes on with the run in DIR, with the flags that it has
#   any other flag       is the training script's and takes the place of the recipe's
#
# ^C (or USR2) saves and leaves with status 75; a second ^C ends at once. RESTART=0: no restart after a failure.
# What always holds: paths in flags are relative to the checkout; a run folder has one launch at a time. Status 0: done,
# 2: bad options or another launch at work, 75: saved and left.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# An interactive allocation of one node is a machine like any other.
unset SLURM_JOB_ID SLURM_NNODES SLURM_NODEID SLURM_RESTART_COUNT SLURM_ARRAY_JOB_ID
# shellcheck source=scripts/slurm/lib.sh
. "$repository/scripts/slurm/lib.sh"
[ $# -gt 0 ] || set -- --help
show_help "${BASH_SOURCE[0]}" "$@"
if [ "$1" = --rerun ]; then
    [ $# -eq 2 ] || die "--rerun wants one run folder and nothing else; $(($# - 1)) words were given"
    # Relative to where this was typed, else to the checkout as all other paths.
    for folder in "$2" "$repository/$2"; do
        [ ! -f "$folder/recipe.yaml" ] || break
    done
    [ -n "$2" ] && [ -f "$folder/recipe.yaml" ] || die "--rerun $2: no run folder, it would hold a recipe.yaml"
    folder=$(cd "$folder" && pwd)
    set -- "$folder/recipe.yaml" --run-dir "$folder"
fi
run_here "$@"
