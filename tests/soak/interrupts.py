"""SIGINT at random moments of a training loop, which catches each KeyboardInterrupt and goes on.

The session goes on too: every loss, before and after, has the bits of the same training in memory,
no parameter stays in use, no lease stays held, nothing hangs. Every so often the loop closes the
session instead, and the job resumes at its last commit.

Run: python -m tests.soak.interrupts --count 1000 [--tracks] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

import memd_client
from memd_client.parameters.away import AwayParameter
from tests.daemons import daemons

if TYPE_CHECKING:
    from types import TracebackType

    from memd_client import Session

WIDTH = 32
# Nothing here takes a second: after this long it hangs, and every stack is printed.
HANG_S = 60.0
# An interrupt that has not arrived by then is lost.
LOST_S = 20.0
# It is sent this long after the loop goes on, which is some steps of it.
DELAY_MAX_S = 0.04
# One in so many interrupts is followed by a new session.
RESTART_EVERY = 25
# Not a thread: it would interrupt only when this process gives up the GIL.
SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGINT)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    interrupts: int
    tracks: bool
    seed: int
    steps: int
    restarts: int
    different: int
    leaked: int
    lost: int
    in_memd: int  # interrupts that were raised where memd waits or calls others
    seconds: float


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x * self.scale)
        return output


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class Twin:
    """The same training in memory, as far as the other has come."""

    def __init__(self) -> None:
        self.model = build()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self._step = 0

    def loss_at(self, step: int) -> torch.Tensor:
        while self._step < step:
            self._loss().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1
        return self._loss()

    def _loss(self) -> torch.Tensor:
        x = batch(self._step)
        loss: torch.Tensor = (self.model(x) - x).square().mean()
        return loss


class Loop:
    """One session and its training loop, as a user would write it."""

    def __init__(self, address: str, tracks: bool) -> None:
        self.session: Session = memd_client.connect(
            address, job="interrupts", host_bytes="16MiB", durability="none"
        )
        self.tracks = tracks
        self.model = memd_client.offload(build(), self.session)
        self.optimizer = memd_client.AdamW(self.model.parameters(), lr=1e-2)
        if tracks:
            self.session.track(rng=True)
        self.step = self.session.resume() if tracks else self.session.committed_step
        self.losses: list[tuple[int, torch.Tensor]] = []

    def go_on(self) -> None:
        """After an interrupt, wherever it came: the step that was sent counts."""
        self.optimizer.zero_grad()
        if self.tracks and self.session.transaction.job.steps.is_open:
            self.session.commit()
        self.step = self.session.committed_step

    def train_once(self, chance: random.Random) -> None:
        x = batch(self.step)
        loss = (self.model(x) - x).square().mean()
        self.losses.append((self.step, loss.detach()))
        loss.backward()
        self.optimizer.clip_grad_norm_(0.5)
        self.optimizer.step()
        if self.tracks:
            self.session.commit()
        self.step += 1
        self.optimizer.zero_grad()
        self._look_around(chance.randrange(8))

    def _look_around(self, what: int) -> None:
        model, session = self.model, self.session
        if what == 0:
            with memd_client.gather(model):
                model.scale.sum()
        elif what == 1:
            model.state_dict()
        elif what == 2:
            layer = model.layers[0]
            assert isinstance(layer, nn.Linear)
            functional.linear(batch(0), layer.weight, layer.bias).sum().backward()
            self.optimizer.zero_grad()
        elif what == 3:
            session.put("x", torch.arange(3.0))
            session.get("x")
        elif what == 4:
            self._evaluate()
        elif what == 5:
            self.session.commit(wait=True) if not self.tracks else self.session.committed_step

    def _evaluate(self) -> None:
        try:
            with torch.no_grad():
                self.model(batch(0))
        finally:
            # torch's own: an interrupt within __enter__ or __exit__ leaves the gradient mode off.
            torch.set_grad_enabled(True)


class Sender:
    """Another process, which interrupts this one."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, process_group=0
        )

    def send_after(self, seconds: float) -> None:
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), f"{seconds}\n".encode())

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def interrupted(loop: Loop, sender: Sender, chance: random.Random) -> TracebackType | None:
    """Trains until the interrupt; where it came, or None if it did not."""
    until = time.monotonic() + LOST_S
    try:
        sender.send_after(chance.uniform(0, DELAY_MAX_S))
        while time.monotonic() < until:
            loop.train_once(chance)
    except KeyboardInterrupt as interrupt:
        return interrupt.__traceback__
    return None


def place_of(traceback: TracebackType | None) -> str:
    """The innermost function of memd that the interrupt went through; empty if there is none."""
    place = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if "/memd_client/" in code.co_filename and code.co_name != "_handle":
            place = f"{Path(code.co_filename).stem}.{code.co_name}"
        traceback = traceback.tb_next
    return place


def leaks_of(loop: Loop) -> list[str]:
    gc.collect()
    found = [name for name, p in loop.model.named_parameters() if type(p) is not AwayParameter]
    held = loop.session.statistics().leases_held
    if held:
        found.append(f"{held} leases")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("hooks of saved tensors")
    if not torch.is_grad_enabled():
        found.append("the gradient mode")
    return found


def run(*, count: int, tracks: bool, seed: int) -> Outcome:
    began = time.monotonic()
    chance = random.Random(seed)
    places: Counter[str] = Counter()
    different = leaked = lost = restarts = steps = 0
    twin = Twin()
    with daemons() as made:
        daemon = made.start(host="64MiB", nvme="256MiB")
        loop = Loop(daemon.address, tracks)
        sender = Sender()
        for index in range(count):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            traceback = interrupted(loop, sender, chance)
            if traceback is None:
                lost += 1
            places[place_of(traceback)] += 1
            where = place_of(traceback)
            del traceback
            if index % RESTART_EVERY == RESTART_EVERY - 1:
                committed = loop.session.committed_step
                losses = loop.losses
                loop.session.close()
                loop = Loop(daemon.address, tracks)
                loop.losses = losses
                restarts += 1
                if loop.step != committed:
                    different += 1
                    print(f"resumed at {loop.step} instead of {committed}", file=sys.stderr)
            loop.go_on()
            loop.train_once(chance)  # it goes on
            for step, loss in loop.losses:
                if not torch.equal(loss, twin.loss_at(step).detach()):
                    different += 1
                    print(f"interrupt {index} ({where}): step {step} differs", file=sys.stderr)
            loop.losses.clear()
            leaks = leaks_of(loop)
            if leaks:
                leaked += 1
                print(f"interrupt {index} ({where}): {leaks}", file=sys.stderr)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        sender.stop()
        steps = loop.session.committed_step
        twin.loss_at(steps)
        state = loop.model.state_dict()
        different += sum(
            not torch.equal(state[name], value) for name, value in twin.model.state_dict().items()
        )
        loop.session.close()
        faulthandler.cancel_dump_traceback_later()
    for place, times in places.most_common():
        print(f"{times:5} {place or 'torch and the loop'}", file=sys.stderr)
    return Outcome(
        interrupts=count,
        tracks=tracks,
        seed=seed,
        steps=steps,
        restarts=restarts,
        different=different,
        leaked=leaked,
        lost=lost,
        in_memd=count - places[""],
        seconds=round(time.monotonic() - began, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--tracks", action="store_true", help="steps are closed by commit()")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # A shell that runs it in the background ignores interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    outcome = run(count=arguments.count, tracks=arguments.tracks, seed=arguments.seed)
    text = json.dumps(asdict(outcome), indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if outcome.different or outcome.leaked or outcome.lost else 0


if __name__ == "__main__":
    sys.exit(main())
