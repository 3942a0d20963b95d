#!/usr/bin/env bash
# The planner against measurement, on shaped links and on loopback, 2 and 4 ranks: predicted beside measured times of
# every path and setting, and the path that would be picked beside the fastest.
#
#   bash scripts/check_planner.sh [OPTIONS]    options go to check_planner.py run, --parameters 1000000 for instance
#
# CHECK_PLANNER_NETWORKS ("50mbit 1gbit unshaped loopback") and CHECK_PLANNER_RANKS ("2 4") choose others; the JSON
# lines go to the file that CHECK_PLANNER_JSON names, if it is set. Exit status 1 if a time predicted for a shaped link
# is not within 25 % of the measured one, or a pick is more than 15 % slower than the fastest path. Takes half an hour
# on two cores, on which nothing else should run. Needs root for the network namespaces (scripts/netlab.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
choose_python

LINES="${CHECK_PLANNER_JSON:-$(mktemp)}"
[ -n "${CHECK_PLANNER_JSON:-}" ] || trap 'rm -f "$LINES"' EXIT
: >"$LINES"
if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
export OMP_NUM_THREADS=1

for ranks in ${CHECK_PLANNER_RANKS:-2 4}; do
    for network in ${CHECK_PLANNER_NETWORKS:-50mbit 1gbit unshaped loopback}; do
        echo "[check_planner] $ranks ranks, $network" >&2
        command=("$PYTHON" scripts/check_planner.py run --network "$network" "$@")
        if [ "$network" = loopback ]; then
            timeout 1800 mpirun --oversubscribe --mca mpi_yield_when_idle 1 -np "$ranks" "${command[@]}" >>"$LINES"
        else
            bash scripts/netlab.sh --limit 1800 with "$ranks" "$network" -- "${command[@]}" >>"$LINES"
        fi
    done
done
"$PYTHON" scripts/check_planner.py table <"$LINES"
