#!/usr/bin/env bash
# Builds the wheels of memd into dist/: for CPython 3.11, and one by the stable ABI for 3.12 and
# later, each for glibc 2.28 or newer. docs/decisions/wheels.md has the reasons.
#
#   deploy/wheels/build.sh [x86_64] [aarch64]     (default: both)
#
# PYTHONS  the interpreters that build (default: 3.11 and the oldest later one among python3,
#          python3.11 … python3.14 and pyenv's)
# JOBS     compilers at a time (default: one for each processor)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly folder=$PWD/build/wheels
readonly tools=$folder/tools
readonly debian_packages=(liburing-dev libxxhash-dev)
declare -rA debian_names=([x86_64]=amd64 [aarch64]=arm64)
architectures=("$@")
((${#architectures[@]})) || architectures=(x86_64 aarch64)

say() { printf '%s\n' "memd wheels: $*" >&2; }
die() { say "$@"; exit 1; }

# --- interpreters ---------------------------------------------------------------------------------

# "3.12 /usr/bin/python3.12", where it is CPython and new enough. A pyenv shim fails when called.
describe_python() {
  "$1" -c 'import sys
if sys.implementation.name == "cpython" and sys.version_info >= (3, 11):
    print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null || true
}

# The two that together serve every version from 3.11 on: 3.11, and the oldest later one.
choose_pythons() {
  local candidate candidates=(python3 python3.{11..14} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3)
  for candidate in ${PYTHONS:-"${candidates[@]}"}; do
    describe_python "$candidate"
  done | sort -s -u -t' ' -V -k1,1 |
    awk '$1 == "3.11" { print } $1 != "3.11" && !later++ { print }'
}

python_path() { "$1" -c 'import sys, sysconfig; print(sysconfig.get_path(sys.argv[1]))' "$2"; }

# --- tools and the target's libraries -------------------------------------------------------------

# One requirement a line, from a list in pyproject.toml: requirements build-system requires
requirements() {
  "${pythons[0]}" -c '
import functools, sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*functools.reduce(dict.__getitem__, sys.argv[1:], tomllib.load(file)), sep="\n")' "$@"
}

# An environment with these packages, made again when they change: ensure_environment FOLDER PYTHON REQUIREMENT…
ensure_environment() {
  local place=$1 python=$2; shift 2
  local key="$python $*"
  [[ ! -f $place/made || $(<"$place/made") != "$key" ]] || return 0
  say "installing $*"
  "$python" -m venv --clear "$place"
  "$place/bin/python" -m pip --disable-pip-version-check install -q "$@" >&2
  printf '%s' "$key" >"$place/made"
}

# Any interpreter runs these, so that another one's run leaves them as they are: the compiler's headers lie there, and with
# new ones every object would be compiled again.
ensure_tools() {
  local made
  made=$(cat "$tools/made" 2>/dev/null || true)
  [[ ${made#* } != "$*" ]] || ! "$tools/bin/python" -c '' 2>/dev/null || return 0
  ensure_environment "$tools" "${pythons[0]}" "$@"
}

# apt-get with the lists of one more architecture, which the system's own do not have.
target_apt() {
  local state=$folder/apt
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
  apt-get -qq -o Dir::State::lists="$state/lists" -o Dir::Cache="$state/cache" \
    -o APT::Sandbox::User=root -o APT::Architectures::="$debian" "$@"
}

# Debian packages of the target, unpacked and never installed: ensure_sysroot PACKAGE…
ensure_sysroot() {
  local key="$*"
  [[ ! -f $sysroot/made || $(<"$sysroot/made") != "$key" ]] || return 0
  command -v apt-get >/dev/null ||
    die "the target's libraries come from apt-get, which is not here; unpack ${*/%/:$debian} into" \
      "$sysroot and write '$key' into $sysroot/made"
  say "fetching ${*/%/:$debian}"
  rm -rf "$sysroot"
  mkdir -p "$sysroot/packages"
  target_apt update
  (cd "$sysroot/packages" && target_apt download "${@/%/:$debian}")
  local package
  for package in "$sysroot"/packages/*.deb; do dpkg-deb --extract "$package" "$sysroot"; done
  printf '%s' "$key" >"$sysroot/made"
}

# auditwheel knows the tags of its own machine alone, and takes the target's for it.
repair_wheel() {
  "$tools/bin/python" -c '
import platform, sys
machine = sys.argv.pop(1)
platform.machine = lambda: machine
from auditwheel.main import main
sys.exit(main())' "$architecture" repair "$@"
}

# --- one wheel ------------------------------------------------------------------------------------

build_wheel() {
  local python=$1 version=$2 raw=$folder/raw/$architecture-$2 environment=$folder/python$2
  rm -rf "$raw"
  # The cache names the interpreter that was found; objects that no interpreter has a part in stay. scikit-build-core would
  # delete them for an environment other than the one in its note.
  rm -f "$build/CMakeCache.txt" "$build/.skbuild-info.json"
  say "compiling for $architecture, Python $version"
  # The names of the target's files and wheel, where the interpreter would give its own.
  env PATH="$tools/bin:$PATH" CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}" \
    SOURCE_DATE_EPOCH="$epoch" \
    _PYTHON_HOST_PLATFORM="linux-$architecture" \
    SETUPTOOLS_EXT_SUFFIX=".cpython-${version/./}-$architecture-linux-gnu.so" \
    "$environment/bin/python" -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation \
    --wheel-dir "$raw" \
    --config-settings "build-dir=$build" \
    --config-settings "cmake.define.CMAKE_TOOLCHAIN_FILE=$PWD/deploy/wheels/zig.cmake" \
    --config-settings "cmake.define.MEMD_ZIG=$zig" \
    --config-settings "cmake.define.MEMD_ARCHITECTURE=$architecture" \
    --config-settings "cmake.define.MEMD_SYSROOT=$sysroot" \
    . >&2
  # One of an earlier version; those of other interpreters stay.
  rm -f "dist/memd-"*"-cp${version/./}-"*"_$architecture.whl"
  # Fails where a symbol is newer than glibc 2.28, or a library would have to come along.
  PATH="$tools/bin:$PATH" repair_wheel --plat "manylinux_2_28_$architecture" --only-plat \
    --wheel-dir dist "$raw"/memd-*.whl >"$raw/auditwheel.log" 2>&1 ||
    { cat "$raw/auditwheel.log" >&2; die "auditwheel refuses $(ls "$raw"/memd-*.whl)"; }
}

# Each tool knows a part: glibc's symbols, the stable ABI's, and what a wheel of memd has.
check_wheels() {
  local wheel
  for wheel in dist/memd-*"_$1.whl"; do
    [[ $wheel != *-abi3-* ]] || "$tools/bin/abi3audit" --strict --summary "$wheel" >&2
    "$tools/bin/python" deploy/wheels/check.py "$wheel"
  done
}

for architecture in "${architectures[@]}"; do
  [[ -n ${debian_names[$architecture]:-} ]] ||
    die "no such architecture: $architecture (x86_64, aarch64)"
done
mapfile -t chosen < <(choose_pythons)
((${#chosen[@]})) || die "no CPython 3.11 or later starts; name one: PYTHONS=/path/to/python3"
pythons=("${chosen[@]#* }")
versions=("${chosen[@]%% *}")
[[ " ${versions[*]} " == *" 3.11 "* ]] || say "no Python 3.11 is here: no wheel for it"
[[ ${versions[-1]} != 3.11 ]] || say "no Python 3.12 or later is here: no wheel for these"

started=$SECONDS
epoch=$(git log -1 --format=%ct 2>/dev/null || date +%s)
mapfile -t tool_packages < <(requirements project optional-dependencies wheels)
mapfile -t build_packages < <(requirements build-system requires)
ensure_tools "${tool_packages[@]}"
zig=$("$tools/bin/python" -c 'import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
export ZIG_GLOBAL_CACHE_DIR=$folder/zig ZIG_LOCAL_CACHE_DIR=$folder/zig
for index in "${!pythons[@]}"; do
  ensure_environment "$folder/python${versions[index]}" "${pythons[index]}" "${build_packages[@]}"
done
mkdir -p dist
for architecture in "${architectures[@]}"; do
  debian=${debian_names[$architecture]}
  sysroot=$folder/sysroot-$architecture build=$folder/$architecture
  packages=("${debian_packages[@]}")
  for index in "${!pythons[@]}"; do
    # Debian's headers of Python lie in a package a target; others have the same sizes on both.
    [[ $(python_path "${pythons[index]}" include) != /usr/include/* ]] ||
      packages+=("libpython${versions[index]}-dev")
  done
  ensure_sysroot "${packages[@]}"
  for index in "${!pythons[@]}"; do build_wheel "${pythons[index]}" "${versions[index]}"; done
  check_wheels "$architecture"
done
say "done after $((SECONDS - started)) s:"
ls -s --block-size=K dist/memd-*.whl
