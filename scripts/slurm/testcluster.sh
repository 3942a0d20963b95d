#!/usr/bin/env bash
# A real SLURM on this machine, for tests: munged, slurmctld and a slurmd for each node, all under one folder.
#
#   testcluster.sh up      start it; prints the variables that sbatch, srun, ... need:
#                          eval "$(bash scripts/slurm/testcluster.sh up)"
#   testcluster.sh down    end every job and daemon, and remove the folder
#
# Options, before or after the verb:
#   --dir FOLDER   where everything of it lives, /tmp/hvd_slim.testcluster by default
#   --nodes N      2 by default; each has a hostname of its own (node1, node2, ...)
#   --cpus N       that each node claims to have, 4 by default, whatever the machine has
#   --port N       the first of N + 2 free ports, 17100 by default
#
# Two partitions share the nodes: "batch", whose jobs are preempted and requeued, and "urgent", whose jobs preempt.
# Exit status 2, and one line, when this machine does not allow it. It needs root and Debian's slurm-wlm and munge.
# Daemons listen on the loopback interface only.
set -euo pipefail

DIR=/tmp/hvd_slim.testcluster NODES=2 CPUS=4 PORT=17100 VERB=""
refuse() { echo "testcluster: $*" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case "$1" in
        --dir | --nodes | --cpus | --port)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            declare "$(tr '[:lower:]' '[:upper:]' <<<"${1#--}")=$2"
            shift 2
            ;;
        up | down) VERB="$1"; shift ;;
        *) refuse "unknown argument: $1; usage: testcluster.sh [--dir DIR] [--nodes N] [--cpus N] [--port N] up|down" ;;
    esac
done
[ -n "$VERB" ] || refuse "say up or down"
for number in "$NODES" "$CPUS" "$PORT"; do
    case "$number" in '' | *[!0-9]* | 0) refuse "$number is not a whole number of at least 1" ;; esac
done
case "$DIR" in /*) ;; *) refuse "--dir $DIR is not an absolute path" ;; esac
[ "${#DIR}" -le 80 ] || refuse "--dir $DIR is too long for a socket's path"

configuration() {
    local host node
    host="$(hostname)"
    cat <<CONF
ClusterName=hvdslim
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
AuthType=auth/munge
AuthInfo=socket=$DIR/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$DIR/state
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdPidFile=$DIR/slurmd.%n.pid
SlurmdLogFile=$DIR/slurmd.%n.log
SlurmdSpoolDir=$DIR/spool.%n
TmpFS=$DIR/tmp.%n
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
MpiDefault=none
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/jobs.txt
JobAcctGatherType=jobacct_gather/none
CONF
    for ((node = 1; node <= NODES; node++)); do
        echo "NodeName=node$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + node)) CPUs=$CPUS RealMemory=1000"
    done
    cat <<CONF
PartitionName=batch Nodes=node[1-$NODES] Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=node[1-$NODES] MaxTime=60 PriorityTier=2 PreemptMode=OFF
CONF
}

# A command with a hostname of its own and names for all nodes: what a node has on a real cluster.
on_node() {
    local node="$1"
    shift
    # shellcheck disable=SC2016
    unshare --uts --mount sh -c 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"' \
        "$node" "$DIR/hosts" "$@"
}

wait_for() {
    local what="$1" tries
    shift
    for ((tries = 0; tries < 100; tries++)); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    cat "$DIR"/*.log >&2 || true
    stop
    refuse "$what did not come up within 20 seconds; the logs are above"
}

all_idle() { [ "$(sinfo --noheader --Node --partition batch --states idle --format %n | wc -l)" = "$NODES" ]; }

start() {
    local tool node
    [ "$(id -u)" = 0 ] || refuse "the daemons need root; run this as root"
    for tool in munged slurmctld slurmd sbatch srun unshare; do
        command -v "$tool" >/dev/null || refuse "needs $tool, which is not here (Debian: slurm-wlm, munge)"
    done
    [ ! -e "$DIR" ] || refuse "$DIR is there already; run: testcluster.sh --dir $DIR down"
    unshare --uts --mount true 2>/dev/null || refuse "this machine does not let root make namespaces"
    mkdir -p "$DIR/state"
    for ((node = 1; node <= NODES; node++)); do mkdir "$DIR/tmp.node$node"; done
    configuration >"$DIR/slurm.conf"
    {
        cat /etc/hosts
        for ((node = 1; node <= NODES; node++)); do echo "127.0.0.1 node$node"; done
    } >"$DIR/hosts"
    (umask 077 && head -c 1024 /dev/urandom >"$DIR/munge.key")
    export SLURM_CONF="$DIR/slurm.conf"
    {
        # --force: munged distrusts folders that others may write to, as those above a temporary one.
        munged --force --socket="$DIR/munge.socket" --key-file="$DIR/munge.key" --pid-file="$DIR/munged.pid" \
            --log-file="$DIR/munged.log" --seed-file="$DIR/munged.seed"
        slurmctld -c
        for ((node = 1; node <= NODES; node++)); do on_node "node$node" slurmd -N "node$node"; done
    } </dev/null >"$DIR/start.log" 2>&1 || {
        cat "$DIR/start.log" >&2
        stop
        refuse "a daemon did not start; see above"
    }
    wait_for "SLURM" all_idle
    echo "export SLURM_CONF=$DIR/slurm.conf"
}

end_daemon() {
    local file="$1" pid tries
    [ -f "$file" ] || return 0
    pid="$(cat "$file")"
    # A number that now belongs to something else must not be ended.
    case "$(cat "/proc/$pid/comm" 2>/dev/null)" in slurm* | munged) ;; *) return 0 ;; esac
    kill "$pid" 2>/dev/null || return 0
    for ((tries = 0; tries < 100; tries++)); do
        kill -0 "$pid" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
}

stop() {
    local file tries
    [ -e "$DIR" ] || return 0
    [ -f "$DIR/slurm.conf" ] || refuse "$DIR is no test cluster's folder"
    export SLURM_CONF="$DIR/slurm.conf"
    if [ -f "$DIR/slurmctld.pid" ]; then
        timeout 10 scancel --user=root --full --signal=KILL 2>/dev/null || true
        timeout 10 scancel --user=root 2>/dev/null || true
        for ((tries = 0; tries < 50; tries++)); do
            [ -n "$(timeout 10 squeue --noheader 2>/dev/null)" ] || break
            sleep 0.2
        done
    fi
    for file in "$DIR"/slurmd.*.pid "$DIR/slurmctld.pid" "$DIR/munged.pid"; do end_daemon "$file"; done
    rm -rf "$DIR"
}

if [ "$VERB" = up ]; then start; else stop; fi
