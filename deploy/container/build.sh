#!/usr/bin/env bash
# Builds the images of the Containerfile with buildah, as root, where nothing but buildah runs:
#
#   deploy/container/build.sh [daemon] [trainer]      (default: both)
#
# DEBOOTSTRAP=1       makes the base image from Debian's packages, where no registry can be reached
# TORCH, TORCH_INDEX  which torch the trainer gets, as for deploy/setup/setup.sh
# BUILD_FLAGS         more for buildah, such as `--volume /etc/pip.conf:/etc/pip.conf:ro`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly suite=bookworm
readonly own_base=localhost/memd-base:$suite
declare -rA names=([daemon]=memd [trainer]=memd-trainer)
images=("$@")
((${#images[@]})) || images=(daemon trainer)

say() { printf '%s\n' "memd containers: $*" >&2; }
die() { say "$@"; exit 1; }

# The same as debian:bookworm-slim, but for the documentation that is left out there.
ensure_base() {
  ! buildah inspect --type image "$own_base" >/dev/null 2>&1 || return 0
  command -v debootstrap >/dev/null || die "debootstrap is not installed"
  say "debootstrap of $suite"
  local folder container
  mkdir -p build
  folder=$(mktemp -d "$PWD/build/container-base.XXXXXX")
  debootstrap --variant=minbase "$suite" "$folder/tree" >"$folder/log" 2>&1 ||
    { tail -n 20 "$folder/log" >&2; die "debootstrap failed: $folder/log"; }
  rm -rf "$folder"/tree/var/cache/apt/archives/*.deb "$folder"/tree/var/lib/apt/lists/*
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$folder/tree" / >/dev/null
  buildah config --cmd /bin/bash "$container"
  buildah commit --quiet --rm "$container" "$own_base" >/dev/null
  rm -rf "$folder"
}

build() {
  local image=$1 name=${names[$1]:-} version flags=()
  [[ -n $name ]] || die "no such image: $image (daemon, trainer)"
  version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
  [[ -z ${DEBOOTSTRAP:-} ]] || flags+=(--build-arg "BASE=$own_base")
  [[ -z ${TORCH:-} ]] || flags+=(--build-arg "TORCH=$TORCH")
  [[ -z ${TORCH_INDEX:-} ]] || flags+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
  say "building $name:$version"
  # An image of OCI's format has no place for the health check.
  # shellcheck disable=SC2086  # BUILD_FLAGS are several words
  buildah bud --layers --isolation chroot --network host --format docker \
    --file deploy/container/Containerfile "${flags[@]}" ${BUILD_FLAGS:-} \
    --target "$image" --tag "$name:$version" .
}

command -v buildah >/dev/null || die "buildah is not installed; docker takes the Containerfile too"
[[ -z ${DEBOOTSTRAP:-} ]] || ensure_base
for image in "${images[@]}"; do build "$image"; done
