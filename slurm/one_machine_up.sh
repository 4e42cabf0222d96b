#!/usr/bin/env bash
# A real Slurm on this machine that looks like GB200 nodes with 4 GPUs each. Starts only what is not running;
# prints `export SLURM_CONF=...` for `eval`. Needs root. Settings: one_machine_env.sh.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/one_machine_env.sh"

install_packages() {
  local missing=() program policy=/usr/sbin/policy-rc.d
  declare -A package=([slurmctld]=slurmctld [slurmd]=slurmd [srun]=slurm-client [munged]=munge)
  [[ $ACCOUNTING == 0 ]] || package+=([slurmdbd]=slurmdbd [mariadbd]=mariadb-server)
  for program in "${!package[@]}"; do
    command -v "$program" >/dev/null || missing+=("${package[$program]}")
  done
  ((${#missing[@]})) || return 0
  [[ $INSTALL == 1 ]] || die "not installed: ${missing[*]}. Install them, or allow it with ONE_MACHINE_INSTALL=1."
  note "installing ${missing[*]}"
  # The packages would start daemons of their own; this file is Debian's way to forbid it.
  if [[ ! -e $policy ]]; then
    trap "rm -f $policy" EXIT
    install -m 755 <(printf '#!/bin/sh\nexit 101\n') $policy
  fi
  {
    apt-get update -qq || note "apt-get update failed; trying with the lists that are here"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
  } &>"$ROOT/log/apt.log" || die "apt-get failed, see $ROOT/log/apt.log"
}

slurm_settings() {
  cat <<SETTINGS
ClusterName=one_machine
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$CONTROLLER_PORT
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/run/own-slurmctld.pid
SlurmdPidFile=$ROOT/run/own-slurmd-%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd-%n.log
PlugStackConfig=$ROOT/etc/plugstack.conf
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired, by default two minutes.
AuthInfo=socket=$MUNGE_SOCKET,cred_expire=5
# Without cgroups and CPU binding: the nodes claim more cores than the machine has.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MinJobAge=86400
MaxArraySize=1001
# Fast reactions instead of a production cluster's patience.
KillWait=5
CompleteWait=0
SlurmctldTimeout=10
SlurmdTimeout=10
# A machine of two cores on which fifty jobs start keeps a caller waiting for longer than the default of 10 s.
MessageTimeout=60
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2,bf_continue
SETTINGS
  accounting_settings
  for ((i = 0; i < NODES; i++)); do
    # A GB200 compute tray: two Grace CPUs of 72 cores, four GPUs.
    echo "NodeName=gb200-$i NodeHostname=gb200-$i NodeAddr=127.0.1.$((10 + i)) Port=$((NODE_PORT + i))" \
      "Sockets=2 CoresPerSocket=72 RealMemory=900000 Gres=gpu:gb200:$GPUS Feature=gb200,nvl72"
  done
  echo "PartitionName=gb200 Nodes=$NODE_LIST Default=YES DefaultTime=30:00 MaxTime=1-00:00:00 PreemptMode=OFF"
  echo "PartitionName=debug Nodes=$NODE_LIST MaxTime=30:00 PriorityTier=10 PreemptMode=OFF"
  echo "PartitionName=preemptible Nodes=$NODE_LIST MaxTime=30:00 PriorityTier=1"
}

accounting_settings() {
  if [[ $ACCOUNTING == 0 ]]; then
    printf '%s\n' AccountingStorageType=accounting_storage/none \
      JobCompType=jobcomp/filetxt "JobCompLoc=$ROOT/log/jobcomp.txt"
    return
  fi
  # With munge the "password" is the socket; clients would look for a system-wide one.
  printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd AccountingStorageHost=127.0.0.1 \
    "AccountingStoragePort=$ACCOUNTING_PORT" "AccountingStoragePass=$MUNGE_SOCKET" \
    AccountingStoreFlags=job_comment,job_env,job_script AccountingStorageTRES=gres/gpu,gres/gpu:gb200
}

slurmdbd_settings() {
  printf '%s\n' AuthType=auth/munge "AuthInfo=socket=$MUNGE_SOCKET,cred_expire=5" SlurmUser=root \
    "DbdHost=$(hostname)" DbdAddr=127.0.0.1 "DbdPort=$ACCOUNTING_PORT" \
    "LogFile=$ROOT/log/slurmdbd.log" "PidFile=$ROOT/run/own-slurmdbd.pid" \
    StorageType=accounting_storage/mysql StorageHost=127.0.0.1 "StoragePort=$DATABASE_PORT" \
    StorageUser=slurm StoragePass=slurm StorageLoc=slurm_acct_db
}

write_files() {
  local i old
  # Slurm wants device files for GPUs, else CUDA_VISIBLE_DEVICES stays empty; null devices (1, 3) will do.
  for ((i = 0; i < GPUS; i++)); do
    [[ -c $ROOT/dev/gpu$i ]] || mknod -m 666 "$ROOT/dev/gpu$i" c 1 3
  done
  for ((i = 0; i < NODES; i++)); do echo "127.0.1.$((10 + i)) gb200-$i"; done | write_hosts
  old=$(cat "$SLURM_CONF" 2>/dev/null || true)
  slurm_settings >"$SLURM_CONF"
  [[ $old == "$(cat "$SLURM_CONF")" ]] || CHANGED=1
  echo "Name=gpu Type=gb200 File=$ROOT/dev/gpu[0-$((GPUS - 1))]" >"$ROOT/etc/gres.conf"
  : >"$ROOT/etc/plugstack.conf"
  (umask 077 && slurmdbd_settings >"$ROOT/etc/slurmdbd.conf")
  [[ -s $ROOT/munge/key ]] || (umask 077 && head -c 1024 /dev/urandom >"$ROOT/munge/key")
}

start_munge() {
  running munged munged || {
    rm -f "$MUNGE_SOCKET"*
    start munged munged --foreground --force --key-file="$ROOT/munge/key" --socket="$MUNGE_SOCKET" \
      --pid-file="$ROOT/munge/own.pid" --log-file="$ROOT/log/munged.log" --seed-file="$ROOT/munge/seed"
  }
  until_true 10 munge -n -S "$MUNGE_SOCKET" || die "munged does not answer, see $ROOT/log/munged.out"
}

start_database() {
  local socket=$ROOT/run/mariadbd.sock
  running mariadbd mariadbd || {
    [[ -d $ROOT/database/mysql ]] || mariadb-install-db --no-defaults --user=root --datadir="$ROOT/database" \
      --auth-root-authentication-method=socket --skip-test-db &>"$ROOT/log/mariadb-install.log"
    start mariadbd mariadbd --no-defaults --user=root --datadir="$ROOT/database" --socket="$socket" \
      --bind-address=127.0.0.1 --port="$DATABASE_PORT" --pid-file="$ROOT/run/own-mariadbd.pid" \
      --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=2 \
      --performance-schema=OFF --max-connections=32
  }
  until_true 30 mariadb-admin --no-defaults -S "$socket" ping || die "mariadbd does not answer, see $ROOT/log"
  mariadb --no-defaults -S "$socket" <<'SQL'
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';
SQL
}

start_accounting() {
  start_database
  running slurmdbd slurmdbd || start slurmdbd slurmdbd -D # its settings lie beside slurm.conf
  until_true 30 sacctmgr -n list cluster || die "slurmdbd does not answer, see $ROOT/log/slurmdbd.log"
  [[ -n $(sacctmgr -n list cluster one_machine format=cluster) ]] || sacctmgr -i add cluster one_machine >/dev/null
}

# A node is a namespace: its own host name, its own /dev/shm and /tmp/ray, and its own processes, so that the death
# of the recorded process is a crash of the node with all that ran there. Network, /tmp and users are shared.
start_node() { # NAME
  mkdir -p "$ROOT/spool/$1" "$ROOT/scratch/$1" /tmp/ray
  # shellcheck disable=SC2016  # expanded by the inner shell, which stays as process 1 of the node and reaps
  running "$1" unshare || start "$1" unshare --uts --mount --pid --fork --kill-child=SIGKILL --mount-proc sh -c '
    hostname "$0" && mount -t tmpfs -o size=4g,mode=1777 tmpfs /dev/shm && mount --bind "$1" /tmp/ray || exit 1
    slurmd -D -N "$0" & wait $!' "$1" "$ROOT/scratch/$1"
}

all_usable() { [[ $(sinfo -h -N -p gb200 -o %T | grep -cxE 'idle|mixed|allocated') == "$NODES" ]]; }

await_nodes() {
  local attempt
  for attempt in 1 2 3; do
    until_true 5 all_usable && return
    scontrol update nodename="$NODE_LIST" state=resume &>/dev/null || note "attempt $attempt: cannot resume yet"
  done
  sinfo -N -l >&2
  die "the nodes do not come up, see $ROOT/log"
}

main() {
  local i
  CHANGED=0
  [[ $(id -u) == 0 ]] || die "needs root: node daemons start jobs as their users"
  ((PORT + 3 + NODES < 32768)) || die "ONE_MACHINE_PORT=$PORT leaves no room below the ephemeral ports"
  mkdir -p "$ROOT"/{etc,log,run,state,spool,dev,munge}
  chmod 755 "$ROOT" "$ROOT"/{run,munge}
  install_packages
  write_files
  start_munge
  [[ $ACCOUNTING == 0 ]] || start_accounting
  running slurmctld slurmctld || start slurmctld slurmctld -D
  until_true 15 scontrol ping || die "slurmctld does not answer, see $ROOT/log/slurmctld.log"
  for ((i = 0; i < NODES; i++)); do start_node "gb200-$i"; done
  [[ $CHANGED == 0 ]] || scontrol reconfigure
  await_nodes
  note "up: $(sinfo -h -p gb200 -o '%D nodes %t, %G')"
  echo "export SLURM_CONF=$SLURM_CONF"
}

main
