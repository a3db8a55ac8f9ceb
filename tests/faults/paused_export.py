"""`memd`, with a small window and an export that takes so long for each piece, and stands still
behind so many.

Run: python -m tests.faults.paused_export PIECES SECONDS memd's arguments...
"""

import sys
import time
from unittest.mock import patch

from memd.cli import main
from memd.export import target

# In these tests a snapshot has some MiB.
WINDOW_BYTES = 256 << 10
STANDS_STILL_S = 600


def run(pieces: int, pace_s: float, arguments: list[str]) -> None:
    reached = target.Target.reached

    def stand_still(self: target.Target, piece_next: int) -> None:
        reached(self, piece_next)
        time.sleep(pace_s)
        if piece_next == pieces:
            sys.stdout.write("stands still\n")
            sys.stdout.flush()
            time.sleep(STANDS_STILL_S)

    with (
        patch.object(target, "_WINDOW_BYTES", WINDOW_BYTES),
        patch.object(target.Target, "reached", stand_still),
    ):
        main(arguments)


if __name__ == "__main__":
    run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
