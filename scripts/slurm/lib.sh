# shellcheck shell=bash
# What the launchers share: a run folder, one torchrun per node, saving on request, starting again.
#
#   repository=/path/to/checkout; . "$repository/scripts/slurm/lib.sh"
#   run_job pretrain_gpt.py RECIPE [flags]      in a SLURM job: srun, and scontrol requeue to start again
#   run_here RECIPE [flags]                     without SLURM: one node, this machine
#
# Variables (all optional; docs/launch.md describes them):
#   PYTHON                          the Python of every node (default .venv/bin/python of the checkout)
#   MASTER_ADDR MASTER_PORT         where the nodes meet (default: first host of the job, a port from the job id)
#   CONTAINER_IMAGE                 an image: .sqsh or docker://... for pyxis, .sif for apptainer
#   CONTAINER_RUNTIME               pyxis (default) or apptainer
#   CONTAINER_MOUNTS                more mounts, comma-separated host:container; the checkout is always mounted
#   CONTAINER_OPTIONS               further options of the runtime, separated by blanks
#   CONTAINER_PYTHON                Python inside the image (default python)
#   SRUN_OPTIONS                    further options of srun, separated by blanks
#   WATCHDOG_SECONDS                a rank that makes no forward step for so long is hung (default 900)
#   MAX_RESTARTS_WITHOUT_PROGRESS   the guard (default 3)
#
#   LOCK_SECONDS                    how long to wait for another launch of the run to end (default 2; in a job 120)
#
# What always holds: a job that can go on is requeued, one that cannot ends with a line that says why; nothing idles;
# a run folder is worked on by one launch at a time.

SAVED_ON_REQUEST=75 # exit_status.py
START_AGAIN=10      # __main__.py of run_control

run="" step="" step_status=0 save_requested="" cancelled=0
python=${PYTHON:-$repository/.venv/bin/python}
container_step=() container_exec=()

say() { printf '%s launch: %s\n' "$(date '+%F %T')" "$*" >&2; }
die() { say "error: $*"; exit 2; }

# show_help FILE ARGUMENTS: where one of them asks for help, prints the comment that FILE begins with and ends.
show_help() {
    local file=$1 word
    shift
    for word in "$@"; do
        case $word in
            -h | --help) sed -n '2,/^[^#]/{/^#SBATCH/d;/^#/!d;s/^# \{0,1\}//;p}' "$file"; exit 0 ;;
        esac
    done
}

# --- containers ---------------------------------------------------------------------------------------------------

choose_container() {
    [ -n "${CONTAINER_IMAGE:-}" ] || return 0
    local options=() mounts=$repository:$repository${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    read -ra options <<<"${CONTAINER_OPTIONS:-}"
    python=${CONTAINER_PYTHON:-python}
    case ${CONTAINER_RUNTIME:-pyxis} in
        pyxis)
            container_step=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$mounts"
                "--container-workdir=$repository" --no-container-mount-home ${options[@]+"${options[@]}"})
            ;;
        apptainer)
            container_exec=(apptainer exec --bind "$mounts" --pwd "$repository")
            [ ! -e /proc/driver/nvidia/version ] || container_exec+=(--nv)
            container_exec+=(${options[@]+"${options[@]}"} "$CONTAINER_IMAGE")
            ;;
        *) die "CONTAINER_RUNTIME=$CONTAINER_RUNTIME: pyxis or apptainer is wanted" ;;
    esac
}

# The bookkeeping of megatron/run_control, on one node, in the container where there is one.
control() {
    local prefix=()
    [ ${#container_step[@]} -eq 0 ] || prefix=(srun --nodes=1 --ntasks=1 --overlap "${container_step[@]}")
    PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} \
        ${prefix[@]+"${prefix[@]}"} ${container_exec[@]+"${container_exec[@]}"} "$python" -m megatron.run_control "$@"
}

# --- where the nodes meet -----------------------------------------------------------------------------------------

# The first host of the job; its address as SLURM knows it where the name means nothing to the resolver.
master_address() {
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    if ! getent hosts "$first" >/dev/null; then
        first=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' | head -n 1)
    fi
    printf '%s\n' "$first"
}

# Outside the range that Linux gives to outgoing connections (32768 and up); a restart takes the next one.
master_port() { echo $((15000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0}) % 15000)); }

