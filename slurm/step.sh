#!/usr/bin/env bash
# One task of a gang's step: turns Slurm's node number into the options of the node parent and becomes it.
#   step.sh RANKS_PER_NODE COMMAND...
set -euo pipefail
ranks=$1
shift
node=$SLURM_PROCID
exec "$@" --node-rank "$node" --ranks "$((node * ranks)):$(((node + 1) * ranks))"
