#!/usr/bin/env bash
# Makes .venv at the root of the repository and installs what training, the quickstart and the tests need.
#
#   ./scripts/setup.sh                        (quickstart.sh and test.sh call it by themselves)
#   PYTHON=/path/to/python3.13 ./scripts/setup.sh
#
# What always holds: every set-up installs the versions of constraints.txt; this checkout is installed in editable
# form, so that no installed copy stands in its way; a .venv that is complete and current is left as it is, within a
# second; one whose set-up was interrupted, that no longer runs or that was moved here is made afresh.
set -euo pipefail
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
[ $# -eq 0 ] || { echo "error: $1: setup.sh takes no arguments (--help explains it)" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
stamp=$venv/setup-complete     # holds what the finished set-up was made from
marker=$venv/setup-incomplete  # lies there while a set-up is under way
log=$venv/setup.log
venv_gb=7                      # measured: 6.3 GB with torch's CUDA build, the one that PyPI serves for Linux
download_gb=4                  # what pip holds in TMPDIR meanwhile

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

wanted_state() { printf '%s\n' "$root"; cat pyproject.toml constraints.txt; }

# Succeeds when .venv holds this checkout in editable form and every direct dependency in a version that it allows.
venv_is_whole() {
    "$venv/bin/python" -I - "$root" <<'PYTHON' >/dev/null 2>&1
import json, sys
from importlib.metadata import distribution, version
from pathlib import Path
from packaging.requirements import Requirement

ours = distribution("megatron-wide-residual")
source = json.loads(ours.read_text("direct_url.json"))
assert source["dir_info"]["editable"] and source["url"] == Path(sys.argv[1]).as_uri()
for requirement in map(Requirement, ours.requires):
    if requirement.marker is None or any(requirement.marker.evaluate({"extra": x}) for x in ("test", "quickstart")):
        assert version(requirement.name) in requirement.specifier
PYTHON
}

usable_python() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# Prints the Python to make .venv with: the oldest suitable one first, since that is what most wheels are built for.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.12 or newer with the venv and ensurepip modules."
        printf '%s\n' "$PYTHON"
        return
    fi
    local minor candidate looked_at=""
    for minor in 12 13 14 15; do
        for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor"*/bin/python; do
            if usable_python "$candidate"; then
                printf '%s\n' "$candidate"
                return
            fi
        done
    done
    for candidate in python3 python "$(uv python find '>=3.12' 2>/dev/null || true)"; do
        if [ -n "$candidate" ] && usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        looked_at+="${looked_at:+, }${candidate:-uv python find}"
        looked_at+=" ($("${candidate:-false}" --version 2>&1 | head -n 1 || true))"
    done
    die "no Python 3.12 or newer with the venv module was found; looked at python3.12 to python3.15, pyenv's versions, $looked_at." \
        "Install one, for example: uv python install 3.12 | pyenv install 3.12 | apt-get install python3.12-venv" \
        "or name one: PYTHON=/path/to/python3.12 ./scripts/setup.sh"
}

free_gb() { df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }'; }
device_of() { df -Pk "$1" | awk 'NR == 2 { print $1 }'; }

check_disk() {
    local temporary=${TMPDIR:-/tmp} wanted=$venv_gb place=$root
    [ ! -d "$venv" ] || place=$venv/ # may be a link to another disk
    if [ "$(device_of "$place")" = "$(device_of "$temporary")" ]; then
        wanted=$((venv_gb + download_gb))
    elif [ "$(free_gb "$temporary")" -lt "$download_gb" ]; then
        die "too little disk: $(free_gb "$temporary") GB free in $temporary, $download_gb GB are needed there for downloads." \
            "Free some, or name another folder: TMPDIR=/path/with/space ./scripts/setup.sh"
    fi
    if [ "$(free_gb "$place")" -lt "$wanted" ]; then
        die "too little disk: $(free_gb "$place") GB free at $place, $wanted GB are needed (torch and its CUDA libraries are most of it)."
    fi
}

explain_failed_install() {
    if grep -qiE 'No space left on device' "$log"; then
        die "the disk filled up. About $((venv_gb + download_gb)) GB are needed; free some and start again."
    elif grep -qiE 'NewConnectionError|NameResolutionError|name resolution|Max retries exceeded|ReadTimeout|ConnectTimeout|ProxyError' "$log"; then
        die "no network: pip could not reach the package index. Check the connection (HTTPS_PROXY, PIP_INDEX_URL) and start again."
    fi
    die "pip failed; its full log is $log. Start again once the cause is mended."
}

# Two set-ups of one checkout must not meet. The lock is on this script, so no extra file is left behind.
if command -v flock >/dev/null; then
    exec 9<"$root/scripts/setup.sh"
    flock -n 9 || { say "another set-up of this checkout is running, waiting for it"; flock 9; }
fi

if [ -f "$stamp" ] && wanted_state | cmp -s - "$stamp" && venv_is_whole; then
    say ".venv is up to date"
    exit 0
fi

if [ -e "$venv" ]; then
    reason=""
    if [ -e "$marker" ]; then
        reason="an earlier set-up did not finish"
    elif ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        reason="its Python or its pip does not run"
    elif [ -f "$stamp" ] && [ "$(head -n 1 "$stamp")" != "$root" ]; then
        reason="it was made for $(head -n 1 "$stamp")"
    fi
    if [ -n "$reason" ]; then
        say "making .venv afresh: $reason"
        find "$venv/" -mindepth 1 -delete # keeps .venv itself, which may be a link to another disk
    elif ! usable_python "$venv/bin/python"; then
        die "$venv is a $("$venv/bin/python" --version), Python 3.12 or newer is wanted. Remove or rename that folder and start again."
    fi
fi

trap 'say "interrupted. Start it again: it makes .venv afresh." >&2; exit 130' INT TERM
if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    check_disk
    say "[1/2] making .venv with $("$python" --version) ($(command -v "$python"))"
    mkdir -p "$venv"
    touch "$marker"
    "$python" -m venv "$venv"
fi
touch "$marker"
rm -f "$stamp" "$log"
say "[2/2] installing $(grep -c == constraints.txt) packages, about $venv_gb GB on disk (a few minutes the first time)"
install() { "$venv/bin/python" -m pip install --disable-pip-version-check --log "$log" -c constraints.txt "$@" || explain_failed_install; }
install setuptools # builds the editable form of this checkout; in pip's own isolation it would not be of constraints.txt
install --no-build-isolation -e ".[test,quickstart]"
venv_is_whole || die "pip finished but the installed packages are not those that pyproject.toml asks for; its log is $log."
wanted_state >"$stamp"
rm -f "$marker"
say "done: .venv/bin/python"
