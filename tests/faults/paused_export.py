"""`memd`, with a small window and an export that says when it has files to write, takes so long for
each piece, and stands still behind so many.

Run: python -m tests.faults.paused_export PIECES SECONDS memd's arguments...
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING
from unittest.mock import patch

from memd.cli import main
from memd.export import target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd.export.file import File

# In these tests a snapshot has some MiB.
WINDOW_BYTES = 256 << 10
STANDS_STILL_S = 600


def run(pieces: int, pace_s: float, arguments: list[str]) -> None:
    begin, reached = target.Target.begin, target.Target.reached

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def tell_begin(self: target.Target, identity: int, files: Sequence[File]) -> int:
        piece_next = begin(self, identity, files)
        say("begun\n")
        return piece_next

    def stand_still(self: target.Target, piece_next: int) -> None:
        reached(self, piece_next)
        time.sleep(pace_s)
        if piece_next == pieces:
            say("stands still\n")
            time.sleep(STANDS_STILL_S)

    with (
        patch.object(target, "_WINDOW_BYTES", WINDOW_BYTES),
        patch.object(target.Target, "begin", tell_begin),
        patch.object(target.Target, "reached", stand_still),
    ):
        main(arguments)


if __name__ == "__main__":
    run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
