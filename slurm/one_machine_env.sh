# Settings and helpers of the one-machine Slurm; sourced by one_machine_{up,down,node}.sh.
#
#   ONE_MACHINE_ROOT        configuration, state, logs, pids, munge key, database  (/tmp/one-machine-slurm)
#   ONE_MACHINE_NODES       nodes gb200-0, gb200-1, ...                            (4)
#   ONE_MACHINE_GPUS        GPUs of each, of which only the device files exist     (4)
#   ONE_MACHINE_ACCOUNTING  1: MariaDB and slurmdbd, so that sacct works; 0: none  (1)
#   ONE_MACHINE_INSTALL     1: install missing Debian packages                     (1)
#   ONE_MACHINE_PORT        first of a block of 64 TCP ports                       (16800)
ROOT=${ONE_MACHINE_ROOT:-${TMPDIR:-/tmp}/one-machine-slurm}
NODES=${ONE_MACHINE_NODES:-4}
GPUS=${ONE_MACHINE_GPUS:-4}
ACCOUNTING=${ONE_MACHINE_ACCOUNTING:-1}
INSTALL=${ONE_MACHINE_INSTALL:-1}
PORT=${ONE_MACHINE_PORT:-16800}
CONTROLLER_PORT=$PORT DATABASE_PORT=$((PORT + 1)) ACCOUNTING_PORT=$((PORT + 2)) NODE_PORT=$((PORT + 3))
MUNGE_SOCKET=$ROOT/munge/socket
NODE_LIST="gb200-[0-$((NODES - 1))]"
HOSTS_BEGIN="# one-machine-slurm: begin" HOSTS_END="# one-machine-slurm: end"
export SLURM_CONF=$ROOT/etc/slurm.conf

note() { echo "one-machine-slurm: $*" >&2; }

die() {
  note "$@"
  exit 1
}

pid_of() { cat "$ROOT/run/$1.pid" 2>/dev/null || true; }

# Is the recorded process of NAME there, does it still run PROGRAM, and is it not a zombie? Process 1 of a
# container may never reap, and a pid may come back as somebody else's.
running() { # NAME PROGRAM
  local pid status
  pid=$(pid_of "$1")
  [[ -n $pid ]] && status=$(cat "/proc/$pid/status" 2>/dev/null) || return 1
  [[ $status =~ Name:[[:space:]]$2[[:space:]] && ! $status =~ State:[[:space:]]Z ]]
}

until_true() { # SECONDS COMMAND...
  local deadline=$((SECONDS + $1))
  shift
  until "$@" &>/dev/null; do
    ((SECONDS < deadline)) || return 1
    sleep 0.1
  done
}

# Starts a daemon that outlives this shell, in a session of its own, and records its pid. It inherits no
# descriptor, else whoever reads the output of this script through a pipe waits for the daemon's end.
start() { # NAME COMMAND...
  local name=$1
  shift
  (
    exec </dev/null >>"$ROOT/log/$name.out" 2>&1
    for descriptor in /proc/"$BASHPID"/fd/*; do
      descriptor=${descriptor##*/}
      ((descriptor <= 2)) || eval "exec $descriptor>&-"
    done
    exec setsid "$@"
  ) &
  echo $! >"$ROOT/run/$name.pid"
}

# Ends the recorded process of NAME if it still runs PROGRAM: SIGTERM, and SIGKILL after ten seconds.
stop() { # NAME PROGRAM
  if running "$1" "$2"; then
    kill -TERM "$(pid_of "$1")"
    if ! until_true 10 eval "! running $1 $2"; then
      kill -KILL "$(pid_of "$1")"
      until_true 5 eval "! running $1 $2" || note "$1 (pid $(pid_of "$1")) cannot be ended"
    fi
  fi
  rm -f "$ROOT/run/$1.pid"
}

# unshare shields itself from SIGTERM; with it end all processes of its namespace.
power_off() { # NODE; false when it was not running
  running "$1" unshare || return 1
  kill -KILL "$(pid_of "$1")"
  rm -f "$ROOT/run/$1.pid"
}

# /etc/hosts may be a bind mount, which can be written but not replaced.
write_hosts() { # lines of the block on standard input; none: remove it
  local block others
  block=$(cat)
  others=$(sed "/^$HOSTS_BEGIN/,/^$HOSTS_END/d" /etc/hosts)
  [[ -z $block ]] || block=$(printf '\n%s\n%s\n%s' "$HOSTS_BEGIN" "$block" "$HOSTS_END")
  [[ $others$block == "$(cat /etc/hosts)" ]] || printf '%s%s\n' "$others" "$block" >/etc/hosts
}
