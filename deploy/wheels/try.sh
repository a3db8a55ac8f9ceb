#!/usr/bin/env bash
# Installs the wheels of dist/ where there is Python of Debian, no compiler and no network, and uses
# them there. As root: each place is a root that debootstrap makes, in namespaces of its own.
#
#   deploy/wheels/try.sh [PLACE…]      (default: all)
#
#   bookworm          Python 3.11: the demo, README's script, server and client in environments of their own
#   trixie            Python 3.13: the daemon and its commands, a tensor in and out; without torch
#   bookworm-aarch64  as trixie, with Python 3.11 for aarch64 under qemu-user; and native tests
#   trixie-aarch64    as trixie, for aarch64
#
# torch's wheel for aarch64 loads with CUDA's libraries alone (its libtorch_global_deps.so needs libcudart.so.13), so nothing
# trains there.
#
# TORCH, TORCH_INDEX  as for deploy/setup/setup.sh
# KEEP=1              leaves the roots where they are, below build/wheels/roots
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly folder=$PWD/build/wheels
readonly roots=$folder/roots programs=$folder/programs
# The first bytes of an AArch64 program, and which of their bits count: from qemu-user-static.
readonly aarch64_magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
readonly aarch64_mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
places=("$@")
((${#places[@]})) || places=(bookworm trixie bookworm-aarch64 trixie-aarch64)

say() { printf '%s\n' "memd wheels: $*" >&2; }
die() { say "$@"; exit 1; }

((EUID == 0)) || die "roots and namespaces need root: sudo make try-wheels"
command -v apt-get >/dev/null || die "roots are made of Debian's packages, and there is no apt-get"

# A Debian package of this machine, unpacked and not installed.
ensure_program() {
  [[ ! -d $programs/$1 ]] || return 0
  say "fetching $1"
  local place
  place=$(mktemp -d)
  (cd "$place" && apt-get -qq -o APT::Sandbox::User=root download "$1") ||
    die "apt-get could not download $1; run apt-get update"
  mkdir -p "$programs/$1.part"
  dpkg-deb --extract "$place"/*.deb "$programs/$1.part"
  mv "$programs/$1.part" "$programs/$1"
  rm -r "$place"
}

make_root() {
  local root=$1 suite=$2 architecture=$3; shift 3
  rm -rf "$root"
  mkdir -p "$roots"
  say "debootstrap of $suite for $architecture"
  DEBOOTSTRAP_DIR=$programs/debootstrap/usr/share/debootstrap \
    "$programs/debootstrap/usr/sbin/debootstrap" --variant=minbase --arch="$architecture" \
    --include=python3,python3-venv "$@" "$suite" "$root" >"$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2; die "debootstrap failed: $root.log"; }
}

# Its programs do not run without qemu, so no package is set up: they are unpacked, and the files
# that Python looks at are written here.
unpack_packages() {
  local root=$1 package
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
  printf 'root:x:0:0:root:/root:/bin/bash\n' >"$root/etc/passwd"
  printf 'root:x:0:\n' >"$root/etc/group"
  ln -sf bash "$root/bin/sh"
  ln -sf mawk "$root/usr/bin/awk"
}

# Runs a command in a root: enter ROOT online|offline COMMAND…
enter() {
  local root=$1 network=$2 options=(--mount --pid --fork --kill-child); shift 2
  [[ $network == online ]] || options+=(--net)
  # The kernel has a table of emulators for each user namespace, so that of the machine stays as it is.
  [[ -z $emulator ]] || options+=(--user --map-root-user)
  ROOT=$root NETWORK=$network EMULATOR=$emulator MAGIC=$aarch64_magic MASK=$aarch64_mask \
    FIND_LINKS=${PIP_FIND_LINKS:-} \
    unshare "${options[@]}" -- bash -euo pipefail -c '
      mount --make-rprivate /
      for each in dev sys; do mkdir -p "$ROOT/$each"; mount --rbind "/$each" "$ROOT/$each"; done
      mount -t proc proc "$ROOT/proc"
      if [[ -n $EMULATOR ]]; then
        mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc ||
          { echo "a table of emulators of its own needs Linux 6.7" >&2; exit 1; }
        printf "%s" ":memd:M::$MAGIC:$MASK:$EMULATOR:F" >/proc/sys/fs/binfmt_misc/register
      fi
      if [[ $NETWORK == offline ]]; then
        ip link set lo up
      elif [[ -d $FIND_LINKS ]]; then
        mkdir -p "$ROOT$FIND_LINKS"
        mount --bind "$FIND_LINKS" "$ROOT$FIND_LINKS"
      fi
      pip=()
      for each in "${!PIP_@}"; do pip+=("$each=${!each}"); done
      exec chroot "$ROOT" /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "${pip[@]}" "$@"' bash "$@"
}

# An environment whose pip asks package indexes.
prepare_downloads() {
  local root=$1
  mkdir -p "$root/srv/wheelhouse" "$root/etc/ssl/certs"
  cp --dereference /etc/resolv.conf "$root/etc/resolv.conf"
  cp --dereference /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  enter "$root" online python3 -m venv /srv/download
}

# All that the environments of a place need, by the pip of its own Python: another would choose for
# another. The wheel of memd is named by its file, as an index may have others.
fill_wheelhouse() {
  local root=$1 wheel=$2 requirements=() each; shift 2
  cp "$wheel" "$root/srv/wheelhouse/"
  for each in "$@"; do
    [[ $each != memd* ]] || each="/srv/wheelhouse/$(basename "$wheel")${each#memd}"
    requirements+=("$each")
  done
  enter "$root" online /srv/download/bin/pip --disable-pip-version-check download -q \
    --only-binary :all: --dest /srv/wheelhouse ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    "${requirements[@]}"
  rm -rf "$root/srv/download" "$root/etc/resolv.conf"
  say "wheelhouse: $(ls "$root/srv/wheelhouse" | wc -l) wheels, $(du -sh "$root/srv/wheelhouse" | cut -f1)"
}

wheel_of() {
  local found=(dist/memd-*-"$1-manylinux_2_28_$2.whl")
  [[ -f ${found[0]} ]] || die "there is no dist/memd-*-$1-manylinux_2_28_$2.whl; run make wheels"
  printf '%s\n' "${found[0]}"
}

# torch_of ROOT: the build that suits this machine, as `make demo` chooses it.
torch_of() {
  if [[ -n ${TORCH:-} ]]; then
    printf '%s\n' "$TORCH"
  else
    cp deploy/setup/choose_torch.py "$1/srv/"
    enter "$1" online env TORCH_INDEX="${TORCH_INDEX:-}" /srv/download/bin/python /srv/choose_torch.py
  fi
}

try_place() {
  local place=$1 root=$roots/$1 suite=bookworm architecture=amd64 machine=x86_64 abi=cp311-cp311 what=tensors
  local options=() threads=0 wheel
  emulator=""
  case $place in
    bookworm) what=training ;;
    bookworm-aarch64) ;;
    trixie | trixie-aarch64) suite=trixie abi=cp312-abi3 ;;
    *) die "no such place: $place (bookworm, trixie, bookworm-aarch64, trixie-aarch64)" ;;
  esac
  if [[ $place == *-aarch64 ]]; then
    architecture=arm64 machine=aarch64 threads=1 options=(--foreign)
    ensure_program qemu-user-static
    emulator=$programs/qemu-user-static/usr/bin/qemu-aarch64-static
  fi
  wheel=$(wheel_of "$abi" "$machine")
  make_root "$root" "$suite" "$architecture" "${options[@]}"
  [[ -z $emulator ]] || unpack_packages "$root"
  prepare_downloads "$root"
  if [[ $what == training ]]; then
    fill_wheelhouse "$root" "$wheel" 'memd[demo]' "$(torch_of "$root")"
    sed -n '/^```python$/,/^```$/p' README.md | sed '1d;/^```$/,$d' >"$root/srv/readme.py"
  else
    fill_wheelhouse "$root" "$wheel" 'memd[server]' numpy
    cp deploy/wheels/put_get.py "$root/srv/"
  fi
  cp deploy/wheels/try_inside.sh "$root/srv/"
  say "$place, without network:"
  enter "$root" offline bash /srv/try_inside.sh "$what" "$threads"
  if [[ $place == bookworm-aarch64 ]]; then
    say "native tests for aarch64:"
    EMULATOR="$emulator -L $root" deploy/wheels/test_native.sh aarch64
  fi
  [[ -n ${KEEP:-} ]] || rm -rf "$root" "$root.log"
}

emulator=""
ensure_program debootstrap
for place in "${places[@]}"; do
  started=$SECONDS
  try_place "$place"
  say "$place passed in $((SECONDS - started)) s"
done
