#!/usr/bin/env bash
# An operator's day: memd is installed, started, used, watched, fenced, cured and upgraded under a
# trainer whose losses stay equal, and the job is dropped. One line a step.
#
#   tests/e2e/operator.sh            in a root of debootstrap, under a real systemd, without compiler
#                                    and network: the wheel of the release before, built of its commit
#                                    (tests/compat/releases.toml), is upgraded to today's (root)
#   tests/e2e/operator.sh --quick    this checkout's packages, on this machine; the upgrade changes
#                                    their version, and nothing else
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/../.."

die() { printf '%s\n' "operator: $*"; exit 1; }

# need PROGRAM PACKAGE…
need() {
  local missing=()
  while (($#)); do
    command -v "$1" >/dev/null || [[ " ${missing[*]} " == *" $2 "* ]] || missing+=("$2")
    shift 2
  done
  ((${#missing[@]} == 0)) || die "install these packages: apt-get install ${missing[*]}"
}

python=/usr/bin/python3
case "$*" in
  --quick)
    PATH=$PWD/.venv/bin:$PATH
    python=python
    need prometheus prometheus promtool prometheus prlimit util-linux
    ;;
  "")
    ((EUID == 0)) || die "roots and namespaces need root: sudo make operator"
    need debootstrap debootstrap systemd-nspawn systemd-container unshare util-linux
    ;;
  *) die "no such option: $* (--quick, or none)" ;;
esac
exec "$python" -m tests.e2e.operation "$@"
