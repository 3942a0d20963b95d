#!/usr/bin/env bash
# Bytes a round on netlab hosts, for several configurations and numbers of ranks, as Markdown tables.
#
#   bash scripts/measure_bytes.sh [K...]     2, 3, 4 and 8 ranks by default; needs root
#
# RATE=1gbit shapes the links, which are unshaped by default. Every run's JSON line is added to out/measure_bytes.jsonl.
# The second table is what single collectives send, to tell which of Open MPI's algorithms is at work. These can be
# forced, OMPI_MCA_coll_tuned_use_dynamic_rules=1 OMPI_MCA_coll_tuned_allreduce_algorithm=4 (ring) for one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

RATE="${RATE:-unshaped}"
CONFIGURATIONS=(
    "--exchange allgather --explorer random"
    "--exchange allgather --explorer cyclic"
    "--exchange alltoall --explorer random"
    "--exchange alltoall --explorer cyclic"
    "--exchange alltoall --explorer greedy"
    "--exchange allreduce --explorer shared"
    "--exchange allreduce --explorer leader"
    "--exchange allreduce --explorer shared --comm-fraction 0.02 --core-fraction 0.01"
    "--exchange allreduce --explorer leader --comm-fraction 0.02 --core-fraction 0.01"
    "--exchange allreduce --explorer shared --value-dtype int8"
)
[ $# -gt 0 ] || set -- 2 3 4 8

choose_python
mkdir -p out
lines="$(mktemp)"
trap 'rm -f "$lines"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

FAILED=0
measure() {
    local ranks="$1"
    shift
    echo "[measure] $ranks ranks: $*" >&2
    bash scripts/netlab.sh --limit 200 with "$ranks" "$RATE" -- "$PYTHON" scripts/measure_bytes.py "$@" >>"$lines" || {
        echo "[measure] this run failed, its row is missing" >&2
        FAILED=1
    }
}

for ranks in "$@"; do
    for configuration in "${CONFIGURATIONS[@]}"; do
        # shellcheck disable=SC2086
        measure "$ranks" train $configuration
    done
done
for ranks in "$@"; do measure "$ranks" collectives; done
cat "$lines" >>out/measure_bytes.jsonl
"$PYTHON" scripts/measure_bytes.py table <"$lines"
exit "$FAILED"
