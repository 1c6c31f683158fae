#!/usr/bin/env bash
# Trains on a TPU VM or a pod of them, on Google Cloud. Run it from the folder of train.py, on your own machine:
#
#   export ZONE=us-central2-b ACCELERATOR=v4-32 SPOT=1
#   launch/tpu_vm.sh run my-tpu python train.py --config configs/eurosat.py --workdir gs://BUCKET/run
#
# run       create, copy, start, follow; and all of it again where the TPU was pre-empted, until the command ends
# create    asks for the TPU (a queued resource) and waits until it is there; what was pre-empted is removed first
# copy      copies this folder to every worker and installs what it needs
# start     starts the command on every worker, in the background; its log is there in largebatch.log
# follow    shows the log of worker 0 until the command ends, and ends with its exit code
# stop      sends the command SIGTERM: train.py saves and ends
# delete    gives the TPU back
#
# A pre-empted TPU takes its disks with it, so the run folder has to be in a bucket. The project is gcloud's own.
# RUNTIME is the software of the machines (https://cloud.google.com/tpu/docs/runtimes). POLL_SEC is how often to
# look, SETTLE_SEC for how long a TPU that is on its way out may still be called active.
set -euo pipefail

RUNTIME=${RUNTIME:-tpu-ubuntu2204-base}
POLL_SEC=${POLL_SEC:-20}
SETTLE_SEC=${SETTLE_SEC:-120}
LOST=255 # follow cannot say how the command ended
errors=$(mktemp)
archive=$(mktemp)
trap 'rm -f "$errors" "$archive"' EXIT

say() { echo "tpu_vm.sh: $*" >&2; }
fail() { say "$@"; exit 1; }
usage() { say "$@"; exit 2; }

# cloud GROUP COMMAND ...: a command of gcloud compute tpus; where it fails, the line of its error.
cloud() {
  gcloud compute tpus "$@" --zone="$ZONE" --quiet 2> "$errors" || fail "gcloud compute tpus $1 $2, $name: $(reason)"
}
reason() { grep -m 1 ERROR "$errors" || tail -n 1 "$errors"; }

# on WORKER COMMAND: runs COMMAND in bash on one worker, or on all.
on() { gcloud compute tpus tpu-vm ssh "$name" --zone="$ZONE" --quiet --worker="$1" --command="$2"; }

# The state of the queued resource, or NONE.
state() {
  if ! gcloud compute tpus queued-resources describe "$name" --zone="$ZONE" --quiet \
    --format="value(state.state)" 2> "$errors"; then
    grep -q NOT_FOUND "$errors" || fail "gcloud compute tpus queued-resources describe, $name: $(reason)"
    echo NONE
  fi
}

create() {
  [ -n "${ACCELERATOR:-}" ] || usage "ACCELERATOR is not set; for example ACCELERATOR=v4-32"
  local now tier=()
  [ -z "${SPOT:-}" ] || tier=(--spot)
  now=$(state) || exit 1
  while [ "$now" = SUSPENDING ] || [ "$now" = DELETING ]; do
    sleep "$POLL_SEC"
    now=$(state) || exit 1
  done
  if [ "$now" = SUSPENDED ] || [ "$now" = FAILED ]; then
    delete
    now=NONE
  fi
  if [ "$now" = NONE ]; then
    say "asking for $name ($ACCELERATOR, $ZONE)"
    cloud queued-resources create "$name" --node-id="$name" --accelerator-type="$ACCELERATOR" \
      --runtime-version="$RUNTIME" "${tier[@]}"
    now=$(state) || exit 1
  fi
  while [ "$now" != ACTIVE ]; do
    case $now in
      FAILED | SUSPENDED | NONE) fail "$name: $now; gcloud compute tpus queued-resources describe $name says why" ;;
    esac
    say "$name: $now"
    sleep "$POLL_SEC"
    now=$(state) || now=unknown # it may take days, and gcloud may fail once
  done
  say "$name is there"
}

