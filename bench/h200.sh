#!/usr/bin/env bash
# Measure on one H200 (or another CUDA device): correctness first, then row by row, a table, one JSON file a row.
#     bench/h200.sh [NAME ...] [--device cuda|cpu] [--out DIR] [--small] [--limit S] [--commit ID]
# docs/contributing/kernels.md says what it needs and what the rows mean. Nothing is installed, and no setting of the device changed.
set -euo pipefail
cd "$(dirname "$0")/.."

# All processes of the suite share what is compiled; a folder that exists already may hold it from the last run.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$PWD/build/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/build/triton}"
# Several processes compile side by side: each on one thread, without a pool of workers of its own.
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
# FlashAttention's kernels are kept on disk by request alone.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}"
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="${FLASH_ATTENTION_CUTE_DSL_CACHE_DIR:-$PWD/build/flash}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

exec "${PYTHON:-python3}" -m bench device "$@"
