#!/usr/bin/env bash
# Set-up, then every check: lint, formatting, types and tests. This is what continuous integration runs.
#
#   ./scripts/test.sh                                   everything
#   ./scripts/test.sh tests/test_overlay.py -k wheel    arguments go to pytest
#
# All checks run, also after one has failed. Exit status: pytest's own where it is not 0, else 1 when lint, formatting
# or types failed.
set -euo pipefail
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./scripts/setup.sh

# The tests start many processes: one thread each, and two workers that keep a file's shared launches together.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} WANDB_MODE=${WANDB_MODE:-offline}
bin=.venv/bin
failed=()
check() {
    printf '\n== %s\n' "$1"
    "${@:2}" || failed+=("$1")
}
check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
mapfile -t shell_files < <(git ls-files '*.sh' '*.sbatch' .ci/run)
check "shellcheck" "$bin/shellcheck" "${shell_files[@]}"

printf '\n== pytest\n'
status=0
"$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" || status=$?
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed before the tests: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    [ "$status" -ne 0 ] || status=1
fi
exit "$status"
