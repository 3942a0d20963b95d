#!/usr/bin/env bash
# Real hosts on one machine: network namespaces joined by a bridge, each link shaped to a rate, one rank a host.
#
#   netlab.sh up HOSTS RATE                  make the hosts; RATE is 1gbit, 50mbit, ... or unshaped
#   netlab.sh run [--] COMMAND...            one rank of COMMAND on every host, through mpirun; then nothing runs there
#   netlab.sh enter HOST COMMAND...          COMMAND on one host (host0, host1, ...), outside any job
#   netlab.sh counters                       bytes each host has sent and received so far, as JSON
#   netlab.sh down                           remove the hosts, whatever runs on them and every file of theirs
#   netlab.sh with HOSTS RATE -- COMMAND...  up, run, down: nothing is left, however COMMAND ends
#   netlab.sh list                           the labs that are up, by name
#
# Options, before the verb or right after it:
#   --limit SECONDS   what run and with may take, 300 by default; then the job is ended, exit status 124
#   --name NAME       of the lab, lower-case letters and digits; for several at once. "lab" by default, for with a
#                     name of its own
#
# Exit status: the command's; 124 when the limit was reached; 2 when this machine or the arguments do not allow it.
# It needs root, ip and tc (Debian: iproute2) and, to run, Open MPI. Nothing is added to the machine's own network:
# every interface lives in a namespace, and no packet leaves them.
#
# A rank finds its host's name in the hostname, resolvable from every host; the interface is lab0. MASTER_ADDR,
# MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK are set for torch.distributed's env://. Open MPI's parameters can be
# set through its own environment variables (OMPI_MCA_...), waiting ranks give way unless
# OMPI_MCA_mpi_yield_when_idle=0 is set.
set -euo pipefail

SUBNET=10.77.0
INTERFACE=lab0
MOST_HOSTS=64

# Ethernet sends 24 bytes with each frame that no counter sees (preamble, check sum, gap): 1538 for a payload of 1448.
FRAME=1514
FRAME_ON_WIRE=1538
SEGMENT=1448
# A longer burst costs less processor time, and hides more of the link: 64 KB at 50 Mbit/s would be 10 ms for nothing.
BURST_SECONDS=0.0002
MOST_FRAMES=45 # what the kernel sends at once, 64 KB
QUEUE=50ms     # what a port holds before it drops
PORT_BURSTS=4  # A switch port makes up for its timer being late; what reaches it was held to the rate by the sender.

