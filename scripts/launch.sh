#!/usr/bin/env bash
# Trains a recipe on this machine, as the .sbatch files do on a cluster: run folder, saving on request, restarts, guard.
#
#   ./scripts/launch.sh scripts/recipes/tiny-gpt.yaml
#   ./scripts/launch.sh scripts/recipes/quickstart-gpt.yaml --run-dir runs/wide --wide-residual 4 --train-iters 400
#   ./scripts/launch.sh --rerun runs/wide
#
#   --run-dir DIR        where everything is kept (default runs/RECIPE-DATE-TIME); the same folder again goes on there
#   --processes N        training processes (default: the recipe's)
#   --without FLAG ...   flags of the recipe to leave out
#   --rerun DIR          goes on with the run in DIR, with the flags that it has
#   any other flag       is the training script's and takes the place of the recipe's
#
# ^C (or USR2) saves and leaves with status 75; a second ^C ends at once. RESTART=0: no restart after a failure.
# What always holds: paths in flags are relative to the checkout. Status 0: done, 2: bad options, 75: saved and left.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -eq 0 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
if [ "$1" = --rerun ]; then
    [ $# -eq 2 ] && [ -f "$2/recipe.yaml" ] || { echo "error: --rerun wants one run folder, which holds a recipe.yaml" >&2; exit 2; }
    set -- "$2/recipe.yaml" --run-dir "$2"
fi
unset SLURM_JOB_ID SLURM_NNODES SLURM_NODEID # an interactive allocation of one node is a machine like any other
# shellcheck source=scripts/slurm/lib.sh
. "$repository/scripts/slurm/lib.sh"
run_here "$@"
