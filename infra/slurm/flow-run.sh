#!/bin/bash
# Runs a Prefect flow run as a Slurm job: the command of a process work pool that is made with
# infra/slurm/job-template.json. The arguments are options of sbatch. The job has the environment of the worker,
# so it needs the same disk, and PREFECT_API_URL must lead to the server from the compute nodes.
# A cancelled run ends with its job: the flow gets SIGTERM, as from a local worker, and saves the stage's state.
set -euo pipefail
set -m # sbatch gets a process group of its own, which signals to this script do not reach

grace=25 # seconds until Slurm ends the job; Prefect's worker waits 30
mkdir -p .rlhf
submitted=$(mktemp)
trap 'rm -f "$submitted"' EXIT

id() { cut -d ';' -f 1 "$submitted"; }

cancelled() {
  trap '' TERM INT
  for _ in {1..50}; do [ ! -s "$submitted" ] || break; sleep 0.1; done
  [ -s "$submitted" ] || exit 143 # nothing was submitted
  if [ "$(squeue --noheader --format=%T --jobs="$(id)")" = PENDING ]; then
    scancel "$(id)"
  else
    scancel --batch --signal=TERM "$(id)" || true
    (sleep "$grace"; scancel "$(id)") &
    last=$!
  fi
  wait "$waiting" || true
  [ -z "${last:-}" ] || kill -- "-$last" 2>/dev/null || true
  exit 143
}
trap cancelled TERM INT

job='exec python -P -m prefect.engine'
sbatch --parsable --wait --no-requeue --job-name=rlhf-flow --output=.rlhf/slurm-%j.log "$@" --wrap "$job" >"$submitted" &
waiting=$!
wait "$waiting"
