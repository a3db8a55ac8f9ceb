#!/usr/bin/env bash
# Builds dist/memd_VERSION-REVISION_ARCHITECTURE.deb, for this machine and for the Python of the
# Debian it runs. docs/decisions/debian-package.md has the reasons.
#
#   deploy/debian/build.sh                  installs what debian/control asks for, downloads, builds
#   deploy/debian/build.sh tree FOLDER      only the folder that dpkg-buildpackage works in
#
# REVISION      Debian's revision of this version (default: 1)
# PYTHONS, JOBS  as for deploy/wheels/build.sh, which runs where dist/ has no wheel as new as the sources
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly folder=$PWD/build/debian python=/usr/bin/python3
readonly wheelhouse=$folder/wheelhouse revision=${REVISION:-1}

say() { printf '%s\n' "memd package: $*" >&2; }
die() { say "$@"; exit 1; }

# --- what the package is of -----------------------------------------------------------------------

version_of_memd() { sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml; }

changelog() {
  local date
  date=$(date --utc --rfc-email --date "@$(git log -1 --format=%ct 2>/dev/null || date +%s)")
  printf 'memd (%s-%s) %s; urgency=medium\n\n  * /usr/share/doc/memd/changelog.gz tells what is new.\n\n -- %s  %s\n' \
    "$version" "$revision" "$(. /etc/os-release; echo "$VERSION_CODENAME")" \
    "$(sed -n 's/^Maintainer: //p' deploy/debian/control)" "$date"
}

# Writes the tree that is packed, and its debian/: make_tree FOLDER
make_tree() {
  local tree=$1
  rm -rf "$tree"
  mkdir -p "$tree/deploy"
  cp -r docs CHANGELOG.md LICENSE README.md SECURITY.md "$tree/"
  cp -r deploy/grafana deploy/manual.py deploy/memd.toml deploy/prometheus "$tree/deploy/"
  cp -rL deploy/debian "$tree/debian"
  rm "$tree/debian/build.sh"
  changelog >"$tree/debian/changelog"
}

# --- what it is built with, and the only steps that need a network --------------------------------

as_root() { if ((EUID == 0)); then "$@"; else sudo "$@"; fi; }

ensure_packages() {
  ! (cd "$tree" && dpkg-checkbuilddeps) 2>/dev/null || return 0
  say "installing what debian/control asks for"
  as_root apt-get -qq update || say "apt-get update failed; going on with the lists there are"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 \
    build-dep -y --no-install-recommends "$tree" >"$folder/apt.log" 2>&1 ||
    { tail -n 20 "$folder/apt.log" >&2; die "install these: $(cd "$tree" && dpkg-checkbuilddeps 2>&1)"; }
}

# The wheel for this Python: 3.11 has one of its own, later ones share one.
wheel_here() {
  local abi=cp312-abi3 found
  [[ $("$python" -c 'import sys; print(sys.version_info[:2])') != "(3, 11)" ]] || abi=cp311-cp311
  found=("dist/memd-$version-$abi-"*"_$(uname -m).whl")
  [[ ! -f ${found[0]} ]] || printf '%s\n' "${found[0]}"
}

ensure_wheel() {
  wheel=$(wheel_here)
  if [[ -z $wheel || -n $(find memd client/memd_client native proto pyproject.toml -type f \
    ! -path '*/__pycache__/*' -newer "$wheel" -print -quit) ]]; then
    deploy/wheels/build.sh "$(uname -m)"
    wheel=$(wheel_here)
  fi
  [[ -n $wheel ]] || die "deploy/wheels/build.sh made no wheel for $("$python" --version)"
}

ensure_wheelhouse() {
  local key
  key="$("$python" --version) $(uname -m) $(sha256sum deploy/debian/requirements.txt)"
  if [[ ! -f $wheelhouse/made || $(<"$wheelhouse/made") != "$key" ]]; then
    say "downloading $(grep -c == deploy/debian/requirements.txt) wheels"
    rm -rf "$wheelhouse"
    "$python" -m pip --disable-pip-version-check download -q --no-deps --require-hashes \
      --only-binary :all: --dest "$wheelhouse" --requirement deploy/debian/requirements.txt >&2
    printf '%s' "$key" >"$wheelhouse/made"
  fi
}

# --- the package ----------------------------------------------------------------------------------

build_package() {
  local offline=(unshare --map-root-user --net --) package=memd_$version-${revision}_$1.deb
  "${offline[@]}" true 2>/dev/null || { say "namespaces are refused here: building with the network"; offline=(); }
  cp -r "$wheelhouse" "$wheel" "$tree/"
  (cd "$tree" && "${offline[@]}" dpkg-buildpackage --build=binary --unsigned-changes --no-sign) \
    >"$folder/build.log" 2>&1 || { tail -n 30 "$folder/build.log" >&2; die "$folder/build.log tells the rest"; }
  mkdir -p dist
  mv "$folder/$package" dist/
  say "dist/$package: $(stat --format=%s "dist/$package") bytes," \
    "$(dpkg-deb --field "dist/$package" Installed-Size) KiB installed"
}

version=$(version_of_memd)
if [[ ${1:-} == tree ]]; then
  make_tree "${2:?usage: deploy/debian/build.sh tree FOLDER}"
  exit
fi
command -v dpkg-deb >/dev/null && command -v apt-get >/dev/null ||
  die "a Debian package is built on Debian, and dpkg-deb or apt-get is not here"
tree=$folder/memd-$version
mkdir -p "$folder"
make_tree "$tree"
ensure_packages
ensure_wheel
ensure_wheelhouse
build_package "$(dpkg --print-architecture)"
