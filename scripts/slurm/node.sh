#!/usr/bin/env bash
# One node's part of a run: cache folders and network variables, then torchrun through run_control's node agent.
#
# Started by lib.sh, once per node, inside the container where there is one. Reads MEGATRON_RUN_FOLDER, PYTHON.
#   CACHE_DIR           node-local folder for compiled kernels (default: the job's own temporary folder)
#   NETWORK_INTERFACE   interface for NCCL's and gloo's sockets, where the first one found is the wrong one (ib0, bond0)
#
# What always holds: a variable that is set already is kept; a request to save is never lost while Python starts.
set -euo pipefail
trap '' USR2 # the agent takes over: it blocks the signal, so that it waits for the trainers
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Kernels are compiled into the home directory by default: on a shared file system the ranks of all nodes meet there.
cache=${CACHE_DIR:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/megatron-cache-$(id -u)}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$cache/torch-extensions}
if [ -n "${NETWORK_INTERFACE:-}" ]; then
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$NETWORK_INTERFACE} GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$NETWORK_INTERFACE}
fi
# A failed collective ends its process instead of waiting for ever, and leaves the last ones in a trace.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
export TORCH_NCCL_TRACE_BUFFER_SIZE=${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

settings=$("$PYTHON" -m megatron.run_control settings "$MEGATRON_RUN_FOLDER") # the recipe's environment
eval "$settings"
exec "$PYTHON" -m megatron.run_control.node_agent
