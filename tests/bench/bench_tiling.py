"""The largest feed-forward block that trains in a fixed memory, with linear layers in 1, 2, 4 and
16 tiles: ZeRO-Infinity's table of memory-centric tiling.

The block has two linear layers, hidden → 4 hidden → hidden, in fp32. Its values come from a
safetensors file, so nobody ever has a whole weight. It trains two steps, without clipping. The
memory is that of the job's pool, with the values and gradients in use, and that of the trainer
beyond an interpreter with torch imported, which returns freed tensors. Hidden sizes go up in steps
of 64; the next one is refused, or takes more.

Run: python bench_tiling.py [--host 32MiB] [--trainer 48MiB] [--tilings 1 2 4 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from machine import describe_machine
from memd.bench.figures import Figure
from memd.demo.memory import PeakMemory
from memd.sizes import parse_size
from memd_client.base.sizes import UPDATE_BYTES
from memd_client.checkpoints.safetensors_header import encode_header
from report import byte_count, write_report
from tests.daemons import BUILD, running_daemon
from tiling_trainer import STEPS, TOKENS, block

if TYPE_CHECKING:
    from tests.daemons import Daemon

STEP = 64  # of hidden sizes
# glibc would keep freed gradients: it raises the size from which it maps memory to theirs.
MAPPING = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
VOLUME_BYTES = 64 << 20  # that are no job's
TRAINER = Path(__file__).with_name("tiling_trainer.py")
PIECE_ELEMENTS = 1 << 20
_TORCH_ALONE = """
import re, torch
print(1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One block, and whether it trained within the memory."""

    tiles: int
    hidden: int
    weight_bytes: int
    trains: bool
    trainer_bytes_peak: int  # beyond torch
    daemon_bytes_peak: int  # beside the pool
    told: str  # the error, if there was one


def write_values(path: Path, hidden: int) -> None:
    """Small random ones, a piece at a time."""
    prefix, header = encode_header(
        [(name, each.dtype, each.shape) for name, each in block(hidden).named_parameters()], {}
    )
    generator = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(prefix)
        for tensor in header.tensors:
            count = tensor.size_bytes // 4
            for first in range(0, count, PIECE_ELEMENTS):
                size = min(PIECE_ELEMENTS, count - first)
                file.write((0.02 * torch.randn(size, generator=generator)).numpy().data)


def measure(
    daemon: Daemon,
    *,
    hidden: int,
    tiles: int,
    host_bytes: int,
    alone_bytes: int,
    trainer_bytes_max: int,
) -> Row:
    values = daemon.data / "values.safetensors"
    write_values(values, hidden)
    command = [sys.executable, str(TRAINER), daemon.address, str(values)]
    command += [str(hidden), str(tiles), str(host_bytes), str(nvme_bytes(hidden) - VOLUME_BYTES)]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=MAPPING) as trainer,
        PeakMemory([trainer.pid, daemon.process.pid], interval_s=0.002) as memory,
    ):
        assert trainer.stderr is not None
        errors = trainer.stderr.read().splitlines()
    values.unlink()
    peak_bytes = memory.peak_bytes[trainer.pid] - alone_bytes
    told = errors[-1] if trainer.returncode else ""
    if trainer.returncode and ("CapacityError" not in told or "disk quota" in told):
        raise SystemExit("\n".join(errors))
    return Row(
        tiles=tiles,
        hidden=hidden,
        weight_bytes=16 * hidden * hidden,
        trains=not told and peak_bytes <= trainer_bytes_max,
        trainer_bytes_peak=peak_bytes,
        daemon_bytes_peak=memory.peak_bytes[daemon.process.pid],
        told=told,
    )


def largest(
    *, tiles: int, host_bytes: int, alone_bytes: int, trainer_bytes_max: int
) -> tuple[Row, Row]:
    """The largest block that trains, and the next one."""
    # A tile and its gradient are in the pool at once.
    expected = math.isqrt(tiles * (host_bytes - UPDATE_BYTES) // 2 // 16)
    hidden = max(expected // STEP, 1) * STEP
    rows: dict[int, Row] = {}
    while True:
        if hidden not in rows:
            with running_daemon(host=f"{host_bytes}B", nvme=f"{nvme_bytes(hidden)}B") as daemon:
                rows[hidden] = measure(
                    daemon,
                    hidden=hidden,
                    tiles=tiles,
                    host_bytes=host_bytes,
                    alone_bytes=alone_bytes,
                    trainer_bytes_max=trainer_bytes_max,
                )
            print(json.dumps(asdict(rows[hidden])), file=sys.stderr, flush=True)
        fits = rows[hidden].trains
        other = hidden + STEP if fits else hidden - STEP
        if other in rows and rows[other].trains != fits:
            return (rows[hidden], rows[other]) if fits else (rows[other], rows[hidden])
        if not other:
            raise SystemExit(f"no block trains in {tiles} tiles")
        hidden = other


def nvme_bytes(hidden: int) -> int:
    """On disk: the state twice, gradients, values that are loaded, and a margin."""
    return (2 * 12 + 4 + 4) * 8 * hidden * hidden * 5 // 4 + 2 * VOLUME_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", type=parse_size, default=32 << 20)
    parser.add_argument("--trainer", type=parse_size, default=48 << 20)
    parser.add_argument("--tilings", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    BUILD.mkdir(exist_ok=True)
    machine = describe_machine()
    alone = subprocess.run([sys.executable, "-c", _TORCH_ALONE], capture_output=True, check=True)
    found = {
        tiles: largest(
            tiles=tiles,
            host_bytes=arguments.host,
            alone_bytes=int(alone.stdout),
            trainer_bytes_max=arguments.trainer,
        )
        for tiles in arguments.tilings
    }
    figures = []
    for tiles, (row, _) in found.items():
        figures.append(Figure(name=f"{tiles} tiles: hidden size", unit="", runs=[row.hidden]))
        figures.append(byte_count(f"{tiles} tiles: trainer", [row.trainer_bytes_peak]))
        figures.append(byte_count(f"{tiles} tiles: daemon", [row.daemon_bytes_peak]))
    write_report(
        arguments.json,
        name="bench_tiling",
        machine=machine,
        settings={
            "host_bytes": arguments.host,
            "trainer_bytes": arguments.trainer,
            "tokens": TOKENS,
            "steps": STEPS,
        },
        figures=figures,
        details={
            "rows": [asdict(row) for row, _ in found.values()],
            "next": [asdict(row) for _, row in found.values()],
        },
    )


if __name__ == "__main__":
    main()
