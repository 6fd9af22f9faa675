#!/usr/bin/env bash
# What needs two GPUs of one host, inside ten minutes: parity over NCCL, weights from one GPU's process to another's, the
# training step and its scaling, a GRPO run. Writes everything below OUT; evidence records lie in OUT/data/evidence.
#
#   tests/gpu/run_two_gpus.sh [OUT] [--device cuda|cpu] [--ranks 1|2] [--only STAGE ...]
#
# On a CPU (--device cpu) the same stages run in their small form over gloo; with --ranks 1 on one GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:-runs/two_gpus}
[ $# -gt 0 ] && shift
mkdir -p "$OUT"
# NVLink multicast is left off: it cannot be taken for granted where GPUs of a host are shared out.
export NCCL_NVLS_ENABLE=0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export RLCTL_DATA_DIR=$(cd "$OUT" && pwd)/data
exec "${PYTHON:-python}" tests/gpu/two_gpus.py --out "$OUT" "$@"
