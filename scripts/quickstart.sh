#!/usr/bin/env bash
# Sets this machine up, trains Fashion-MNIST on two ranks, dense and with Slim-DP, and compares.
#
#   bash scripts/quickstart.sh [--data DIR] [--epochs N] [--out DIR]
#
#   --data DIR    folder with Fashion-MNIST's four .gz files (default: $HVD_SLIM_DATA, else Debian's package)
#   --epochs N    epochs of each run (default 3)
#   --out DIR     where the runs and the picture go (default out)
#
# A few minutes on two cores, after set-up.
set -euo pipefail
CALLED_FROM="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

RANKS=2
LAUNCH_LIMIT=1200 # seconds that one training may take
EPOCHS=3
OUT=out

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' scripts/quickstart.sh; }
fail() { printf '[quickstart] %s\n' "$*" >&2; exit 1; }
from_caller() { case "$1" in /*) printf '%s\n' "$1" ;; *) printf '%s/%s\n' "$CALLED_FROM" "$1" ;; esac; }

while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage; exit 0 ;;
        --data | --epochs | --out) [ $# -ge 2 ] || fail "$1 needs a value" ;;
        *) usage >&2; fail "unknown argument: $1" ;;
    esac
    case "$1" in
        --data) HVD_SLIM_DATA="$(from_caller "$2")" ;;
        --epochs) EPOCHS="$2" ;;
        --out) OUT="$(from_caller "$2")" ;;
    esac
    shift 2
done
case "$EPOCHS" in '' | *[!0-9]* | 0) fail "--epochs $EPOCHS is not a whole number of at least 1" ;; esac
if [ -n "${HVD_SLIM_DATA:-}" ]; then
    [ -d "$HVD_SLIM_DATA" ] || fail "no such folder: $HVD_SLIM_DATA (--data or HVD_SLIM_DATA)"
    export HVD_SLIM_DATA
fi

bash scripts/setup.sh
choose_python
HOROVODRUN="$(dirname "$PYTHON")/horovodrun"
[ -x "$HOROVODRUN" ] || fail "no horovodrun beside $PYTHON; that environment's Horovod is incomplete"

mkdir -p "$OUT"
SCRATCH="$(mktemp -d "$OUT/.quickstart.XXXXXX")"
LAUNCH=""
clean_up() {
    if [ -n "$LAUNCH" ]; then
        kill "$LAUNCH" 2>/dev/null || true
        wait "$LAUNCH" || true
    fi
    rm -rf "$SCRATCH"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

PROGRESS=--no-progress
[ -t 2 ] && PROGRESS=--progress
# One thread a rank: two ranks share few cores. Horovod looks for work every 1 ms (its default).
export OMP_NUM_THREADS=1 HOROVOD_CYCLE_TIME="${HOROVOD_CYCLE_TIME:-1}"

train() {
    printf '\n[quickstart] %s ranks, %s epochs: %s\n' "$RANKS" "$EPOCHS" "$*"
    # Idle ranks give their core away (mpi_yield_when_idle). `timeout` ends a launch that hangs, the launcher's children
    # included; it runs in the background so that Ctrl-C reaches this script, which then ends it.
    timeout --kill-after=30 "$LAUNCH_LIMIT" \
        "$HOROVODRUN" --disable-cache -np "$RANKS" --mpi \
        --mpi-args='--oversubscribe --mca mpi_yield_when_idle 1' \
        "$PYTHON" examples/fashion_mnist.py --epochs "$EPOCHS" "$@" \
        --json-out "$SCRATCH/quickstart.jsonl" "$PROGRESS" &
    LAUNCH=$!
    wait "$LAUNCH" || fail "training failed, or took more than $LAUNCH_LIMIT seconds (status $?): $*"
    LAUNCH=""
}

train --method dense
train --method slim --comm-fraction 0.3 --core-fraction 0.15 --reselect-every 20 --exchange allgather

mv "$SCRATCH/quickstart.jsonl" "$OUT/quickstart.jsonl"
printf '\n'
"$PYTHON" examples/report.py "$OUT/quickstart.jsonl" --png "$OUT/quickstart.png"
