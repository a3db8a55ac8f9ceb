"""Anonymous memory of processes, as the kernel counts it."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


def anonymous_bytes(process_id: int) -> int:
    """RssAnon: what a process has for itself alone, without shared memory such as an arena."""
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {process_id} has ended")  # a zombie has no memory lines


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no line MemAvailable")


def child_process_ids(process_id: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{process_id}/task").iterdir():
        try:
            children += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since
    return children


class PeakMemory:
    """Peak RssAnon of processes while the block runs, sampled from a thread of its own."""

    def __init__(
        self, process_ids: Sequence[int] | None = None, *, interval_s: float = 0.02
    ) -> None:
        self.peak_bytes = dict.fromkeys(process_ids or [os.getpid()], 0)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memd-memory", daemon=True)

    def _sample(self) -> None:
        for process_id, peak_bytes in self.peak_bytes.items():
            try:
                self.peak_bytes[process_id] = max(peak_bytes, anonymous_bytes(process_id))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended: its peak stands

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
