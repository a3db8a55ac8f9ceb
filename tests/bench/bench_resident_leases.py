"""How many leases find their shard in memory, where the forward gives the disk time enough.

The demo's model trains with a cache for a quarter of parameters and states, durability "step". Its
forward alone is made to take 1.3 times as long as the disk needs for all that a step moves: the
modules pause, which leaves the cores to the daemon as an accelerator would. Both are measured in
each round, and the exit code is 1 where the forward was shorter. From the third step on, by
`Session.statistics()`: leases that waited for nothing, of all.

Run: python bench_resident_leases.py [--params 10M] [--steps 6] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import torch

import memd_client
from machine import describe_machine
from memd.bench.figures import Figure
from memd.client import DaemonClient
from memd.demo.folder import volume_folder
from memd.demo.model import build_model
from memd.demo.plan import Plan, make_plan
from memd.demo.quantities import parse_count
from memd.demo.run import private_daemon
from memd.demo.settings import DemoSettings
from memd_native import IoBench
from report import byte_count, seconds, write_report

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).parents[2]
STEPS_LEFT_OUT = 2
FORWARD_SHARE = 1.3  # of bytes / bandwidth, at least
PAUSE_MARGIN = 1.1
RESIDENT_WANTED = 0.99
CACHE_FRACTION = 0.25
FILE_BYTES = 256 << 20
BLOCK_BYTES = 1 << 20
DEPTH = 16
IO_SECONDS = 1.0


class Pauses:
    """In the forward of each module that has parameters of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0  # of one forward, all together
        modules = [each for each in model.modules() if list(each.parameters(recurse=False))]
        for module in modules:
            module.register_forward_hook(lambda *_: time.sleep(self.seconds / len(modules)))


def demo_plan(parameter_count: int) -> Plan:
    return make_plan(
        DemoSettings(
            parameter_count=parameter_count,
            step_count=1,
            dtype="fp32",
            batch=2,
            sequence=128,
            seed=0,
            cache_fraction=CACHE_FRACTION,
            host_bytes=None,
            nvme_bytes=None,
            text=None,
            data=None,
            verify=False,
        )
    )


class Round:
    """One session, from its first step on."""

    def __init__(self, plan: Plan, session: memd_client.Session, meter: DaemonClient) -> None:
        self.plan = plan
        self.session = session
        self.meter = meter
        self.step = 0
        self.model = build_model(plan.shape, dtype=plan.dtype, seed=plan.seed)
        self.pauses = Pauses(self.model)
        memd_client.offload(self.model, session)
        self.optimizer = memd_client.AdamW(self.model.parameters(), lr=1e-4, session=session)

    def train(self, step_count: int) -> None:
        for _ in range(step_count):
            inputs, targets = self.plan.batches.at(self.step)
            self.model(inputs, targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def moved_bytes(self) -> tuple[int, int]:
        _ = self.session.committed_step  # waits for it
        devices = self.meter.status().devices
        return sum(each.read_bytes for each in devices), sum(each.written_bytes for each in devices)


def forward_seconds(plan: Plan, pause_seconds: float) -> float:
    """Of the same model in memory, with the same pauses; the best of three."""
    model = build_model(plan.shape, dtype=plan.dtype, seed=plan.seed)
    Pauses(model).seconds = pause_seconds
    times = []
    for number in range(4):
        inputs, targets = plan.batches.at(number)
        began = time.perf_counter()
        model(inputs, targets)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def measure(plan: Plan, step_count: int) -> dict[str, float]:
    folder = ROOT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    with volume_folder(folder, bytes_needed=plan.nvme_bytes + FILE_BYTES) as data:
        disk = IoBench(str(data), bytes=FILE_BYTES)
        address = f"embedded:{quote(str(data))}?host={plan.host_bytes}B&nvme={plan.nvme_bytes}B"
        with (
            private_daemon(address) as daemon,
            memd_client.connect(address, job="bench", durability="step") as session,
            DaemonClient(daemon.address.attach_socket) as meter,
        ):
            training = Round(plan, session, meter)
            training.train(STEPS_LEFT_OUT)
            before = training.moved_bytes()
            training.train(1)
            after = training.moved_bytes()
            read, written = after[0] - before[0], after[1] - before[1]
            rate = disk.through_queue(
                "mixed",
                block_bytes=BLOCK_BYTES,
                depth=DEPTH,
                seconds=IO_SECONDS,
                write_share=written / (read + written),
            )
            bytes_per_second = (rate.read_bytes + rate.written_bytes) / rate.seconds
            disk_seconds = (read + written) / bytes_per_second
            pause = PAUSE_MARGIN * FORWARD_SHARE * disk_seconds
            training.pauses.seconds = pause
            training.train(1)  # the first that pauses
            before = training.moved_bytes()
            leases = session.statistics()
            training.train(step_count)
            after = training.moved_bytes()
            leases_after = session.statistics()
        del disk
    lease_count = leases_after.lease_count - leases.lease_count
    missed = lease_count - (leases_after.lease_resident_count - leases.lease_resident_count)
    # A gradient's slot is no shard that may be away: each miss counts against values alone.
    value_count = lease_count - leases_after.parameter_count * step_count
    reasons = leases_after.lease_wait_reason_seconds
    return {
        "forward_seconds": forward_seconds(plan, pause),
        "disk_seconds": disk_seconds,
        "bytes_per_step": (sum(after) - sum(before)) / step_count,
        "leases_per_step": lease_count / step_count,
        "resident": 1 - missed / value_count,
        **{
            f"waited_{reason}_seconds": (reasons[reason] - leases.lease_wait_reason_seconds[reason])
            / step_count
            for reason in reasons
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", type=parse_count, default="10M")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.rounds < 1:
        parser.error("at least one round of one step is needed")
    torch.manual_seed(0)
    machine = describe_machine()
    plan = demo_plan(arguments.params)
    rounds = [measure(plan, arguments.steps) for _ in range(arguments.rounds)]

    def runs(name: str) -> list[float]:
        return [each[name] for each in rounds]

    write_report(
        arguments.json,
        name="bench_resident_leases",
        machine=machine,
        settings={name: getattr(arguments, name) for name in ("params", "steps", "rounds")},
        figures=[
            Figure(
                name="leases that find their shard",
                unit="x",
                runs=runs("resident"),
                limit_name="wanted",
                limit_runs=[RESIDENT_WANTED] * len(rounds),
            ),
            seconds("forward alone", runs("forward_seconds")),
            seconds("bytes / bandwidth", runs("disk_seconds")),
            byte_count("moved a step", runs("bytes_per_step")),
        ],
        details={"rounds": rounds},
    )
    share = statistics.median(each["forward_seconds"] / each["disk_seconds"] for each in rounds)
    if share < FORWARD_SHARE:
        raise SystemExit(f"the forward was too short to say anything: {share:.2f} of the disk's")


if __name__ == "__main__":
    main()
