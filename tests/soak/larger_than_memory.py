"""A model that is larger than the memory of trainer and daemon together, from its first line to its
last: built by `init`, trained, kept as a snapshot, exported in the background while training goes
on, dropped, loaded into a new job, trained on and saved.

Trainer and daemon have one cgroup, whose limit counts their page cache too. It fails where the new
job's bits are not those of the first one, which trained on without the detour, or where the trainer
has taken more than its largest module, that one's gradient, activations and 64 MiB in a phase.

Run, as root: python -m tests.soak.larger_than_memory [--millions 750] [--memory SIZE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memd.client import DaemonClient
from memd.sizes import parse_size
from tests.cgroups import memory_limit
from tests.daemons import BUILD, running_daemon
from tests.integration.safetensors_memory import SETTINGS
from tests.soak.larger_trainer import (
    SEQUENCE,
    host_bytes,
    nvme_bytes,
    shape_of,
    state_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd.demo.model import GPTShape
    from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PHASES = ("build", "train", "train-beside-export", "load", "save")
# Two interpreters, one of them with torch, their code in the page cache, and what they do.
FIXED_BYTES = 448 * MIB


@dataclass
class Trainer:
    """The process, and what it has said."""

    process: subprocess.Popen[str]
    said: dict[str, str] = field(default_factory=dict)

    def hear(self, wanted: str = "") -> Iterator[str]:
        """Its words, up to the line that begins with `wanted`, or to its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            self.said[word] = rest
            yield word
            if word == wanted:
                return
        if wanted or self.process.wait():
            raise SystemExit(f"the trainer ended with {self.process.wait()} after {self.said}")

    def wait_for(self, wanted: str = "") -> None:
        for _ in self.hear(wanted):
            pass

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def memory_bytes(shape: GPTShape) -> int:
    """1.1 GiB for 0.75B parameters."""
    return FIXED_BYTES + 18 * 4 * shape.module_elements_max


def volume_bytes(shape: GPTShape) -> int:
    """A volume has records of its own beside what a job may have."""
    return nvme_bytes(shape) * 51 // 50 + 128 * MIB


def peak_bytes_max(shape: GPTShape) -> int:
    """What a trainer may hold, beyond an interpreter with torch."""
    module_bytes = 4 * shape.module_elements_max
    return 2 * module_bytes + shape.activation_bytes(batch=1, element_bytes=4) + 64 * MIB


def trainer(role: str, daemon: Daemon, millions: int, folder: Path, before: Any) -> Trainer:
    command = [sys.executable, "-m", "tests.soak.larger_trainer", role, daemon.address]
    return Trainer(
        subprocess.Popen(
            [*before, *command, str(millions), str(folder)],
            cwd=ROOT,
            env={**os.environ, **SETTINGS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )


def export_beside(daemon: Daemon, path: Path, training: Trainer) -> int:
    """Exports while it trains; how many of its steps ended before the export did."""
    command = [sys.executable, "-m", "memd", "snapshot", "export", "first", "kept", str(path)]
    with subprocess.Popen(
        [*command, "--format", "dcp", "--socket", str(daemon.socket)], stdout=subprocess.PIPE
    ) as export:
        while export.poll() is None and not path.with_name(path.name + ".partial").exists():
            time.sleep(0.01)
        training.go_on()
        steps = sum(word == "step" and export.poll() is None for word in training.hear("digest"))
        if export.wait():
            raise SystemExit(f"the export ended with {export.returncode}")
    with DaemonClient(daemon.attach_socket) as client:
        client.drop_snapshot("first", "kept")
    training.go_on()
    return steps


def run(millions: int, memory: int | None) -> dict[str, Any]:
    shape = shape_of(millions)
    limit = memory_bytes(shape) if memory is None else memory
    BUILD.mkdir(exist_ok=True)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="larger-", dir=BUILD) as name,
        memory_limit(limit) as before,
        running_daemon(
            before=before,
            host=f"{host_bytes(shape)}B",
            nvme=f"{volume_bytes(shape)}B",
        ) as daemon,
    ):
        folder = Path(name)
        first = trainer("first", daemon, millions, folder, before)
        first.wait_for("kept")
        steps = export_beside(daemon, folder / "exported", first)
        first.wait_for()
        second = trainer("second", daemon, millions, folder, before)
        second.wait_for()
    said = {**second.said, **first.said}
    return {
        "parameters": shape.parameter_count,
        "state_bytes": state_bytes(shape),
        "memory_bytes": limit,
        "host_bytes": host_bytes(shape),
        "sequence": SEQUENCE,
        "base_bytes": int(said["base"]),
        "module_bytes": 4 * shape.module_elements_max,
        "peak_bytes_max": peak_bytes_max(shape),
        "peak_bytes": {phase: int(said[phase]) for phase in PHASES},
        "saved_bytes": int(said["saved"]),
        "steps_beside_export": steps,
        "digests": [first.said["digest"], second.said["digest"]],
        "seconds": round(time.monotonic() - began, 1),
    }


def table(outcome: dict[str, Any]) -> str:
    rows = [f"{'phase':24}{'peak MiB':>10}{'bound MiB':>11}"]
    bound = outcome["peak_bytes_max"] / MIB
    rows += [
        f"{phase:24}{size / MIB:10.1f}{bound:11.1f}"
        for phase, size in outcome["peak_bytes"].items()
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, default=750, help="of parameters")
    parser.add_argument("--memory", type=parse_size, help="of trainer and daemon together")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        outcome = run(arguments.millions, arguments.memory)
    except PermissionError as error:
        print(f"a limit of memory takes the right to make a cgroup: {error}")
        return 2
    print(table(outcome))
    print(json.dumps(outcome))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcome, indent=2) + "\n")
    broken = [
        phase for phase, size in outcome["peak_bytes"].items() if size > outcome["peak_bytes_max"]
    ]
    for phase in broken:
        print(f"{phase}: the trainer held more than its bound")
    if len(set(outcome["digests"])) > 1:
        print("the bits are not those of the run without the detour")
        return 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