copy() {
  [ -f train.py ] || usage "there is no train.py in $PWD; run this in the folder that holds it"
  tar -czf "$archive" --exclude=./.git --exclude='./.venv*' --exclude=./runs --exclude=./studies .
  cloud tpu-vm scp "$archive" "$name:largebatch.tar.gz" --worker=all
  # The runtimes' own Python may be too old; uv brings one.
  on all "set -e; mkdir -p largebatch; tar -xzf largebatch.tar.gz -C largebatch; cd largebatch
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
    [ -d .venv ] || python3 -m uv venv --quiet --python 3.12 .venv
    python3 -m uv pip install --quiet -r requirements-tpu.txt gcsfs" \
    || fail "$name: copying or installing failed on a worker; what it said is above"
}

start() {
  [ $# -gt 0 ] || usage "no command; allowed: start NAME python train.py ..."
  local command
  command=$(printf '%q ' "$@")
  # In a session of its own, so that it outlives this connection.
  on all "cd largebatch || exit 1
    if [ -f pid ] && kill -0 \$(cat pid) 2> /dev/null; then echo 'a command is running here already' >&2; exit 1; fi
    rm -f exit_code pid
    PATH=\$PWD/.venv/bin:\$PATH nohup setsid bash -c 'echo \$\$ > pid; \"\$@\"; echo \$? > exit_code' bash $command \
      > ../largebatch.log 2>&1 < /dev/null &" \
    || fail "$name: the command was not started on every worker; what they said is above"
}

# shellcheck disable=SC2016 # what is in single quotes is for the worker
follow() {
  local code
  on 0 'cd largebatch && for _ in $(seq 30); do [ -f pid ] && break; sleep 1; done
    tail -n +1 --pid=$(cat pid) -F ../largebatch.log' || true
  code=$(on 0 'cat largebatch/exit_code || echo 137' 2> /dev/null) || true # killed, where it wrote none
  [[ $code =~ ^[0-9]+$ ]] || return $LOST
  return "$code"
}

# shellcheck disable=SC2016
stop() { on all 'pkill -TERM -P $(cat largebatch/pid)' || fail "$name: no command is running on some worker"; }

delete() { cloud queued-resources delete "$name" --force; }

# Whether the TPU is going or gone, which it may not say at once.
is_preempted() {
  local now deadline=$((SECONDS + SETTLE_SEC))
  while true; do
    if now=$(state) && [ "$now" != ACTIVE ]; then return 0; fi
    [ $SECONDS -lt $deadline ] || return 1
    sleep "$POLL_SEC"
  done
}

run() {
  [ $# -gt 0 ] || usage "no command; allowed: run NAME python train.py ..."
  local code is_started=
  while true; do
    [ -n "$is_started" ] || create
    code=0
    (
      [ -n "$is_started" ] || { copy && start "$@"; }
      follow
    ) || code=$?
    is_started=1
    case $code in
      0 | 2 | 3) break ;; # finished, wrong usage, diverged: the same on the next TPU
    esac
    if is_preempted; then # a host that goes first ends the others with any code
      say "$name was pre-empted; starting again"
      is_started=
    elif [ $code = $LOST ]; then
      say "the connection to $name was lost; following again"
    else
      break
    fi
  done
  say "the command ended with $code; to give the TPU back: launch/tpu_vm.sh delete $name"
  exit $code
}

action=${1:-}
name=${2:-}
case $action in
  run | create | copy | start | follow | stop | delete) ;;
  *) usage "'$action'; allowed: run, create, copy, start, follow, stop or delete, then NAME" ;;
esac
[[ $name =~ ^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$ ]] \
  || usage "name '$name'; allowed: lower-case letters, digits and hyphens, a letter first"
[ -n "${ZONE:-}" ] || usage "ZONE is not set; for example ZONE=us-central2-b"
command -v gcloud > /dev/null || fail "gcloud is not installed; see https://cloud.google.com/sdk/docs/install"
[ -n "$(gcloud auth list --filter=status:ACTIVE --format='value(account)' 2> /dev/null)" ] \
  || fail "gcloud has no credentials; log in by: gcloud auth login"
shift 2
"$action" "$@"