say() { printf 'netlab: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }
usage() { refuse "usage: netlab.sh [--name NAME] [--limit SECONDS] up HOSTS RATE | run COMMAND | enter HOST COMMAND |" \
    "counters | down | with HOSTS RATE -- COMMAND | list"; }

namespace() { echo "$PREFIX$1"; }
address() { echo "$SUBNET.$(($1 + 1))"; }
SWITCH_ADDRESS="$SUBNET.254"
number_of_hosts() { cat "$STATE/hosts"; }

set_name() {
    [[ "$1" =~ ^[a-z0-9]{1,16}$ ]] || refuse "--name $1: use 1 to 16 lower-case letters and digits"
    NAME="$1"
    PREFIX="hvd-netlab-$NAME-"
    STATE="/run/hvd-netlab-$NAME"
}

require_tools() {
    local tool
    [ "$(id -u)" = 0 ] || refuse "network namespaces need root; run this as root"
    for tool in ip tc unshare hostname flock; do
        command -v "$tool" >/dev/null ||
            refuse "needs $tool, which is not here (Debian: iproute2, util-linux, hostname)"
    done
}

require_up() { [ -f "$STATE/hosts" ] || refuse "lab \"$NAME\" is not up; run: netlab.sh up HOSTS RATE"; }

# The command on one host: its network, its /etc/hosts (ip netns exec mounts that), its hostname.
on_host() {
    local host="$1"
    shift
    # shellcheck disable=SC2016
    ip netns exec "$(namespace "$host")" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
}

# up ------------------------------------------------------------------------------------------------------------------

make_namespace() {
    local name
    name="$(namespace "$1")"
    ip netns add "$name"
    # Without IPv6 an idle host sends nothing at all.
    # shellcheck disable=SC2016
    ip netns exec "$name" sh -c '[ ! -e "$1" ] || echo 1 >"$1"' sh /proc/sys/net/ipv6/conf/all/disable_ipv6
    ip -n "$name" link set lo up
    mkdir -p "/etc/netns/$name"
    cp "$STATE/names" "/etc/netns/$name/hosts"
}

# One direction of a link: what the namespace sends through the device, with so many bursts saved up at most.
shape() {
    local name="$1" device="$2" bits="$3" bursts="$4" frames burst
    frames="$(awk -v bits="$bits" -v seconds="$BURST_SECONDS" -v frame="$FRAME" -v most="$MOST_FRAMES" \
        'BEGIN { n = int(bits * seconds / 8 / frame); print (n < 2 ? 2 : (n > most ? most : n)) }')"
    # The kernel must not send more at once than the burst, or tbf cuts it up, one frame at a time.
    [ "$frames" = "$MOST_FRAMES" ] || ip -n "$name" link set dev "$device" gso_max_size $((frames * SEGMENT + 400))
    # One frame to spare, and the microsecond that tc rounds down.
    burst=$(((bursts * frames + 1) * FRAME + bits / 8000000))
    tc -n "$name" qdisc add dev "$device" root tbf latency "$QUEUE" burst "$burst" \
        rate "$(awk -v bits="$bits" -v a="$FRAME" -v b="$FRAME_ON_WIRE" 'BEGIN { printf "%.0fbit", bits * a / b }')"
}

make_lab() {
    local hosts="$1" bits="$2" switch number host
    switch="$(namespace switch)"
    {
        echo "127.0.0.1 localhost"
        echo "$SWITCH_ADDRESS switch"
        for ((number = 0; number < hosts; number++)); do echo "$(address "$number") host$number"; done
    } >"$STATE/names"
    make_namespace switch
    ip -n "$switch" link add bridge0 type bridge stp_state 0 mcast_snooping 0
    ip -n "$switch" address add "$SWITCH_ADDRESS/24" dev bridge0
    ip -n "$switch" link set bridge0 up
    for ((number = 0; number < hosts; number++)); do
        make_namespace "host$number"
        host="$(namespace "host$number")"
        ip -n "$switch" link add "port$number" type veth peer name "$INTERFACE" netns "$host"
        ip -n "$switch" link set "port$number" master bridge0 up
        ip -n "$host" address add "$(address "$number")/24" dev "$INTERFACE"
        ip -n "$host" link set "$INTERFACE" up
        if [ "$bits" != 0 ]; then
            shape "$host" "$INTERFACE" "$bits" 1
            shape "$switch" "port$number" "$bits" "$PORT_BURSTS"
        fi
    done
    # mpirun's way into a host, in the place of ssh.
    # shellcheck disable=SC2016
    printf '#!/bin/sh\nhost="$1"; shift; exec ip netns exec "%s$host" %s "$host" "$*"\n' "$PREFIX" \
        "unshare --uts sh -c 'hostname \"\$0\" && exec sh -c \"\$1\"'" >"$STATE/enter"
}

bits_per_second() {
    [ "$1" = unshaped ] && { echo 0; return; }
    [[ "$1" =~ ^([0-9]+(\.[0-9]+)?)(kbit|mbit|gbit)$ ]] || return 1
    awk -v number="${BASH_REMATCH[1]}" -v unit="${BASH_REMATCH[3]}" 'BEGIN {
        bits = number * (unit == "kbit" ? 1e3 : unit == "mbit" ? 1e6 : 1e9)
        if (bits < 64e3 || bits > 1e12) exit 1
        printf "%.0f", bits }'
}

