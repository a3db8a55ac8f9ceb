"""An export from its beginning to its end: the daemon reads, this process writes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memd.export.target import Target
from memd.refusal import Refused, StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memd.client import DaemonClient
    from memd.export.formats import Format
    from memd.snapshot_reading import SnapshotReading

    Progress = Callable[[int, int], None]

# A daemon that was killed is back within seconds; one that is not lets the command end.
_RETURN_S = 60.0
_LOOK_S = 0.25
# The daemon notices the end of a killed command's process, or of a lost connection, in less.
_LAST_READER_S = 5.0


@dataclass(kw_only=True, slots=True)
class SnapshotExport:
    """A user's request."""

    job: str
    snapshot: str
    path: Path
    file_format: Format
    file_bytes_max: int
    connect: Callable[[], DaemonClient]
    # Called with bytes done and bytes in all; and with news for a person.
    progress: Progress
    tell: Callable[[str], None]
    # Once the first bytes are on their way: errors of the request are known by then.
    begun: Callable[[Target], None]

    def run(self) -> dict[str, Any]:
        """
        Raises:
            Refused: what is in the way. The folder has its name when this returns, and not before;
                what was written stays beside it for the next run.
        """
        started = time.monotonic()
        with Target(self.path, self.file_format.new_checksum) as target:
            identity, piece_first = target.verify(self.progress)
            copy = _Copy(self, target, identity=identity, piece_first=piece_first)
            if piece_first:
                self.tell("goes on where an earlier export ended")
            while not copy.is_done:
                self._try(copy)
            target.place()
        return {
            "job": self.job,
            "snapshot": self.snapshot,
            "step": copy.step,
            "path": str(target.path),
            "bytes": copy.bytes_all,
            "files": copy.files,
            "seconds": time.monotonic() - started,
        }

    def _try(self, copy: _Copy) -> None:
        """Until it is done, or the daemon has gone and another one is there."""
        try:
            with self.connect() as daemon:
                copy.run(daemon)
        except Refused as refused:
            if refused.code is StatusCode.IN_USE and copy.waits_for_last_reader():
                time.sleep(_LOOK_S)
                return
            if refused.code is not StatusCode.UNAVAILABLE or not copy.has_begun:
                raise
            self.tell(f"{refused}; waits for the daemon")
            self._wait_for_daemon()

    def _wait_for_daemon(self) -> None:
        deadline = time.monotonic() + _RETURN_S
        while True:
            time.sleep(_LOOK_S)
            try:
                self.connect().close()
            except Refused as refused:
                if time.monotonic() < deadline:
                    continue
                raise type(refused)(
                    refused.code, f"{refused}; once it runs, export again: that goes on"
                ) from refused
            return


class _Copy:
    """One export's state over its connections."""

    def __init__(
        self, export: SnapshotExport, target: Target, *, identity: int, piece_first: int
    ) -> None:
        self._export = export
        self._target = target
        self._identity = identity
        self._piece_next = piece_first
        self._refused_since: float | None = None
        self.is_done = False
        self.has_begun = False
        self.step = 0
        self.bytes_all = 0
        self.files: list[str] = []

    def waits_for_last_reader(self) -> bool:
        """Whether the one in the way may be an earlier run, which has ended already."""
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        return now - self._refused_since < _LAST_READER_S

    def run(self, daemon: DaemonClient) -> None:
        """Returns when all is written, or the daemon is to be asked for another part."""
        with daemon.read_snapshot(
            self._export.job,
            self._export.snapshot,
            piece_first=self._piece_next,
            identity=self._identity,
        ) as reading:
            self._take(reading)

    def _take(self, reading: SnapshotReading) -> None:
        contents = reading.contents()
        self._refused_since = None
        self.step = contents.snapshot.step
        shards = reading.shards()
        metadata = {
            "format": "pt",  # transformers loads no file without it
            "job": self._export.job,
            "snapshot": self._export.snapshot,
            "step": str(self.step),
        }
        files = self._export.file_format.planned_files(
            shards, metadata=metadata, file_bytes_max=self._export.file_bytes_max
        )
        self.files = [file.name for file in files]
        self.bytes_all = sum(file.size_bytes for file in files)
        self._identity = contents.identity
        self._piece_next = self._target.begin(contents.identity, files)
        if not self.has_begun:
            self.has_begun = True
            self._export.begun(self._target)
        if self._piece_next != contents.piece_first:
            return  # the part that is there is of other files
        places = {
            place: (number, begin, file.ends[place])
            for number, file in enumerate(files)
            for place, begin in file.begins.items()
        }
        for answer in reading.pieces():
            for run in answer.runs:
                # Not in a file: it is memd's own.
                if (found := places.get((run.shard, run.part))) is not None:
                    number, begin, end = found
                    at = begin + run.offset_bytes
                    self._target.write(number, at, reading.bytes_of(run)[: end - at])
            self._reached(answer.piece_next, contents.piece_count)
        self.is_done = self._piece_next == contents.piece_count
        if not self.is_done:
            raise Refused(StatusCode.UNAVAILABLE, "the daemon broke the export off")

    def _reached(self, piece_next: int, piece_count: int) -> None:
        self._piece_next = piece_next
        self._target.reached(piece_next)
        done = self.bytes_all * piece_next // max(piece_count, 1)
        self._export.progress(done, self.bytes_all)
