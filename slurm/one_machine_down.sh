#!/usr/bin/env bash
# Stops the one-machine Slurm: its jobs, its nodes with all their processes, its daemons. Only processes that
# one_machine_up.sh recorded are touched. State stays; `--wipe` removes it too. Settings: one_machine_env.sh.
set -euo pipefail
source "$(dirname "$(readlink -f "$0")")/one_machine_env.sh"

cancel_jobs() {
  running slurmctld slurmctld && timeout 5 scontrol ping &>/dev/null || return 0
  timeout 10 squeue -h -o %A | sort -u | timeout 20 xargs -r scancel || note "some jobs could not be cancelled"
  until_true 10 eval '[[ -z $(timeout 5 squeue -h -t running,completing) ]]' || note "jobs still run; their nodes end them"
}

main() {
  local file name
  [[ -d $ROOT/run ]] || exit 0
  cancel_jobs
  for file in "$ROOT"/run/gb200-*.pid; do
    [[ -e $file ]] || continue
    power_off "$(basename "$file" .pid)" || note "$(basename "$file" .pid) was down already"
  done
  for name in slurmctld slurmdbd mariadbd munged; do stop "$name" "$name"; done
  write_hosts </dev/null
  [[ ${1:-} != --wipe ]] || rm -rf "$ROOT"
}

main "$@"