# Called when the shell leaves before the lab is complete: by a signal, or because a command failed.
# shellcheck disable=SC2317,SC2329
give_up() {
    local status=$? reason=""
    trap - EXIT
    [ ! -s "$STATE/error" ] || reason="$(head -n 1 "$STATE/error")"
    remove_lab
    [ "$status" -gt 128 ] && exit "$status"
    refuse "this machine does not let us make the network${reason:+: $reason}"
}

up() {
    local hosts="$1" rate="$2" bits
    [[ "$hosts" =~ ^[1-9][0-9]?$ ]] && [ "$hosts" -le "$MOST_HOSTS" ] ||
        refuse "HOSTS $hosts: give a whole number from 1 to $MOST_HOSTS"
    bits="$(bits_per_second "$rate")" || refuse "RATE $rate: give 1gbit, 50mbit, 64kbit (to 1000gbit) or unshaped"
    require_tools
    mkdir "$STATE" 2>/dev/null ||
        refuse "lab \"$NAME\" is up already, or $STATE cannot be made; netlab.sh down removes it"
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    trap give_up EXIT
    make_lab "$hosts" "$bits" 2>"$STATE/error"
    echo "$rate" >"$STATE/rate"
    echo "$hosts" >"$STATE/hosts"
    trap - EXIT INT TERM HUP
}

# run -----------------------------------------------------------------------------------------------------------------

processes() {
    local name
    for name in $(namespaces); do ip netns pids "$name" 2>/dev/null || true; done
}

# Whatever still runs on the hosts is asked to end, then made to.
end_processes() {
    local signal pid tries
    for signal in TERM KILL; do
        for pid in $(processes); do kill -s "$signal" "$pid" 2>/dev/null || true; done
        for ((tries = 0; tries < 50; tries++)); do
            [ -n "$(processes)" ] || return 0
            sleep 0.1
        done
    done
    say "processes do not end: $(processes | tr '\n' ' ')"
}

run() {
    local limit="$1" hosts number where="" variable child filter status=0 signal=0
    local -a exported=()
    shift
    require_tools
    require_up
    command -v mpirun >/dev/null || refuse "needs Open MPI's mpirun, which is not in PATH"
    exec 9>"$STATE/lock"
    flock --nonblock 9 || refuse "lab \"$NAME\" is running a command already; use another --name"
    hosts="$(number_of_hosts)"
    for ((number = 0; number < hosts; number++)); do where="$where${where:+,}host$number:1"; done

    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    MASTER_ADDR="$(address 0)"
    NETLAB_RATE="$(cat "$STATE/rate")"
    export NETLAB_RATE MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
    export HOROVOD_GLOO_IFACE="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="$INTERFACE"
    for variable in $(compgen -e); do
        case "$variable" in
            PATH | PYTHONPATH | LD_LIBRARY_PATH | VIRTUAL_ENV | *_NUM_THREADS) exported+=(-x "$variable") ;;
            HOROVOD_* | MASTER_* | NETLAB_* | *_SOCKET_IFNAME) exported+=(-x "$variable") ;;
        esac
    done

    # Open MPI warns when an agent was quicker than its parent, which is no harm.
    exec 8> >(trap '' INT TERM HUP; exec grep --line-buffered -v 'plm:rsh: Warning: setpgid' >&2 9>&-)
    filter=$!
    # mpirun sits at the switch, so no host carries another's output. Every byte between hosts goes by TCP.
    # shellcheck disable=SC2016
    timeout --kill-after=10 "$limit" ip netns exec "$(namespace switch)" unshare --uts \
        sh -c 'hostname switch && exec "$@"' sh mpirun \
        --mca plm_rsh_agent "sh $STATE/enter" --mca plm_rsh_no_tree_spawn 1 --mca orte_tmpdir_base "$STATE" \
        --mca oob_tcp_if_include "$SUBNET.0/24" --mca btl_tcp_if_include "$SUBNET.0/24" \
        --mca pml ob1 --mca btl self,tcp --mca mpi_yield_when_idle "${OMPI_MCA_mpi_yield_when_idle:-1}" \
        --bind-to none --host "$where" -np "$hosts" "${exported[@]}" \
        sh -c 'export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"
            export LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK" LOCAL_WORLD_SIZE="$OMPI_COMM_WORLD_LOCAL_SIZE"
            exec "$@"' sh "$@" 2>&8 8>&- 9>&- &
    child=$!
    trap 'signal=130; kill -TERM "$child" 2>/dev/null || true' INT
    trap 'signal=143; kill -TERM "$child" 2>/dev/null || true' TERM HUP
    while true; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break
    done
    trap - INT TERM HUP
    end_processes
    rm -rf "$STATE"/ompi.*
    exec 8>&- 9>&-
    wait "$filter" || true
    [ "$signal" = 0 ] || return "$signal"
    [ "$status" != 124 ] || say "not finished after $limit seconds: $*"
    return "$status"
}

