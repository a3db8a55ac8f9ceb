"""Runs beside an installed package: trains until FOLDER/stop exists, or compares that with memory.

Run: python -m tests.soak.packaged_training train|repeat FOLDER [DURABILITY [ADDRESS]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.soak.live_training import Training, losses_of, repeat_in_memory, train

DTYPE = "fp32"
ADDRESS = "unix:///run/memd/memd.sock"


# "none": what is in no snapshot is in memory alone, so that a daemon that loses it loses the job.
def main(what: str, folder: Path, durability: str = "none", address: str = ADDRESS) -> None:
    training = Training(
        address=address,
        job="packaged",
        dtype=DTYPE,
        durability=durability,
        memory="resident",
        step_in_backward=False,
        log=folder / "losses",
        stop=folder / "stop",
        end=folder / "end",
    )
    if what == "train":
        train(training)
        return
    steps, digest = training.end.read_text().split()
    computed, said = losses_of(training.log)
    losses, state = repeat_in_memory(DTYPE, int(steps))
    different = sum(computed.get(step) != {loss} for step, loss in enumerate(losses))
    report = {
        "steps": int(steps),
        "losses_different": different,
        "state_different": digest != state,
        "sessions_fenced": len(said),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
