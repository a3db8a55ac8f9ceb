"""A trainer that is killed goes on, in a new process, with the bits of a run that nothing
disturbed: parameters, batch norm, dropout, learning rate and the order of the data.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.resumed_trainer import BATCHES_OF_AN_EPOCH, STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

ROOT = Path(__file__).parents[2]
# Where and in which step each process dies; the commit of a step that was closed may have been
# made.
DEATHS = (
    ("forward", 3),
    ("backward", 6),
    ("between", BATCHES_OF_AN_EPOCH - 1),
    ("after", BATCHES_OF_AN_EPOCH - 1),
    ("during", 14),
)
CLOSED = {"after", "during"}
# An average of the weights follows each commit of an odd number: before it and after it.
AVERAGE_DEATHS = (("committed", 16), ("averaged", 18))


@dataclass
class Run:
    start: int = -1
    losses: dict[int, str] = field(default_factory=dict)
    digest: str = ""
    status: int = 0


@dataclass
class Trainers:
    process: subprocess.Popen[str]

    def train(self, *arguments: object) -> Run:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self.process.stdin.flush()
        run = Run()
        for line in self.process.stdout:
            what, *rest = line.split()
            if what == "start":
                run.start = int(rest[0])
            elif what == "loss":
                run.losses[int(rest[0])] = rest[1]
            elif what == "end":
                run.digest = rest[0]
            else:
                run.status = int(rest[0])
                return run
        raise AssertionError("the trainers' parent has ended")


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.resumed_trainer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        yield Trainers(process)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        *((model, "float32") for model in ("gpt", "normed", "averaged", "stepped")),
        pytest.param("averaged", "bfloat16", marks=pytest.mark.more),
        *(
            pytest.param(model, "bfloat16", marks=pytest.mark.soak)
            for model in ("gpt", "normed", "stepped")
        ),
    ],
)
def test_every_later_loss_has_the_same_bits(
    daemon: Daemon, trainers: Trainers, model: str, dtype: str
) -> None:
    settings = (model, dtype)
    undisturbed = trainers.train(daemon.address, f"{model}-{dtype}", *settings, "nowhere", 0)
    assert undisturbed.status == 0
    assert list(undisturbed.losses) == list(range(STEPS))
    assert len(set(undisturbed.losses.values())) == STEPS

    job = f"{model}-{dtype}-killed"
    starts = {0}
    for place, step in DEATHS + (AVERAGE_DEATHS if model == "averaged" else ()):
        if (model, place) == ("stepped", "between"):
            continue  # backward closes the step itself
        run = trainers.train(daemon.address, job, *settings, place, step)
        assert run.status == -signal.SIGKILL, place
        assert run.start in starts, place
        assert run.losses.items() <= undisturbed.losses.items(), place
        assert max(run.losses, default=-1) >= step - 1
        if place in CLOSED:
            starts = {step, step + 1}
        else:
            starts = {step + 1} if (place, step) in AVERAGE_DEATHS else {step}
    run = trainers.train(daemon.address, job, *settings, "nowhere", 0)
    assert run.status == 0
    assert run.start in starts
    assert run.losses.items() <= undisturbed.losses.items()
    assert max(run.losses) == STEPS - 1
    assert run.digest == undisturbed.digest
