"""A Hugging Face checkpoint of several times the memory, loaded by `from_pretrained` inside `init`,
beside the plain load of the same files: bits and time.

The model has Llama's shape and random weights, in sharded safetensors. Trainer and daemon have one
cgroup, whose limit counts what they read of files too; the plain load has all of the machine. Files
are read from the disk each time. A load ends when all values are memd's, under their names.

The exit code is 1 where a bit differs. Wanted: at most 1.5 times the plain load's time.

Run, as root: python tests/bench/bench_pretrained.py [--layers 24] [--memory 1GiB] [--rounds 5]
     [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from machine import describe_machine
from memd.sizes import parse_size
from report import byte_count, ratio, seconds, write_report
from tests.cgroups import memory_limit
from tests.daemons import BUILD, running_daemon

LOADER = Path(__file__).with_name("pretrained_loader.py")
_MAKE = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=16000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=int(sys.argv[2]),
    num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False, dtype="float32",
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size="500MB")
"""


def loaded(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> dict[str, Any]:
    Path("/proc/sys/vm/drop_caches").write_text("1")
    command = [*before, sys.executable, str(LOADER), str(folder), *arguments]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--memory", type=parse_size, default=1 << 30)
    parser.add_argument("--host", type=parse_size, default=288 << 20, help="the daemon's pool")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = describe_machine()
    BUILD.mkdir(exist_ok=True)
    plain, ours = [], []
    with tempfile.TemporaryDirectory(prefix="pretrained-", dir=BUILD) as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-c", _MAKE, name, str(arguments.layers)], check=True)
        subprocess.run(["/bin/sync"], check=True)
        size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        nvme_bytes = 5 * size_bytes
        with (
            memory_limit(arguments.memory) as before,
            running_daemon(
                before=before, host=f"{arguments.host}B", nvme=f"{nvme_bytes + (256 << 20)}B"
            ) as daemon,
        ):
            flags: tuple[str, ...] = (
                "--address",
                daemon.address,
                "--host-bytes",
                str(arguments.host),
            )
            flags += ("--nvme-bytes", str(nvme_bytes))
            for _ in range(arguments.rounds):
                plain.append(loaded(folder))
                ours.append(loaded(folder, *flags, before=before))
                print(plain[-1]["seconds"], ours[-1]["seconds"], file=sys.stderr, flush=True)
    different = [
        key
        for one, other in zip(plain, ours, strict=True)
        for key in sorted({*one["digests"], *other["digests"]})
        if one["digests"].get(key) != other["digests"].get(key)
    ]
    plain_s, ours_s = ([each["seconds"] for each in side] for side in (plain, ours))
    write_report(
        arguments.json,
        name="bench_pretrained",
        machine=machine,
        settings={
            "checkpoint_bytes": size_bytes,
            "memory_bytes": arguments.memory,
            "host_bytes": arguments.host,
            "rounds": arguments.rounds,
        },
        figures=[
            seconds("plain load", plain_s),
            seconds("load inside init", ours_s),
            ratio("inside init / plain", ours_s, plain_s, less_is_better=True),
            byte_count("plain load: trainer", [each["peak_bytes"] for each in plain]),
            byte_count("load inside init: trainer", [each["peak_bytes"] for each in ours]),
        ],
        details={"parameters": len(ours[0]["digests"]), "different": different},
    )
    for key in different:
        print(f"other bits: {key}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
