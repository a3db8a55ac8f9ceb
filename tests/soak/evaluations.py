"""Threads evaluate models of one session while another thread trains one of them.

A frozen model always has the bits of its twin in memory. Of the trained one, each output belongs to
values that existed: none older than the last step that had returned when the use began, none newer
than the step that was under way when it ended. The same training in memory tells them all.

Run: python -m tests.soak.evaluations --seconds 60 [--threads 3] [--memory short] [--seed N]
[--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import random
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

import memd_client
from tests.daemons import daemons

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

# No use and no step takes a second: a thread that is in one for this long hangs.
PROGRESS_S = 90.0
WIDTH = 64
# Wide enough that each weight is a bucket of its own, which is evicted by itself.
WIDE = 512
# Frozen layers, and what of the job is in memory at a time: everything, or a quarter.
SIZES = {"resident": (WIDTH, 2, "32MiB"), "short": (WIDE, 40, "18MiB")}
_SHOWN = 3  # failures of each thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    threads: int
    memory: str
    seed: int
    evaluations: int
    steps: int
    wrong: int
    failed: int
    seconds: float


class Frozen(nn.Module):
    """Modules that run in one kernel each, in evaluation, and plain layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(tokens) * self.scale
        attended = self.attention(encoded, encoded, encoded, need_weights=False)[0]
        output: torch.Tensor = self.layers(x).sum() + attended
        return output


class Trained(nn.Module):
    """Without biases: then an output shows one version of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(functional.relu(self.first(x)))
        return output


@dataclass(slots=True)
class Seen:
    """When a value was seen: it has to exist by the step after `ended`, and as late as `began`."""

    began: int
    ended: int


class Evaluator:
    """One thread's uses of both models, and what it saw."""

    def __init__(self, scene: Scene, index: int, seed: int) -> None:
        self._scene = scene
        self._chance = random.Random(f"{seed}:{index}")
        self._uses: list[Callable[[], None]] = [
            *(self._call_frozen, self._frozen_in_backward, self._frozen_outside_of_calls),
            *(self._state_of_frozen, self._gather_frozen, self._call_trained, self._call_layers),
            *(self._trained_outside_of_calls, self._state_of_trained, self._gather_trained),
        ]
        self.count = self.wrong = self.failed = 0
        self.seen: dict[tuple[str, int], Seen] = {}
        self.seen_together: set[tuple[int, int, int]] = set()

    def run(self) -> None:
        while not self._scene.stop.is_set():
            use = self._chance.choice(self._uses)
            try:
                use()
            except Exception:
                self._fail(use.__name__)
            self.count += 1
            self._scene.note_progress()

    def _fail(self, what: str) -> None:
        self.failed += 1
        if self.failed <= _SHOWN:
            print(f"--- {what}\n{traceback.format_exc()}", file=sys.stderr)

    def _expect(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found, expected):
            self.wrong += 1
            if self.wrong <= _SHOWN:
                print(f"--- {what}: {found} instead of {expected}", file=sys.stderr)

    def _call_frozen(self) -> None:
        scene = self._scene
        with torch.no_grad():
            self._expect("call", scene.frozen(scene.x_frozen, scene.tokens), scene.output)

    def _frozen_in_backward(self) -> None:
        scene = self._scene
        x = scene.x_frozen.clone().requires_grad_()
        scene.frozen.layers(x).square().sum().backward()
        assert x.grad is not None
        self._expect("backward", x.grad, scene.gradient)

    def _frozen_outside_of_calls(self) -> None:
        scene, twin = self._scene, self._scene.frozen_twin
        index = self._chance.randrange(len(twin.layers))
        layer, expected = scene.frozen.layers[index], twin.layers[index]
        assert isinstance(layer, nn.Linear)
        assert isinstance(expected, nn.Linear)
        self._expect(
            "linear",
            functional.linear(scene.x_frozen, layer.weight, layer.bias).detach(),
            functional.linear(scene.x_frozen, expected.weight, expected.bias).detach(),
        )
        self._expect("sum", layer.weight.sum().detach(), expected.weight.sum().detach())
        self._expect("detach", layer.bias.detach().clone(), expected.bias.detach())

    def _state_of_frozen(self) -> None:
        expected = self._scene.frozen_twin.state_dict()
        for name, value in self._scene.frozen.state_dict().items():
            self._expect(name, value, expected[name])

    def _gather_frozen(self) -> None:
        scene = self._scene
        layer, twin = scene.frozen.attention, scene.frozen_twin.attention
        with memd_client.gather(layer):
            for found, expected in zip(layer.parameters(), twin.parameters(), strict=True):
                self._expect("gather", torch.tensor(found.tolist()), expected.detach())

    def _call_trained(self) -> None:
        began = self._scene.steps_returned
        with torch.no_grad():
            output = self._scene.trained(self._scene.x)
        self.seen_together.add((began, self._scene.steps_returned, bits_of(output)))

    def _call_layers(self) -> None:
        for name, layer in self._scene.trained.named_children():
            began = self._scene.steps_returned
            with torch.no_grad():
                self._note(f"{name} of x", began, layer(self._scene.x))

    def _trained_outside_of_calls(self) -> None:
        for name, layer in self._scene.trained.named_children():
            assert isinstance(layer, nn.Linear)
            began = self._scene.steps_returned
            output = functional.linear(self._scene.x, layer.weight)
            self._note(f"{name} of x", began, output)

    def _state_of_trained(self) -> None:
        began = self._scene.steps_returned
        for name, value in self._scene.trained.state_dict().items():
            self._note(name, began, value)

    def _gather_trained(self) -> None:
        trained = self._scene.trained
        began = self._scene.steps_returned
        with memd_client.gather(trained):
            for name, parameter in trained.named_parameters():
                self._note(name, began, parameter)
            with torch.no_grad():
                output = trained(self._scene.x)
            self.seen_together.add((began, self._scene.steps_returned, bits_of(output)))

    def _note(self, what: str, began: int, value: torch.Tensor) -> None:
        bits, ended = bits_of(value), self._scene.steps_returned
        seen = self.seen.setdefault((what, bits), Seen(began, ended))
        seen.began, seen.ended = max(seen.began, began), min(seen.ended, ended)


