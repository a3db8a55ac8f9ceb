"""Exports and imports beside the disk, and training beside an export.

The disk's rate is that of a copy: fio reads one file and writes another at the same time, as an
export and an import do, in order, with O_DIRECT, and syncs. Rounds alternate, and a ratio is that
of neighbours. All bytes are random. Rates count the bytes of the files. An export's time is the
command's own, from its first look at the folder until that has its name on the disk, without the
start of Python. An import begins with files that are on the disk alone, in a job without values,
and ends when the values are committed.

Training beside an export has half of the bandwidth, as it has alone, or all of it. The bandwidth is
that of a preloaded library, so that half of it is known to be half. The job's own snapshot is
exported again and again. The command writes at the speed of the disk.

Wanted: exports and imports reach 0.8 of the disk, a step beside an export takes at most 1.1 times
what it takes alone.

Run: python tests/bench/bench_exports.py [--rounds 5] [--params 64M] [--data DIR] [--json FILE]
     (needs fio >= 3.33)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

sys.path.insert(0, str(Path(__file__).parents[2]))

import memd_client
from bench_isolation import compiled_limit
from machine import describe_machine
from memd.bench.figures import Figure
from memd.client import DaemonClient
from memd.demo.quantities import parse_count
from memd.export.formats import format_named
from memd.export.run import SnapshotExport
from memd_client import checkpoint
from report import ratio, seconds, write_report
from tests.daemons import BUILD, daemons, running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

MIB = 1 << 20
WIDTH = 2048
HOST_BYTES = 160 * MIB
JOB, SNAPSHOT = "exported", "kept"
IMPORTS = ("load_safetensors", "dcp.load")
STEPS_LEFT_OUT = 2


def model_of(parameter_count: int, width: int = WIDTH) -> nn.Sequential:
    layers = max(1, parameter_count // (width * width))
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    model(torch.randn(8, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# ---- Processes of their own ----------------------------------------------------------------------


def make(address: str, parameter_count: int, folder: Path) -> None:
    """A job with moments, its snapshot, and a checkpoint of it."""
    with memd_client.connect(address, job=JOB, fresh=True, host_bytes=HOST_BYTES) as session:
        with memd_client.init(session):
            model = model_of(parameter_count)
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, session=session)
        step(model, optimizer, WIDTH)
        session.snapshot(SNAPSHOT)
        state_dict_saver.save(
            {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()},
            storage_writer=checkpoint.Writer(folder),
        )


def load(address: str, parameter_count: int, kind: str, folder: Path) -> float:
    """Seconds until all that the folder has is committed in a new job."""
    with memd_client.connect(
        address,
        job="imported",
        fresh=True,
        host_bytes=HOST_BYTES,
        nvme_bytes=6 * 12 * parameter_count,  # the state twice, and what is loaded beside it
    ) as session:
        with memd_client.init(session):
            model = model_of(parameter_count)
        memd_client.offload(model, session)
        if kind == "load_safetensors":
            began = time.perf_counter()
            memd_client.load_safetensors(model, folder, session)
        else:
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, session=session)
            began = time.perf_counter()
            state = {
                "model": model.state_dict(keep_vars=True),
                "optimizer": optimizer.state_dict(),
            }
            state_dict_loader.load(state, storage_reader=checkpoint.Reader(folder))
            optimizer.load_state_dict(state["optimizer"])
        session.commit(wait=True)
        return time.perf_counter() - began


def train(address: str, parameter_count: int, step_count: int) -> list[float]:
    """Seconds of each step, once the line `go` has come; the snapshot is there by then."""
    torch.set_num_threads(1)
    width = WIDTH // 4
    taken = []
    with memd_client.connect(address, job=JOB, host_bytes=48 * MIB) as session:
        model = memd_client.offload(model_of(parameter_count, width), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-4, session=session)
        for number in range(STEPS_LEFT_OUT + step_count):
            if number == STEPS_LEFT_OUT:
                session.snapshot(SNAPSHOT)
                print("ready", flush=True)
                sys.stdin.readline()
            began = time.perf_counter()
            step(model, optimizer, width)
            _ = session.committed_step  # waits for it
            taken.append(time.perf_counter() - began)
    return taken[STEPS_LEFT_OUT:]


def export_again(attach_socket: Path, folder: Path) -> None:
    """Until it is killed."""
    os.nice(10)
    number = 0
    while True:
        SnapshotExport(
            job=JOB,
            snapshot=SNAPSHOT,
            path=folder / str(number),
            file_format=format_named("safetensors"),
            file_bytes_max=1 << 40,
            connect=lambda: DaemonClient(attach_socket),
            progress=lambda _done, _all: None,
            tell=lambda text: print(text, file=sys.stderr),
            begun=lambda _target: print("begun", flush=True),
        ).run()
        shutil.rmtree(folder / str(number))
        number += 1


def child(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__)), "--child", *arguments]


def answer(*arguments: str) -> Any:
    done = subprocess.run(child(*arguments), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def run_child(kind: str, arguments: list[str]) -> None:
    if kind == "make":
        address, count, folder = arguments
        make(address, int(count), Path(folder))
    elif kind in IMPORTS:
        address, count, folder = arguments
        print(json.dumps(load(address, int(count), kind, Path(folder))))
    elif kind == "train":
        address, count, steps = arguments
        print(json.dumps(train(address, int(count), int(steps))))
    else:
        export_again(Path(arguments[0]), Path(arguments[1]))


# ---- Rates ---------------------------------------------------------------------------------------


def copy_seconds(source: Path, target: Path, size_bytes: int) -> float:
    """A copy of so many bytes of `source` by fio, which reads and writes at the same time."""
    job = [f"--size={size_bytes}", "--bs=1m", "--iodepth=16", "--ioengine=io_uring", "--direct=1"]
    command = ["fio", "--output-format=json", "--name=read", f"--filename={source}", "--rw=read"]
    command += [*job, "--name=write", f"--filename={target}", "--rw=write", *job]
    command += ["--fallocate=posix", "--end_fsync=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    jobs = json.loads(done.stdout)["jobs"]
    if any(each["error"] for each in jobs):
        sys.exit(f"fio failed: {done.stdout}")
    target.unlink()
    return max(float(each["job_runtime"]) for each in jobs) / 1e3


def write_random(path: Path, size_bytes: int) -> None:
    with path.open("wb") as file:
        while size_bytes > 0:
            size_bytes -= file.write(os.urandom(min(size_bytes, 16 * MIB)))
        os.fsync(file.fileno())


def forget(folder: Path) -> int:
    """The files are on the disk alone; their bytes."""
    size_bytes = 0
    for path in (each for each in folder.iterdir() if each.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size_bytes += os.fstat(file.fileno()).st_size
    return size_bytes


def exported(daemon: Daemon, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "memd", "snapshot", "export", JOB, SNAPSHOT, str(path)]
    command += ["--socket", str(daemon.socket), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


class Rates:
    """Rounds of each operation, and of the disk in the same rounds."""

    def __init__(self) -> None:
        self.ours: dict[str, list[float]] = {}
        self.disk: dict[str, list[float]] = {}

    def note(self, name: str, size_bytes: int, seconds: float, disk_seconds: float) -> None:
        self.ours.setdefault(name, []).append(size_bytes / 1e6 / seconds)
        self.disk.setdefault(name, []).append(size_bytes / 1e6 / disk_seconds)
        print(name, self.ours[name][-1], self.disk[name][-1], file=sys.stderr, flush=True)

    def figures(self) -> Iterator[Figure]:
        for name, runs in self.ours.items():
            yield Figure(
                name=name,
                unit="MB/s",
                runs=runs,
                limit_name="fio's copy",
                limit_runs=self.disk[name],
            )


def measure_rates(folder: Path, parameter_count: int, rounds: int) -> Rates:
    rates = Rates()
    state_bytes = 12 * parameter_count
    checkpoint_folder, out = folder / "checkpoint", folder / "out"
    source, target = folder / "source", folder / "target"
    write_random(source, state_bytes)
    nvme = f"{12 * state_bytes + 512 * MIB}B"
    with running_daemon(host=f"{2 * HOST_BYTES}B", nvme=nvme) as daemon:
        answer("make", daemon.address, str(parameter_count), str(checkpoint_folder))
        for _ in range(rounds):
            copied = copy_seconds(source, target, state_bytes)
            report = exported(daemon, out)
            rates.note("export", report["bytes"], report["seconds"], copied)
            weights = out / "weights"
            weights.mkdir()
            (out / "model.safetensors").rename(weights / "model.safetensors")
            folders = (weights, checkpoint_folder)
            for kind, of_kind in zip(IMPORTS, folders, strict=True):
                size_bytes = forget(of_kind)
                copied = copy_seconds(source, target, size_bytes)
                took = answer(kind, daemon.address, str(parameter_count), str(of_kind))
                rates.note(kind, size_bytes, took, copied)
            shutil.rmtree(out)
    return rates


# ---- Training ------------------------------------------------------------------------------------


@contextlib.contextmanager
def exports(daemon: Daemon, folder: Path) -> Iterator[None]:
    command = child("export", str(daemon.attach_socket), str(folder))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "begun\n":
                sys.exit("the export did not begin")
            yield
            if process.poll() is not None:
                sys.exit("the export ended before the training did")
        finally:
            process.kill()


def step_seconds(
    library: Path, arguments: argparse.Namespace, folder: Path, *, share: float, beside: bool
) -> dict[str, float]:
    """The median step, and the bytes that were exported for each second of training."""
    environ = {
        "LD_PRELOAD": str(library),
        "LIMITED_BYTES_PER_SECOND": str(arguments.bandwidth * 1e6 * share),
        "MEMD_IO_ENGINE": "threads",
        "MEMD_HOLDER_SECONDS": "0",
        "MEMD_SCRUB": "0",
    }
    with daemons() as made, tempfile.TemporaryDirectory(dir=folder) as out:
        # Made at full speed: the volume is written once.
        assert made.start(host="256MiB", nvme="1GiB").stop() == 0
        daemon = made.start(environ=environ, host="256MiB", nvme="1GiB")
        command = child("train", daemon.address, str(arguments.trained), str(arguments.steps))
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as trainer:
            assert trainer.stdout is not None
            if trainer.stdout.readline() != "ready\n":
                sys.exit("the training did not begin")
            began = time.perf_counter()
            with exports(daemon, Path(out)) if beside else contextlib.nullcontext():
                text, _ = trainer.communicate("go\n")
            took = time.perf_counter() - began
        if trainer.returncode:
            sys.exit("the training failed")
        metrics = daemon.get("/metrics").splitlines()
    (read,) = [line for line in metrics if line.startswith("memd_snapshot_export_bytes_total ")]
    return {
        "step": statistics.median(json.loads(text.splitlines()[-1])),
        "export_rate": float(read.split()[1]) / 1e6 / took,
    }


def measure_training(folder: Path, arguments: argparse.Namespace) -> Iterator[Figure]:
    library = compiled_limit()
    cases = {
        "alone with half": (0.5, False),
        "beside an export with half": (0.5, True),
        "beside an export with all": (1.0, True),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(arguments.rounds):
        for name, (share, beside) in cases.items():
            found[name].append(step_seconds(library, arguments, folder, share=share, beside=beside))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    steps = {name: [each["step"] for each in runs] for name, runs in found.items()}
    alone, *others = cases
    for name in cases:
        yield seconds(f"{name}: step", steps[name])
    for name in others:
        yield ratio(f"{name} / {alone}", steps[name], steps[alone], less_is_better=True)
        exported_rates = [each["export_rate"] for each in found[name]]
        yield Figure(name=f"{name}: exported", unit="MB/s", runs=exported_rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--params", type=parse_count, default="64M")
    parser.add_argument("--trained", type=parse_count, default="4M", help="beside an export")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bandwidth", type=float, default=200, help="of that disk, in MB/s")
    parser.add_argument("--only", choices=("rates", "training"))
    parser.add_argument("--data", type=Path, default=BUILD / "bench", help="a folder on a disk")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        run_child(kind, rest)
        return
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps are at least 1")
    if shutil.which("fio") is None:
        sys.exit("nothing to compare with: apt-get install fio")
    arguments.data.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(dir=arguments.data, prefix="exports-") as name:
        if arguments.only != "training":
            figures += measure_rates(Path(name), arguments.params, arguments.rounds).figures()
        if arguments.only != "rates":
            figures += measure_training(Path(name), arguments)
    write_report(
        arguments.json,
        name="bench_exports",
        machine=machine,
        settings={
            name: getattr(arguments, name)
            for name in ("rounds", "params", "trained", "steps", "bandwidth")
        },
        figures=figures,
    )


if __name__ == "__main__":
    main()
