#!/usr/bin/env bash
# A Slurm that really starts, on one Linux machine, as root: N nodes, each with a network namespace,
# a host name and an address of its own, and eight devices that pass for GPUs.
#
#   slurm_world.sh up FOLDER N     start it; then `export SLURM_CONF=FOLDER/slurm.conf`
#   slurm_world.sh down FOLDER     end it: only what `up` started
#   slurm_world.sh install         Debian's packages, where they are absent
#
# Nodes are called node0 .. ; what is mounted there is theirs alone:
#   slurm_world.sh in FOLDER node1 COMMAND...   runs COMMAND where jobs of node1 run
set -euo pipefail

say() { printf 'slurm_world: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

packages=(slurmctld slurmd slurm-client munge iproute2)
bridge=moeslurm net=10.78.0

install_packages() {
  command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null &&
    command -v ip >/dev/null && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || die "needs root and Debian's ${packages[*]}"
  say "apt-get install ${packages[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

space() { echo "moeslurm-$1"; }

up() {
  local dir=$1 nodes=$2 i host=${HOSTNAME%%.*}
  [ "$(id -u)" = 0 ] || die "needs root (namespaces)"
  install_packages
  mkdir -p "$dir"/{state,log}
  dir=$(cd "$dir" && pwd)
  ip link add $bridge type bridge 2>/dev/null || die "another one is up: the bridge $bridge exists"
  touch "$dir/ours"  # from here on there is something to take down
  ip addr add $net.254/24 dev $bridge
  ip link set $bridge up
  { echo "127.0.0.1 localhost"; echo "$net.254 controller"
    for ((i = 0; i < nodes; i++)); do echo "$net.$((10 + i)) node$i"; done; } >"$dir/hosts"
  for ((i = 0; i < nodes; i++)); do
    local ns; ns=$(space "node$i")
    ip netns add "$ns"
    ip link add "moes$i" type veth peer name eth0 netns "$ns"
    ip link set "moes$i" master $bridge up
    ip -n "$ns" link set lo up
    ip -n "$ns" addr add $net.$((10 + i))/24 dev eth0
    ip -n "$ns" link set eth0 up
  done

  # munge wants its folder, which an init system would make.
  if ! munge -n >/dev/null 2>&1; then
    install -d -o munge -g munge -m 755 /run/munge
    runuser -u munge -- "$(command -v munged)" --pid-file="/run/munge/munged.pid"
    touch "$dir/munge.ours"
  fi

  # Slurm wants devices for GPUs, not plain files; these are what /dev/null is.
  for i in 0 1 2 3 4 5 6 7; do [ -e "$dir/gpu$i" ] || mknod "$dir/gpu$i" c 1 3; done
  echo "Name=gpu File=$dir/gpu[0-7]" >"$dir/gres.conf"
  cat >"$dir/slurm.conf" <<CONF
ClusterName=moeserve
SlurmctldHost=$host($net.254)
SlurmctldPort=16917
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=15
KillWait=5
MpiDefault=none
SlurmdParameters=config_overrides
GresTypes=gpu
CONF
  for ((i = 0; i < nodes; i++)); do
    echo "NodeName=node$i NodeAddr=$net.$((10 + i)) Port=16918 CPUs=16 RealMemory=4000 Gres=gpu:8"
  done >>"$dir/slurm.conf"
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP" >>"$dir/slurm.conf"

  export SLURM_CONF=$dir/slurm.conf
  slurmctld
  for ((i = 0; i < nodes; i++)); do
    mkdir -p "$dir/spool.node$i"
    # Not `ip netns exec`: that mounts /sys anew, where slurmd looks for cgroups.
    nsenter --net="/run/netns/$(space "node$i")" unshare --uts --mount bash -c \
      "hostname node$i && mount --bind '$dir/hosts' /etc/hosts && exec slurmd -N node$i"
  done
  for ((i = 0; i < 120; i++)); do
    [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$nodes" ] && return
    sleep 0.25
  done
  sinfo -N >&2 || true
  die "the nodes did not become idle; see $dir/log"
}

in_node() {
  local dir=$1 node=$2
  shift 2
  nsenter --target "$(cat "$dir/slurmd.$node.pid")" --net --uts --mount -- "$@"
}

down() {
  local dir=$1 file name i pids=()
  [ -e "$dir/ours" ] || die "$dir: nothing was started from here"
  export SLURM_CONF=$dir/slurm.conf
  scancel --full --signal=KILL --user=root 2>/dev/null || true
  for file in "$dir"/slurmd.*.pid "$dir"/slurmctld.pid; do
    [ -e "$file" ] && pids+=("$(cat "$file")")
  done
  if [ -e "$dir/munge.ours" ]; then pids+=("$(cat /run/munge/munged.pid)"); fi
  for i in "${pids[@]}"; do kill "$i" 2>/dev/null || true; done
  for ((i = 0; i < 40; i++)); do  # a namespace lives as long as its last process
    kill -0 "${pids[@]}" 2>/dev/null || break
    sleep 0.25
  done
  for name in $(ip -o link show | grep -oE 'moes[0-9]+'); do ip link del "$name" 2>/dev/null || true; done
  for name in $(ip netns list | awk '/^moeslurm-/ {print $1}'); do ip netns del "$name"; done
  ip link del $bridge 2>/dev/null || true
}

case ${1:-} in
  install) install_packages ;;
  up) up "$2" "$3" ;;
  in) shift; in_node "$@" ;;
  down) down "$2" ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
