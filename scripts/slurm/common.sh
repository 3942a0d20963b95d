# Sourced by the batch scripts beside it: options, threads, binding, variables, and what happens at preemption.
#   COMMAND    array: the training command
#   TASKS, TASKS_A_NODE, NODES, CORES, THREADS, GPUS    what the job has; CORES and GPUS on this node
#   BINDING    array: options for the launcher, srun or mpirun
#   launch     runs a launcher with everything below; its exit status becomes the job's
set -uo pipefail

say() { printf '[%s] %s\n' "${SLURM_JOB_ID:-no job}" "$*"; }
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; }

OPTIONS="options, before the command:
  --setup FILE    shell file to source first: modules, a virtual environment
  --threads N     CPU threads of each rank; by default --cpus-per-task of the job
  --no-requeue    end the job when training stops at a signal, rather than queueing it again"

# Arguments ------------------------------------------------------------------------------------------------------------

parse_arguments() {
    THREADS="${SLURM_CPUS_PER_TASK:-1}" SETUP="" REQUEUE=1
    while [ $# -gt 0 ]; do
        case "$1" in
            --setup | --threads) [ $# -ge 2 ] || refuse "$1 needs a value" ;;&
            --setup) SETUP="$2"; shift 2 ;;
            --threads) THREADS="$2"; shift 2 ;;
            --no-requeue) REQUEUE=0; shift ;;
            --help | -h) printf '%s\n\n%s\n' "$USAGE" "$OPTIONS"; exit 0 ;;
            --) shift; break ;;
            -*) refuse "unknown option $1; $USAGE" ;;
            *) break ;;
        esac
    done
    [ $# -gt 0 ] || refuse "no training command; $USAGE"
    case "$THREADS" in '' | *[!0-9]* | 0) refuse "--threads $THREADS is not a whole number of at least 1" ;; esac
    COMMAND=("$@")
    [ -n "${SLURM_JOB_ID:-}" ] || refuse "this is a batch script; $USAGE"
    if [ -n "$SETUP" ]; then
        [ -f "$SETUP" ] || refuse "--setup $SETUP: there is no such file"
        set +u # modules and environments use unset variables
        # shellcheck disable=SC1090
        source "$SETUP" || refuse "--setup $SETUP failed"
        set -u
    fi
}

# What the job has -----------------------------------------------------------------------------------------------------

prepare() {
    NODES="${SLURM_JOB_NUM_NODES:-1}"
    TASKS="${SLURM_NTASKS:-1}"
    TASKS_A_NODE=$(((TASKS + NODES - 1) / NODES))
    CORES="$(nproc)"
    GPUS="${SLURM_GPUS_ON_NODE:-0}"
    case "$GPUS" in *[!0-9]*) GPUS="${GPUS##*:}" ;; esac

    # Threads of each rank. More threads than cores are slower than one.
    export OMP_NUM_THREADS="$THREADS" MKL_NUM_THREADS="$THREADS"
    # srun does not take --cpus-per-task over from sbatch since SLURM 22.05.
    export SRUN_CPUS_PER_TASK="$THREADS"
    # Open MPI's waiting threads spin. Where ranks and their Horovod threads have no core each, they must give way.
    [ $((2 * TASKS_A_NODE)) -le "$CORES" ] || export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"
    # Python's lines appear when they are printed.
    export PYTHONUNBUFFERED=1
    if [ "$GPUS" -gt 0 ]; then
        # NCCL says why it fails.
        export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
        # Its nodes meet over neither loopback nor a container's bridge; better still, name your network.
        export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-^lo,docker}"
        [ "$TASKS_A_NODE" -le "$GPUS" ] ||
            say "warning: $TASKS_A_NODE ranks a node share $GPUS GPUs; use --ntasks-per-node=$GPUS"
    fi
    if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    say "$TASKS ranks on $NODES nodes, $THREADS threads each, start $((${SLURM_RESTART_COUNT:-0} + 1)): ${COMMAND[*]}"
}

# Whether every rank of this node can have cores of its own.
cores_suffice() { [ $((TASKS_A_NODE * THREADS)) -le "$CORES" ]; }

# The ranks of each node as mpirun and horovodrun take them: node1:4,node2:4.
hosts_and_ranks() {
    local counts=() part times host node=0
    # SLURM_TASKS_PER_NODE is "4(x2),3": written out, 4 4 3.
    for part in ${SLURM_TASKS_PER_NODE//,/ }; do
        times=1
        [[ "$part" =~ \(x([0-9]+)\) ]] && times="${BASH_REMATCH[1]}"
        while [ "$times" -gt 0 ]; do
            counts+=("${part%%(*}")
            times=$((times - 1))
        done
    done
    for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        printf '%s%s:%s' "$([ $node = 0 ] || echo ,)" "$host" "${counts[$node]}"
        node=$((node + 1))
    done
}

# Running, and stopping ------------------------------------------------------------------------------------------------

ASKED=0 LAUNCHER=""

# Training is asked to stop by SIGUSR1, which srun and mpirun hand on to their ranks. horovodrun does not: its mpirun is
# asked.
ask_to_stop() {
    local pid
    ASKED=1
    say "asked to stop; training is told"
    [ -n "$LAUNCHER" ] || return 0
    case "$(cat "/proc/$LAUNCHER/comm" 2>/dev/null)" in
        srun | mpirun | orterun) kill -USR1 "$LAUNCHER" ;;
        *) for pid in $(below "$LAUNCHER"); do
            case "$(cat "/proc/$pid/comm" 2>/dev/null)" in mpirun | orterun) kill -USR1 "$pid" ;; esac
        done ;;
    esac
}

below() {
    local pid
    for pid in $(ps -o pid= --ppid "$1"); do
        echo "$pid"
        below "$pid"
    done
}

# launch COMMAND...: runs it and ends the job with its status; or, after status 75, "stopped before its end", queues the
# job again.
launch() {
    local status
    trap ask_to_stop USR1 TERM
    "$@" &
    LAUNCHER=$!
    while true; do
        wait "$LAUNCHER"
        status=$?
        kill -0 "$LAUNCHER" 2>/dev/null || break # else a signal ended the waiting, not the training
    done
    trap - USR1 TERM
    # horovodrun says 1 whatever its ranks said. srun ends the ranks that are still there when the first has ended with
    # 75, and says 143.
    if [ "$ASKED" = 1 ]; then
        case "$(basename "$1") $status" in "horovodrun 0") ;; "horovodrun "* | "srun 143") status=75 ;; esac
    fi
    if [ "$status" = 75 ] && [ "$REQUEUE" = 1 ]; then
        say "training stopped before its end; the job is queued again"
        scontrol requeue "$SLURM_JOB_ID" && sleep 60 # SLURM ends this script here
        say "it could not be queued again"
    fi
    say "ended with status $status"
    exit "$status"
}
