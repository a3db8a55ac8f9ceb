#!/usr/bin/env bash
# Prepares a checkout for `make demo`, `make test`, `make test-more`, `make lint` or `make tidy`:
# Debian packages, .venv, torch, memd itself. A part that already stands is skipped: a second run
# costs a second.
#
#   deploy/setup/setup.sh demo|test|test-more|lint|tidy
#
# PYTHON       the interpreter that .venv is made from
#              (default: the first of python3, python3.14 … python3.11 that is new enough)
# TORCH        a pip requirement or the path of a wheel, instead of choose_torch.py's choice
# TORCH_INDEX  a further package index that offers torch builds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly purpose=${1:?usage: deploy/setup/setup.sh demo|test|test-more|lint|tidy}
readonly venv=.venv stamps=.venv/memd-setup build=build/release
readonly test_options=(MEMD_TESTS=ON MEMD_FAULTS=ON)

say() { printf '%s\n' "memd set-up: $*" >&2; }
die() { say "$@"; exit 1; }

# --- the interpreter ------------------------------------------------------------------------------

# A pyenv shim answers to every name and fails when called, so candidates are run, not looked up.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11)); ' 2>/dev/null || continue
    "$candidate" -c 'import sys; print(sys.executable)'
    return
  done
  die "Python 3.11 or newer is needed and ${PYTHON:-python3} is not that;" \
    "install one, or name it: make $purpose PYTHON=/path/to/python3"
}

# --- system packages ------------------------------------------------------------------------------

# What is checked is what the build uses, not which package it came from: a compiler of one's own
# will do.
python_path() { "$python" -c 'import sys, sysconfig; print(sysconfig.get_path(sys.argv[1]))' "$1"; }
has_header() {
  printf '#if !__has_include(<%s>)\n#error\n#endif\n' "$1" | g++ -E -x c++ - -o /dev/null
}
has_python_module() { "$python" -c "import $1"; }
has_python_headers() { test -f "$(python_path include)/Python.h"; }

has_browser() { command -v chromium-headless-shell || command -v chromium; }

need() {
  local package=$1; shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}

list_missing() {
  local version
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  missing=()
  need "$version-venv" has_python_module ensurepip
  need "$version-dev" has_python_headers
  need g++ g++ --version
  need cmake cmake --version
  need ninja-build ninja --version
  need liburing-dev has_header liburing.h
  need libxxhash-dev has_header xxhash.h
  if [[ $purpose == test* ]]; then
    need git git --version
    need libgtest-dev has_header gtest/gtest.h
    need systemd systemd-analyze --version
    need groff-base groff --version
    # Only root mounts file systems, and has sbin on its path.
    ((EUID != 0)) || need xfsprogs mkfs.xfs -V
  fi
  # The test of the metrics page draws it: without a window, and so without what a desktop needs.
  [[ $purpose != test-more ]] || need chromium-headless-shell has_browser
}

as_root() {
  if ((EUID == 0)); then
    "$@"
  else
    sudo "$@"
  fi
}

can_be_root() {
  ((EUID == 0)) || sudo -n true 2>/dev/null || { [[ -t 0 ]] && command -v sudo >/dev/null; }
}

# A list's date is its server's, so nothing tells how old it is here. One source that cannot be
# reached need not matter.
update_lists() {
  as_root apt-get -qq update || say "apt-get update failed; going on with the lists there are"
}

install_packages() {
  mkdir -p build/setup
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 \
    install -y --no-install-recommends "$@" >build/setup/apt.log 2>&1
}

