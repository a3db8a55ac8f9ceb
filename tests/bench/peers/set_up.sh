#!/usr/bin/env bash
# Prepares build/peers/venv, in which the peers run: DeepSpeed beside the torch, numpy and memd of
# the project's own environment. Its operators are compiled, which takes minutes, and stay under
# build/peers/operators. A second run costs a second.
#
#   tests/bench/peers/set_up.sh
#
# PYTHON       the project's interpreter (default: .venv/bin/python)
# MAX_JOBS     how many compilers run side by side (default: one for each core)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

readonly python=${PYTHON:-.venv/bin/python}
readonly folder=$PWD/build/peers venv=$PWD/build/peers/venv
readonly requirement=deepspeed==0.19.8
# What its operators are built for: without this it looks for an accelerator of its own choice.
export DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$folder/operators

say() { printf '%s\n' "peers set-up: $*" >&2; }
die() { say "$@"; exit 1; }

"$python" -c 'import torch, memd_client' 2>/dev/null ||
  die "$python has no torch and memd yet: run \`make bench\` or deploy/setup/setup.sh test first"

# What is checked is what the operators need, not which package it came from.
missing=()
g++ --version >/dev/null 2>&1 || missing+=(g++)
printf '#if !__has_include(<libaio.h>)\n#error\n#endif\n' | g++ -E -x c++ - -o /dev/null 2>/dev/null ||
  missing+=(libaio-dev)
if ((${#missing[@]})); then
  ((EUID == 0)) || die "these packages are missing (names as in Debian): ${missing[*]}"
  say "installing ${missing[*]}"
  apt-get -qq update || say "apt-get update failed; going on with the lists there are"
  env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 \
    install -y --no-install-recommends "${missing[@]}" >&2
fi

mkdir -p "$folder"
if [[ ! -x $venv/bin/python ]]; then
  say "creating $venv"
  "$python" -m venv "$venv"
fi
# After its own packages, those of the project: torch is neither installed twice nor another one.
site_packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
peers_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf "import site; site.addsitedir('%s')\n" "$site_packages" >"$peers_packages/project.pth"

if [[ ! -f $folder/$requirement ]]; then
  say "installing $requirement"
  # torch as it is, whatever a dependency says; not isolated, since its set-up imports torch.
  torch=$("$python" -c 'from importlib.metadata import version; print(version("torch"))')
  printf 'torch==%s\n' "$torch" >"$folder/constraints.txt"
  "$venv/bin/python" -m pip --disable-pip-version-check install -q wheel ninja >&2
  "$venv/bin/python" -m pip --disable-pip-version-check install -q -c "$folder/constraints.txt" \
    --no-build-isolation "$requirement" >&2
  touch "$folder/$requirement"
fi

# Now rather than in the first measurement, whose memory would be that of compilers.
if [[ ! -f $folder/compiled ]]; then
  say "compiling operators"
  PATH=$venv/bin:$PATH "$venv/bin/python" - >&2 <<'PYTHON'
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

for builder in (CPUAdamBuilder(), AsyncIOBuilder(), ShareMemCommBuilder()):
    builder.load()
PYTHON
  touch "$folder/compiled"
fi
say "ready"