class Scene:
    """The models, their twins, and the thread that trains."""

    def __init__(self, session: Session, memory: str) -> None:
        width, depth, _ = SIZES[memory]
        torch.manual_seed(0)
        self.frozen_twin = Frozen(width, depth).eval().requires_grad_(False)
        self.trained_twin = Trained()
        self.frozen = copy.deepcopy(self.frozen_twin)
        self.trained = copy.deepcopy(self.trained_twin)
        memd_client.offload(nn.ModuleList([self.frozen, self.trained]), session)
        self.optimizer = memd_client.AdamW(self.trained.parameters(), lr=1e-3)
        self.x = torch.randn(8, WIDTH)
        self.x_frozen = torch.randn(8, width)
        self.tokens = torch.randn(2, 8, WIDTH)
        with torch.no_grad():
            self.output = self.frozen_twin(self.x_frozen, self.tokens)
        x = self.x_frozen.clone().requires_grad_()
        self.frozen_twin.layers(x).square().sum().backward()
        assert x.grad is not None
        self.gradient = x.grad
        self.steps_returned = 0
        self.failed = 0
        self.stop = threading.Event()
        self._progress = time.monotonic()

    def note_progress(self) -> None:
        self._progress = time.monotonic()

    @property
    def has_progress(self) -> bool:
        return time.monotonic() - self._progress < PROGRESS_S

    def train(self) -> None:
        try:
            while not self.stop.is_set():
                train_once(self.trained, self.optimizer, self.steps_returned)
                self.steps_returned += 1
                self.note_progress()
        except Exception:
            self.failed += 1
            traceback.print_exc()
            self.stop.set()


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits_of(tensor: torch.Tensor) -> int:
    return hash(tensor.detach().clone().numpy().tobytes())


