#!/usr/bin/env bash
# Faults of nodes of the one-machine Slurm. Settings: one_machine_env.sh.
#   fail NODE    power loss: node daemon, steps and tasks of NODE die at once; the controller notices after 10-25 s
#   hang NODE    NODE stops answering, its tasks run on
#   unhang NODE  it answers again
#   restore      starts what is missing
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
source "$here/one_machine_env.sh"

daemon_of() { # NAME: pid of its slurmd, a grandchild of the recorded process
  local shell
  running "$1" unshare || die "$1 is not running"
  shell=$(pgrep -P "$(pid_of "$1")")
  pgrep -P "$shell" -x slurmd
}

case "${1:-} ${2:-}" in
  "fail gb200-"*) power_off "$2" || die "$2 is not running" ;;
  "hang gb200-"*) kill -STOP "$(daemon_of "$2")" ;;
  "unhang gb200-"*) kill -CONT "$(daemon_of "$2")" ;;
  "restore ") exec bash "$here/one_machine_up.sh" ;;
  *) die "usage: $(basename "$0") fail|hang|unhang gb200-N, or restore" ;;
esac
