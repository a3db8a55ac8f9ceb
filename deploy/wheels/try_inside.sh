#!/bin/bash
# The part of deploy/wheels/try.sh inside a root, where there is no compiler and no network:
#
#   try_inside.sh training|tensors THREADS
#
#   training  the demo; README's script; and again with server and client in environments of their own
#   tensors   a daemon and a program without torch: a tensor in, out, and out again after a restart
#
# THREADS is 1 where the kernel that memd sees has no io_uring.
set -euo pipefail
cd /srv
readonly what=$1 threads=$2 sockets=/run/memd data=/var/lib/memd

say() { printf '%s\n' "    $*"; }
die() { say "FAILED: $*"; exit 1; }

refuse_helpers() {
  local name
  for name in cc c++ gcc g++ clang cpp ld as make cmake ninja; do
    ! command -v "$name" >/dev/null || die "$name is here, and nothing may be compiled"
  done
  # A header and one line for each route.
  (($(wc -l </proc/net/route) <= 1)) || die "there is a route to a network"
}

environment() {
  local name=$1; shift
  python3 -m venv "/srv/$name"
  "/srv/$name/bin/pip" --disable-pip-version-check install -q --no-index --find-links /srv/wheelhouse "$@"
  say "$name: $("/srv/$name/bin/memd" --version 2>/dev/null || echo "no command line"), $*"
}

refuse_module() {
  ! "/srv/$1/bin/python" -c "import $2" 2>/dev/null || die "the environment $1 has $2"
}

check_losses() {
  # `step loss` a line: ten of them, and each lower than the one before.
  awk '$1 != NR - 1 || (NR > 1 && $2 >= last) { exit bad = 1 } { last = $2 } END { exit bad || NR != 10 }' "$1" ||
    { cat "$1"; die "README's script did not print ten losses that fall"; }
  say "README's script: loss $(head -n 1 "$1" | cut -d' ' -f2) to $(tail -n 1 "$1" | cut -d' ' -f2)"
}

daemon=""
start_daemon() {
  local began=$SECONDS
  mkdir -p "$sockets" "$data"
  server/bin/memd serve --socket "$sockets/memd.sock" --data "$data" --host 128MiB --nvme 1GiB \
    --unlocked-ok >daemon.out 2>daemon.log &
  daemon=$!
  until server/bin/memd status --probe --socket "$sockets/memd.sock" >/dev/null 2>&1; do
    kill -0 "$daemon" 2>/dev/null || { cat daemon.log; die "the daemon did not start"; }
    sleep 0.2
  done
  say "the daemon is ready after $((SECONDS - began)) s: $(server/bin/memd status --socket "$sockets/memd.sock" | head -n 1)"
}

stop_daemon() {
  kill -TERM "$daemon"
  wait "$daemon" || { cat daemon.log; die "the daemon ended with $?"; }
}

check_io() {
  local line
  # The first line, without a pipe that closes on a command that has more to say.
  line=$(server/bin/memd status --socket "$sockets/memd.sock")
  line=${line%%$'\n'*}
  [[ $threads == 0 || $line == *"I/O by threads"* ]] || die "I/O is not by threads: $line"
  [[ $threads == 1 || $line == *"I/O by io_uring"* ]] || die "I/O is not by io_uring: $line"
}

try_training() {
  environment demo 'memd[demo]'
  demo/bin/memd demo --steps 3 | sed 's/^/      /'
  demo/bin/python readme.py >losses
  check_losses losses

  environment server 'memd[server]'
  refuse_module server torch
  environment client 'memd[client]'
  refuse_module client click
  start_daemon
  check_io
  sed 's/"embedded:", //' readme.py >service.py
  MEMD_ADDRESS=unix://$sockets/memd.sock client/bin/python service.py >losses
  check_losses losses
  server/bin/memd job list --socket "$sockets/memd.sock" | sed 's/^/      /'
  stop_daemon
}

try_tensors() {
  environment server 'memd[server]' numpy
  refuse_module server torch
  start_daemon
  check_io
  say "$(server/bin/python put_get.py put "$sockets/attach.sock")"
  say "$(server/bin/python put_get.py get "$sockets/attach.sock")"
  stop_daemon
  say "what lies on disk: $(server/bin/memd check --data "$data" | tail -n 1)"
  start_daemon
  say "$(server/bin/python put_get.py get "$sockets/attach.sock") after a restart"
  server/bin/memd job drop put-get --yes --socket "$sockets/memd.sock" >/dev/null
  stop_daemon
}

refuse_helpers
say "$(. /etc/os-release; echo "$PRETTY_NAME"), $(uname -m), $(python3 --version), no compiler, no network"
"try_$what"
