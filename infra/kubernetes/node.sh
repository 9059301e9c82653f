#!/bin/bash
# Starts every pod of a flow run's job: `node.sh --nodes=2 COMMAND …`. The first pod runs the command, the flow. The
# others join each training stage that the first one launches over several machines; they end with the first one.
# The first pod writes what it launches into a folder of the shared volume; `JOB-0.rlhf-nodes` is its address.
set -euo pipefail

export RLHF_MACHINES=${1#--nodes=} # the stages compare it with launch.num_machines
shift
export MACHINE_RANK=${JOB_COMPLETION_INDEX:-0}
job=${HOSTNAME%-"$MACHINE_RANK"} # Kubernetes gives each pod of an indexed job the name JOB-INDEX
export MASTER_ADDR="$job-0.rlhf-nodes" MASTER_PORT="${MASTER_PORT:-29500}"
export RLHF_STATE_DIR="${RLHF_STATE_DIR:-$PWD/.rlhf/state}" RLHF_LAUNCHES="$PWD/.rlhf/launches/$job"
export HF_HOME="${HF_HOME:-$PWD/.rlhf/huggingface}" # kept: weights of hub models are not in DVC
mkdir -p "$RLHF_LAUNCHES"
stopping=
trap 'stopping=1; [ -z "${child:-}" ] || kill -TERM "$child" 2>/dev/null' TERM INT

run() { # in the background, so that the trap acts at once; a signal ends `wait` early
  "$@" &
  child=$!
  until wait "$child"; do
    status=$?
    kill -0 "$child" 2>/dev/null || return "$status"
  done
}

if [ "$MACHINE_RANK" = 0 ]; then
  trap 'touch "$RLHF_LAUNCHES/end"' EXIT
  run "$@"
  exit
fi

join() { # one launch: its stage, its folder and its PYTHONPATH, a line each
  mapfile -t launch <"$1"
  cd "${launch[1]}"
  PYTHONPATH=${launch[2]:-} exec rlhf "${launch[0]}"
}

number=1
until [ -n "$stopping" ] || [ -e "$RLHF_LAUNCHES/end" ]; do
  if [ -e "$RLHF_LAUNCHES/$number" ]; then
    run join "$RLHF_LAUNCHES/$number" || echo "launch $number ended with $?; the first pod decides what follows"
    number=$((number + 1))
  else
    sleep 1
  fi
done