def wrong_among(scene: Scene, evaluators: list[Evaluator], step_count: int) -> int:
    """Counts values of the trained model that never existed, or not at that time. Repeats the
    training in memory, by as many steps and the one that may have been under way."""
    twin, x = scene.trained_twin, scene.x
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)
    seen = [(key, seen) for each in evaluators for key, seen in each.seen.items()]
    unexplained = {(index, *key) for index, (key, _) in enumerate(seen)}
    by_bits: dict[tuple[str, int], list[int]] = {}
    for index, (key, _) in enumerate(seen):
        by_bits.setdefault(key, []).append(index)
    together = {each for evaluator in evaluators for each in evaluator.seen_together}
    longest = max((ended - began for began, ended, _ in together), default=0) + 2
    by_end: dict[int, list[tuple[int, int, int]]] = {}
    for each in together:
        by_end.setdefault(min(each[1] + 1, step_count), []).append(each)
    history: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque(maxlen=longest)
    for step in range(step_count + 1):
        with torch.no_grad():
            first, second = twin.first(x), twin.second.weight.clone()
            values = {
                "first of x": first,
                "second of x": twin.second(x),
                "first.weight": twin.first.weight,
                "second.weight": second,
            }
        for what, value in values.items():
            for index in by_bits.get((what, bits_of(value)), ()):
                when = seen[index][1]
                if when.began <= step <= when.ended + 1:
                    unexplained.discard((index, what, bits_of(value)))
        history.append((step, functional.relu(first), second))
        for each in by_end.get(step, ()):
            outputs = (
                bits_of(functional.linear(hidden, weight))
                for at, hidden, _ in history
                for also_at, _, weight in history
                if at >= each[0] and also_at >= each[0]
            )
            if each[2] in outputs:
                together.discard(each)
        if step < step_count:
            train_once(twin, optimizer, step)
    for index, what, _ in list(unexplained)[:_SHOWN]:
        print(f"--- {what} at {seen[index][1]} of {step_count} steps never was", file=sys.stderr)
    for began, ended, _ in list(together)[:_SHOWN]:
        print(f"--- the output between {began} and {ended} never was", file=sys.stderr)
    return len(unexplained) + len(together)


def run(*, seconds: float, threads: int, memory: str, seed: int) -> Outcome:
    began = time.monotonic()
    with daemons() as made:
        daemon = made.start(host="64MiB", nvme="512MiB")
        session = memd_client.connect(
            daemon.address, job="evaluations", host_bytes=SIZES[memory][2], durability="none"
        )
        scene = Scene(session, memory)
        evaluators = [Evaluator(scene, index, seed) for index in range(threads)]
        bodies = [scene.train, *(each.run for each in evaluators)]
        running = [threading.Thread(target=body, daemon=True) for body in bodies]
        for thread in running:
            thread.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not scene.stop.is_set() and scene.has_progress:
            time.sleep(0.1)
        scene.stop.set()
        for thread in running:
            thread.join(PROGRESS_S)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                raise TimeoutError("a thread hangs")
        wrong = wrong_among(scene, evaluators, scene.steps_returned)
        found = scene.trained.state_dict()
        expected = scene.trained_twin.state_dict()
        wrong += sum(not torch.equal(found[name], expected[name]) for name in expected)
        held = session.statistics().leases_held
        if held:
            raise AssertionError(f"{held} leases are still held")
        session.close()
    return Outcome(
        threads=threads,
        memory=memory,
        seed=seed,
        evaluations=sum(each.count for each in evaluators),
        steps=scene.steps_returned,
        wrong=wrong + sum(each.wrong for each in evaluators),
        failed=scene.failed + sum(each.failed for each in evaluators),
        seconds=round(time.monotonic() - began, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=3, help="that evaluate")
    parser.add_argument("--memory", choices=SIZES, default="resident")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    outcome = run(
        seconds=arguments.seconds,
        threads=arguments.threads,
        memory=arguments.memory,
        seed=arguments.seed,
    )
    text = json.dumps(asdict(outcome), indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if outcome.wrong or outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
