#!/usr/bin/env bash
# Sets up, then runs every check and test there is; the last line says how many passed and failed.
#
#   bash scripts/test.sh            everything
#   bash scripts/test.sh unit ranks only the stages whose name has one of these words
#
# Every stage runs under a time limit: a hang is a failure, with the stacks of all ranks printed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh || exit 1
source scripts/environment.sh
choose_python

WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
export TMPDIR="$WORK" QUIET_RANKS="$WORK/ranks"

WANTED=("$@")
PASSED=0 FAILED=0 REPORT=""
PYTEST=("$PYTHON" -m pytest -q --color=no -p no:cacheprovider)
RANK_TESTS=(sh mpi_tests/quiet_ranks.sh "${PYTEST[@]}" mpi_tests/ranks)
# Under other launchers and networks: those that look at what travels, without the repetitions over random cases.
NETWORK_TESTS=(sh mpi_tests/quiet_ranks.sh "${PYTEST[@]}" -k "not random" \
    mpi_tests/ranks/test_{agreement,bytes,checkpoint,invariants,limits,oracle,process_sets,transport}.py)

wanted() {
    local word
    [ ${#WANTED[@]} = 0 ] && return 0
    for word in "${WANTED[@]}"; do case "$1" in *"$word"*) return 0 ;; esac; done
    return 1
}

# The number before a word in the last line of a pytest run that rank 0 printed.
count() { grep -E ' in [0-9.]+s' "$WORK/log" | tail -n 1 | grep -oE "[0-9]+ $1" | grep -oE '^[0-9]+' || echo 0; }

# stage NAME SECONDS COMMAND...: runs it under a time limit and counts what passed and failed.
stage() {
    local name="$1" limit="$2" begin=$SECONDS status passed failed file
    shift 2
    wanted "$name" || return 0
    printf '\n==== %s\n' "$name"
    rm -rf "$QUIET_RANKS"
    mkdir "$QUIET_RANKS"
    "$PYTHON" mpi_tests/launcher.py --limit "$limit" -- "$@" 2>&1 | tee "$WORK/log"
    status=${PIPESTATUS[0]}
    if [ "$status" != 0 ]; then
        for file in "$QUIET_RANKS"/*; do
            [ -s "$file" ] && printf '\n---- %s of "%s"\n' "$(basename "$file")" "$name" && cat "$file"
        done
    fi
    passed=$(count passed)
    failed=$(($(count failed) + $(count error)))
    # A check that counts nothing counts as one; a run that came to a bad end has failed, whatever it counted.
    [ "$status" = 0 ] && [ "$passed" = 0 ] && passed=1
    [ "$status" != 0 ] && [ "$failed" = 0 ] && failed=1
    PASSED=$((PASSED + passed)) FAILED=$((FAILED + failed))
    REPORT+="$(printf '%-32s %5d passed %4d failed %5d s' "$name" "$passed" "$failed" $((SECONDS - begin)))"$'\n'
}

# The batch scripts' tests start a SLURM of their own; where there is none they are skipped, and say so.
install_slurm() {
    command -v slurmctld >/dev/null && command -v munged >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; } ||
        echo "slurm-wlm and munge cannot be installed: tests of the batch scripts will be skipped"
}

stage "ruff" 60 "$PYTHON" -m ruff check --no-cache .
stage "mypy" 300 "$PYTHON" -m mypy
# One process a core of the smallest machine that this is for. All other tests have the machine to themselves.
stage "unit tests" 900 "${PYTEST[@]}" --numprocesses 2 --dist worksteal --timeout 200 mpi_tests/unit
for ranks in 1 2 3 4; do
    stage "ranks: mpirun -np $ranks" 900 mpirun --oversubscribe --mca mpi_yield_when_idle 1 -np "$ranks" "${RANK_TESTS[@]}"
done
stage "ranks: horovodrun, MPI" 400 horovodrun --disable-cache -np 2 "${NETWORK_TESTS[@]}"
stage "ranks: horovodrun, Gloo" 400 horovodrun --disable-cache --gloo -np 2 "${NETWORK_TESTS[@]}"
stage "launches" 1200 "${PYTEST[@]}" --ignore mpi_tests/launches/test_slurm.py mpi_tests/launches
wanted "SLURM" && install_slurm
stage "SLURM" 600 "${PYTEST[@]}" -rs mpi_tests/launches/test_slurm.py

printf '\n%s\n%d passed, %d failed\n' "$REPORT" "$PASSED" "$FAILED"
[ "$FAILED" = 0 ]
