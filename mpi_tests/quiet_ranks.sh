#!/bin/sh
# Runs a command on one rank of a job. Rank 0 prints as usual; what the others print goes to files in $QUIET_RANKS.
#   mpirun -np 3 mpi_tests/quiet_ranks.sh python -m pytest mpi_tests/ranks
rank="${OMPI_COMM_WORLD_RANK:-${HOROVOD_RANK:-0}}"
[ "$rank" = 0 ] && exec "$@"
exec "$@" >"$QUIET_RANKS/rank.$rank"