ensure_packages() {
  list_missing
  ((${#missing[@]})) || return 0
  if ! command -v apt-get >/dev/null; then
    die "these are missing and there is no apt-get to install them with" \
      "(names as in Debian): ${missing[*]}"
  elif ! can_be_root; then
    die "these packages are missing; install them and run make $purpose again:" \
      "sudo apt-get install ${missing[*]}"
  fi
  say "installing ${missing[*]}"
  update_lists
  install_packages "${missing[@]}" ||
    { tail -n 20 build/setup/apt.log >&2; die "apt-get could not install: ${missing[*]}"; }
  list_missing
  ((${#missing[@]} == 0)) ||
    die "still missing for $python: ${missing[*]};" \
      "name the system's own interpreter: make $purpose PYTHON=/usr/bin/python3"
}

# Programs of Debian packages that are not installed whole: Prometheus would start as a service, and
# of Kubernetes the tests need one program.
ensure_programs() {
  local package=$1 name missing=() folder=build/setup/$1; shift
  for name in "$@"; do
    command -v "$name" >/dev/null || [[ -x $venv/bin/$name ]] || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null ||
    die "${missing[*]} of $package is missing and there is no apt-get to fetch it with"
  say "fetching ${missing[*]}"
  rm -rf "$folder" && mkdir -p "$folder"
  (
    cd "$folder"
    apt-get -qq download "$package" 2>/dev/null ||
      { can_be_root && update_lists && apt-get -qq download "$package" 2>/dev/null; }
    dpkg-deb --extract "$package"_*.deb .
  ) || die "apt-get could not download the package $package;" \
    "put ${missing[*]} on PATH and run make $purpose again"
  for name in "${missing[@]}"; do install -m 755 "$folder/usr/bin/$name" "$venv/bin/$name"; done
  rm -rf "$folder"
}

# --- .venv ----------------------------------------------------------------------------------------

# A stamp holds what its part was made from, so a part is made again when that changes.
is_current() { [[ -f $stamps/$1 && $(<"$stamps/$1") == "$2" ]]; }
stamp() { printf '%s' "$2" >"$stamps/$1"; }

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >&2; }

ensure_venv() {
  if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "creating $venv with $python"
    "$python" -m venv --clear "$venv"
  fi
  mkdir -p "$stamps"
}

torch_version() {
  "$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))'
}

ensure_torch() {
  local key="${TORCH:-default} ${TORCH_INDEX:-}"
  ! is_current torch "$key" || return 0
  local requirement=${TORCH:-}
  if [[ -z $requirement ]] && torch_version >/dev/null 2>&1; then
    say "keeping the torch that is in $venv"
  else
    [[ -n $requirement ]] || requirement=$("$venv/bin/python" deploy/setup/choose_torch.py)
    say "installing $requirement"
    pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$requirement"
  fi
  stamp torch "$key"
}

# One requirement a line, from a list in pyproject.toml: requirements build-system requires
requirements() {
  "$venv/bin/python" -c '
import functools, sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*functools.reduce(dict.__getitem__, sys.argv[1:], tomllib.load(file)), sep="\n")' "$@"
}

# An editable installation notes where each module lies, so it is made again when one came or went.
module_list() { find memd client native/python proto -name '*.py' | LC_ALL=C sort | sha256sum; }

# memd is installed editable: Python sources are used where they lie, only the compiled module is
# copied.
ensure_memd() {
  local key extra=$1
  key="$(sha256sum pyproject.toml) $(module_list) $("$venv/bin/python" --version) $(<"$stamps/torch")"
  # What the tests need holds all that the demo needs.
  if [[ -f $build/build.ninja ]]; then
    ! is_current "memd-$extra" "$key" || return 0
    ! is_current memd-test "$key" || return 0
  fi
  say "installing memd[$extra]"
  printf 'torch==%s\n' "$(torch_version)" >"$stamps/constraints.txt"
  local build_tools
  mapfile -t build_tools < <(requirements build-system requires)
  pip install -q -c "$stamps/constraints.txt" "${build_tools[@]}"
  # --config-settings, as bookworm's pip 23.0 knows no -C.
  # With the options of the tests, or build_native would compile every file once more.
  local option settings=(--config-settings "build-dir=$build")
  if [[ $purpose == test* ]]; then
    for option in "${test_options[@]}"; do
      settings+=(--config-settings "cmake.define.$option")
    done
  fi
  # --no-compile: few of the libraries' thousands of files are imported, and Python compiles those
  # then.
  pip install -q --no-compile -c "$stamps/constraints.txt" --no-build-isolation "${settings[@]}" \
    -e ".[$extra]"
  stamp "memd-$extra" "$key"
}

ensure_tools() {
  local key
  key=$(sha256sum pyproject.toml)
  ! is_current "$1" "$key" || return 0
  local tools
  mapfile -t tools < <(requirements project optional-dependencies "$1")
  say "installing ${tools[*]}"
  pip install -q "${tools[@]}"
  stamp "$1" "$key"
}

# --- the native part ------------------------------------------------------------------------------

build_step() {
  "$@" >"$build/step.log" 2>&1 || { cat "$build/step.log" >&2; die "failed: $*"; }
}

build_native() {
  local target=_core site_packages
  if [[ $purpose == test* ]]; then
    target=all
    build_step cmake "${test_options[@]/#/-D}" "$build"
  fi
  site_packages=$(python="$venv/bin/python" python_path platlib)
  build_step cmake --build "$build" --target "$target"
  build_step cmake --install "$build" --component python --prefix "$site_packages"
}

started=$SECONDS
python=$(find_python)
ensure_packages
ensure_venv
ensure_torch
case $purpose in
  demo) ensure_memd demo ;;
  test | test-more)
    ensure_memd test
    ensure_programs prometheus promtool prometheus
    ensure_programs kubernetes-client kubectl
    ;;
  lint | tidy) ensure_memd test; ensure_tools "$purpose" ;;
  *) die "no such purpose: $purpose (demo, test, test-more, lint, tidy)" ;;
esac
build_native
say "ready after $((SECONDS - started)) s"