# This job's name for scontrol: the id of an array's last element is the id of the whole array.
this_job() {
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

# State and reason of this job, for example "RUNNING None".
job_state() { scontrol --oneliner show job "$(this_job)" | sed -n 's/.* JobState=\([^ ]*\).* Reason=\([^ ]*\).*/\1 \2/p'; }

# --- signals ------------------------------------------------------------------------------------------------------

# ask_step_to_save [SECONDS]: after that time. The request is repeated while the step lives: the first may come before the
# step has any process that keeps it.
ask_step_to_save() {
    local asked=$step
    (sleep "${1:-0}"; while kill -USR2 "$asked" 2>/dev/null; do sleep 3; done) 8>&- 9>&- &
}

on_save_request() {
    [ -z "$save_requested" ] || return 0
    save_requested=1
    say "asked to save and leave (preemption, time limit, or by hand)"
    [ -z "$step" ] || ask_step_to_save
}

on_cancel() {
    if [ -z "${SLURM_JOB_ID:-}" ] && [ "$1" = INT ] && [ -z "$save_requested" ]; then
        say "interrupted: saving first; interrupt once more to end at once"
        on_save_request
        return 0 # a bare return in a trap gives the status of the interrupted command, which ends the script
    fi
    if [ -n "${SLURM_JOB_ID:-}" ] && [[ $(job_state) = *TIMEOUT* || $(job_state) = *TimeLimit* ]]; then
        say "the time limit came before the trainers had saved; a longer notice: sbatch --signal=B:USR2@SECONDS"
    else
        cancelled=1
        say "told to end ($1)"
    fi
    [ -z "$step" ] || kill -TERM "$step" 2>/dev/null || true
}

# Called first of all: a signal that comes while the run folder is prepared is remembered.
catch_signals() {
    trap on_save_request USR2
    trap 'on_cancel TERM' TERM
    trap 'on_cancel INT' INT
}

# --- an attempt ---------------------------------------------------------------------------------------------------

start_step() {
    local node=("$repository/scripts/slurm/node.sh") options=()
    export PYTHON=$python
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        read -ra options <<<"${SRUN_OPTIONS:-}"
        # srun waits for signals in a thread of its own; while it starts, one would end it.
        (trap '' USR2; exec srun --kill-on-bad-exit=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
            ${options[@]+"${options[@]}"} ${container_step[@]+"${container_step[@]}"} \
            ${container_exec[@]+"${container_exec[@]}"} "${node[@]}") >&8 2>&1 8>&- 9>&- &
    else
        # A session of its own, so that ^C reaches this script alone, which then lets the trainers save. It keeps the
        # lock (9): should this script be killed, the run is locked until its torchrun has ended too.
        (trap '' USR2; exec setsid ${container_exec[@]+"${container_exec[@]}"} "${node[@]}") >&8 2>&1 8>&- </dev/null &
    fi
    step=$!
    [ -z "$save_requested" ] || ask_step_to_save 3 # until then the new process surely ignores the signal
    [ "$cancelled" -eq 0 ] || kill -TERM "$step" 2>/dev/null || true # told so while there was no step
}

wait_for_step() {
    while :; do
        step_status=0
        wait "$step" || step_status=$?
        kill -0 "$step" 2>/dev/null || break # else a signal ended the wait
    done
    step=""
}

# Runs one attempt of $run; returns when another one is due, exits otherwise.
attempt() {
    local number decision=0 reason
    if [ "$cancelled" -ne 0 ]; then
        say "not started: it was told to end"
        exit 143
    fi
    number=$(control begin "$run") || exit $?
    export MEGATRON_RUN_FOLDER=$run MEGATRON_RUN_ATTEMPT=$number
    say "attempt $number of $run"
    start_step
    wait_for_step
    reason=$(CANCELLED=$cancelled control end "$run" "$step_status") || decision=$?
    reason=${reason:-ended with status $step_status, which could not be recorded}
    say "attempt $number: $reason"
    [ "$decision" -eq "$START_AGAIN" ] || exit "$decision"
}

# Everything that is printed from here on goes to the run's log as well. The writer outlives signals and ends with us.
open_log() {
    exec 8> >(trap '' INT TERM USR2 HUP; exec tee -a "$run/log.txt" 9>&-)
    log_writer=$!
    exec 2>&8
    trap close_log EXIT
}

close_log() {
    exec 2>/dev/null 8>&-
    local tenths=0
    while kill -0 "$log_writer" 2>/dev/null && [ $((tenths += 1)) -lt 50 ]; do sleep 0.1; done
}

# One launch of a run at a time. The kernel lets go of the lock when its holders have ended, however they end.
lock_run() {
    local holder status=0 mine="process $$" wait_s=${LOCK_SECONDS:-2}
    [ -z "${SLURM_JOB_ID:-}" ] || { mine="job $(this_job)"; wait_s=${LOCK_SECONDS:-120}; }
    exec 9>>"$run/launch.lock"
    flock --timeout "$wait_s" --conflict-exit-code 75 9 || status=$?
    holder=$(head -n 1 "$run/launch.lock")
    if [ "$status" -eq 75 ]; then
        # A file server can keep the lock of a node that is dead. SLURM starts a job again only after its last start has
        # ended, so that a requeued job which finds itself holding it has nobody to wait for.
        [ -n "${SLURM_JOB_ID:-}" ] && [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && [[ $holder = "$mine on "* ]] ||
            die "$run is at work already, launched by ${holder:-another launch}" \
                "($(printf 'fuser %q' "$run/launch.lock") names its processes):" \
                "wait for it, end it, or choose another --run-dir"
        say "the lock of $run is still held by this job's last start; going on"
    elif [ "$status" -ne 0 ]; then
        say "note: $run cannot be locked here (flock ended with $status): see to it that no other launch works on it"
    fi
    : >"$run/launch.lock"
    echo "$mine on $(uname -n), since $(date '+%F %T')" >&9
}

open_run() {
    choose_container
    [ ${#container_step[@]} -gt 0 ] || [ ${#container_exec[@]} -gt 0 ] || { [ -f "$python" ] && [ -x "$python" ]; } ||
        die "no Python at $python: run ./scripts/setup.sh first, or set PYTHON"
    cd "$repository" || die "no checkout at $repository"
    run=$(control prepare "$@") || exit $?
    local file
    for file in "$run/launch.lock" "$run/log.txt"; do
        { : >>"$file"; } 2>/dev/null || die "$file cannot be written: mend it, or choose another --run-dir"
    done
    lock_run
    open_log
}

# --- launchers ----------------------------------------------------------------------------------------------------

# The command that was typed, where this SLURM keeps it: in the job's record, or in its accounting.
submit_line() {
    local line
    line=$(sed -n 's/^ *SubmitLine=//p' <<<"$JOB_RECORD" | head -n 1)
    [ -n "$line" ] || line=$(timeout 20 sacct --noheader --parsable2 --allocations --jobs="$(this_job)" \
        --format=SubmitLine 2>/dev/null | head -n 1) || true
    printf '%s\n' "$line"
}

# run_job SCRIPT RECIPE [flags]: this SLURM job; SCRIPT may be empty, then the recipe names it.
run_job() {
    show_help "$0" "$@"
    catch_signals
    [ -n "${SLURM_JOB_ID:-}" ] || die "this is not a SLURM job; scripts/launch.sh runs a recipe without SLURM"
    export SCRIPT_WANTED=$1
    shift
    JOB_RECORD=$(scontrol show job "$(this_job)")
    SUBMIT_LINE=$(submit_line)
    export JOB_RECORD SUBMIT_LINE
    MASTER_ADDR=${MASTER_ADDR:-$(master_address)}
    MASTER_PORT=${MASTER_PORT:-$(master_port)}
    export MASTER_ADDR MASTER_PORT
    open_run "$@"
    [ -e "$run/snapshot/job.txt" ] || printf '%s\n' "$JOB_RECORD" >"$run/snapshot/job.txt"
    unset JOB_RECORD SUBMIT_LINE
    say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart ${SLURM_RESTART_COUNT:-0}, meeting at $MASTER_ADDR:$MASTER_PORT"
    attempt
    local state
    state=$(job_state)
    case $state in
        RUNNING* | *TIMEOUT* | *TimeLimit*) ;;
        *) say "not requeued by itself: the job is in state $state"; exit 1 ;;
    esac
    say "requeueing job $(this_job)"
    scontrol requeue "$(this_job)" || { say "scontrol requeue was refused; go on by hand with $(printf %q "$run/rerun.sh")"; exit 1; }
    exit 0
}

# run_here RECIPE [flags]: this machine, started again here until it is done or the guard stops it.
run_here() {
    catch_signals
    unset JOB_RECORD SUBMIT_LINE
    open_run "$@"
    while :; do
        attempt
        if [ -n "$save_requested" ]; then
            [ "$step_status" -eq "$SAVED_ON_REQUEST" ] && exit "$SAVED_ON_REQUEST"
            exit 1
        fi
        [ "${RESTART:-1}" != 0 ] || exit 1
        sleep 2
    done
}
