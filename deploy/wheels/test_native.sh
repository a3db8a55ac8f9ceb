#!/usr/bin/env bash
# Builds native tests with the compiler of the wheels and runs them, where `make wheels` has run:
# its clang, libc++ and glibc 2.28 are not those of `make test`.
#
#   deploy/wheels/test_native.sh x86_64|aarch64 [PROGRAM…]
#
# The default are programs where processors differ: the update's loops and checksums, extents, pages between processes, I/O
# by threads, and steps that are committed. For catalogue_test and ring_test qemu-user takes all memory (21 GB, measured).
#
# JOBS      compilers at a time (default: one for each processor)
# EMULATOR  runs programs of another machine, such as `qemu-aarch64-static -L ROOT`, where ROOT has its libc
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly folder=$PWD/build/wheels architecture=${1:?usage: test_native.sh x86_64|aarch64 [PROGRAM…]}; shift
programs=("$@")
((${#programs[@]})) || programs=(
  adam_test checksum_test extent_test arena_test io_conformance_test commit_test shard_store_test
)
readonly sources=/usr/src/googletest sysroot=$folder/sysroot-$architecture

die() { printf '%s\n' "memd wheels: $*" >&2; exit 1; }

[[ -f $sysroot/made ]] || die "run make wheels before: it has the compiler and the libraries"
[[ -d $sources ]] || die "$sources is missing; install the package googletest"
zig=$("$folder/tools/bin/python" -c 'import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).with_name("zig"))')
export ZIG_GLOBAL_CACHE_DIR=$folder/zig ZIG_LOCAL_CACHE_DIR=$folder/zig

configure() {
  cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_TOOLCHAIN_FILE="$PWD/deploy/wheels/zig.cmake" \
    -DMEMD_ZIG="$zig" -DMEMD_ARCHITECTURE="$architecture" -DMEMD_SYSROOT="$sysroot" "$@" >/dev/null
}

googletest=$folder/googletest-$architecture tests=$folder/tests-$architecture
if [[ ! -d $googletest/include ]]; then
  configure -S "$sources" -B "$googletest/build" -DBUILD_GMOCK=OFF -DCMAKE_INSTALL_PREFIX="$googletest"
  cmake --build "$googletest/build" --target install >/dev/null
fi
configure -S native -B "$tests" -DMEMD_TESTS=ON -DMEMD_BINDING=OFF -DCMAKE_PREFIX_PATH="$googletest"
cmake --build "$tests" -j "${JOBS:-$(nproc)}" --target "${programs[@]}"
# Filters of seccomp end what qemu-user itself needs.
[[ -z ${EMULATOR:-} ]] || export GTEST_FILTER=-*IoUringForbidden*
for program in "${programs[@]}"; do ${EMULATOR:-} "$tests/$program" --gtest_brief=1; done