# counters, down, list ------------------------------------------------------------------------------------------------

counters() {
    local hosts number separator="["
    local -a bytes
    require_tools
    require_up
    hosts="$(number_of_hosts)"
    for ((number = 0; number < hosts; number++)); do
        mapfile -t bytes < <(on_host "host$number" cat "/sys/class/net/$INTERFACE/statistics/"{tx,rx}_bytes)
        printf '%s{"host": "host%d", "address": "%s", "sent_bytes": %d, "received_bytes": %d}' \
            "$separator" "$number" "$(address "$number")" "${bytes[@]}"
        separator=$',\n '
    done
    echo "]"
}

namespaces() { ip netns list | awk -v prefix="$PREFIX" 'index($1, prefix) == 1 { print $1 }'; }

remove_lab() {
    local name
    end_processes
    for name in $(namespaces); do
        ip netns delete "$name" || true
    done
    rm -rf "/etc/netns/$PREFIX"* "$STATE"
    rmdir --ignore-fail-on-non-empty /etc/netns 2>/dev/null || true
}

down() {
    require_tools
    trap '' INT TERM HUP
    remove_lab
}

list() {
    local state
    for state in /run/hvd-netlab-*; do
        [ ! -d "$state" ] || echo "${state#/run/hvd-netlab-}"
    done
}

# -------------------------------------------------------------------------------------------------------------------

main() {
    LIMIT=300
    GIVEN_NAME=""
    VERB=""
    set_name lab
    while true; do
        case "${1:-}" in
            --name)
                [ $# -ge 2 ] || usage
                GIVEN_NAME="$2"
                set_name "$2"
                shift 2 ;;
            --limit)
                [ $# -ge 2 ] || usage
                LIMIT="$2"
                shift 2 ;;
            *)
                [ -z "$VERB" ] || break
                [ $# -ge 1 ] || usage
                VERB="$1"
                shift ;;
        esac
    done
    [[ "$LIMIT" =~ ^[0-9]+(\.[0-9]+)?$ ]] || refuse "--limit $LIMIT: give a number of seconds"

    case "$VERB" in
        up)
            [ $# = 2 ] || usage
            up "$@" ;;
        run)
            [ "${1:-}" != -- ] || shift
            [ $# -ge 1 ] || usage
            run "$LIMIT" "$@" ;;
        enter)
            [ $# -ge 2 ] || usage
            require_tools
            require_up
            on_host "$@" ;;
        counters)
            [ $# = 0 ] || usage
            counters ;;
        down)
            [ $# = 0 ] || usage
            down ;;
        list)
            [ $# = 0 ] || usage
            list ;;
        with)
            [ $# -ge 4 ] && [ "$3" = -- ] || usage
            [ -n "$GIVEN_NAME" ] || set_name "with$$"
            up "$1" "$2"
            trap down EXIT
            trap 'exit 130' INT
            trap 'exit 143' TERM HUP
            shift 3
            run "$LIMIT" "$@" ;;
        *) usage ;;
    esac
}

# Read as a whole before it runs, so that the file may be edited meanwhile.
main "$@"; exit
