"""A contestant's process seen from outside: its events, its memory, and what it moved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memd.demo.memory import child_process_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A walk through the page tables of 7 GiB takes tens of milliseconds, in which the process cannot
# map memory: so none while steps are timed.
SAMPLE_INTERVAL_S = 0.05
LAST_LINES = 20


class ContestantFailed(Exception):
    """The message holds what it said last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Bytes of one process. Pss knows nothing of hugetlb pages, which stand beside it."""

    proportional: int  # its own, and of what it shares its part
    huge_private: int
    huge_shared: int  # each page counts in full in every process that maps it


def process_memory(rollup: str) -> ProcessMemory:
    """From the text of /proc/PID/smaps_rollup; ProcessLookupError where it has no figures."""
    found: dict[str, int] = {}
    for line in rollup.splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[key] = int(value.split()[0]) * 1024
    if "Pss" not in found:
        raise ProcessLookupError("the process has ended")
    return ProcessMemory(
        proportional=found["Pss"],
        huge_private=found.get("Private_Hugetlb", 0),
        huge_shared=found.get("Shared_Hugetlb", 0),
    )


def memory_of_all(processes: Sequence[ProcessMemory]) -> int:
    """Nothing counts twice: huge pages are shared by a pool's daemon, which maps all of them, and
    its trainers, so that those of the process with most are all there are."""
    return sum(each.proportional + each.huge_private for each in processes) + max(
        (each.huge_shared for each in processes), default=0
    )


def moved_bytes(process_id: int) -> tuple[int, int]:
    """Read from and written to devices, all threads together, as the kernel counts them."""
    counters = dict(
        line.split(": ") for line in Path(f"/proc/{process_id}/io").read_text().splitlines()
    )
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def family(process_id: int) -> Iterator[int]:
    """The process and all that descend from it: a private daemon is a child."""
    yield process_id
    for child_id in child_process_ids(process_id):
        yield from family(child_id)


def family_memory(process_id: int) -> int:
    members = []
    for member_id in family(process_id):
        try:
            members.append(process_memory(Path(f"/proc/{member_id}/smaps_rollup").read_text()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since it was listed
    return memory_of_all(members)


def family_moved(process_id: int) -> tuple[int, int]:
    pairs = [moved_bytes(member_id) for member_id in family(process_id)]
    return sum(read for read, _ in pairs), sum(written for _, written in pairs)


class MemorySampler:
    """`samples` of the family's memory, from a thread of its own, except while it is paused."""

    def __init__(self, process_id: int) -> None:
        self.samples: list[tuple[float, int]] = []  # time.monotonic(), bytes
        self._process_id = process_id
        self._stop = threading.Event()
        self._running = threading.Event()
        self._running.set()
        self._thread = threading.Thread(target=self._run, name="memd-memory", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        self._running.clear()

    def go_on(self) -> None:
        self._running.set()

    def stop(self) -> None:
        self._stop.set()
        self._running.set()
        self._thread.join()

    def sample(self) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            self.samples.append((time.monotonic(), family_memory(self._process_id)))

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_INTERVAL_S):
            self._running.wait()
            self.sample()


@dataclass(kw_only=True, slots=True)
class Watched:
    """What one run of a contestant showed."""

    events: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    # Of the kernel's counters at the marks "begin" and "end".
    moved: dict[str, tuple[int, int]] = field(default_factory=dict)

    def all(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def only(self, event: str, **values: Any) -> dict[str, Any]:
        (found,) = (each for each in self.all(event) if values.items() <= each.items())
        return found

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.all("step")]

    @property
    def step_seconds(self) -> list[float]:
        """From the end of a step's call to the end of the next one's, between the marks: what is
        still under way when a call returns is in the time of the one after it."""
        begin, end = self._begin["time"], self._end["time"]
        ends = [begin, *(step["time"] for step in self.all("step") if begin < step["time"] < end)]
        return [later - earlier for earlier, later in pairwise(ends)]

    @property
    def read_bytes_per_step(self) -> float:
        return self._moved_per_step(0)

    @property
    def written_bytes_per_step(self) -> float:
        return self._moved_per_step(1)

    def _moved_per_step(self, way: int) -> float:
        moved = self.moved["end"][way] - self.moved["begin"][way]
        return moved / len(self.step_seconds)

    def counted_per_step(self, counter: str) -> float | None:
        """Of the contestant's own statistics, where it has any."""
        if counter not in self._begin:
            return None
        difference: int = self._end[counter] - self._begin[counter]
        return difference / len(self.step_seconds)

    @property
    def memory_peak(self) -> int:
        """Setting up left out: from the first step on, except while steps are timed."""
        return max(size for at, size in self.memory if at >= self._ready)

    @property
    def memory_peak_of_all(self) -> int:
        return max(size for _, size in self.memory)

    @property
    def memory_steady(self) -> int:
        """The largest after the steps that are timed."""
        return max(size for at, size in self.memory if at >= self._end["time"])

    @property
    def _ready(self) -> float:
        at: float = self.only("ready")["time"]
        return at

    @property
    def _begin(self) -> dict[str, Any]:
        return self.only("mark", name="begin")

    @property
    def _end(self) -> dict[str, Any]:
        return self.only("mark", name="end")


def watch(
    command: Sequence[str],
    *,
    environment: dict[str, str],
    timeout_s: float,
    observe: Callable[[dict[str, Any]], None],
) -> Watched:
    """Runs a contestant to its end; `observe` gets every event.

    Raises:
        ContestantFailed: it did not end well, or not within `timeout_s`.
    """
    watched = Watched()
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        ) as process,
    ):
        late = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        sampler = MemorySampler(process.pid)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                watched.events.append(event)
                observe(event)
                if event["event"] == "mark":
                    watched.moved[event["name"]] = family_moved(process.pid)
                if event.get("name") == "begin":
                    sampler.pause()
                elif event.get("name") == "end":
                    sampler.sample()  # steps may be shorter than the interval
                    sampler.go_on()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            sampler.stop()
            status = process.wait()
            late.cancel()
        watched.memory = sampler.samples
        if status != 0 or not watched.all("done"):
            said.seek(0)
            last_words = "\n".join(said.read().splitlines()[-LAST_LINES:])
            raise ContestantFailed(f"exit status {status}:\n{last_words}")
    return watched
