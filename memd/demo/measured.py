"""The demo's model trained in rounds, through memd and in memory, for `memd bench train`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch
from torch import nn

import memd_client
from memd.client import DaemonClient
from memd.demo.folder import FolderError, volume_folder
from memd.demo.model import build_model, parameter_groups
from memd.demo.plan import DemoError, Plan
from memd.demo.run import build_in_memd, private_daemon
from memd.demo.train import BETAS, LEARNING_RATE, WEIGHT_DECAY
from memd.refusal import Refused

_IDLE_POLL_S = 0.005
_IDLE_S_MAX = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRound:
    """Means of a step."""

    seconds: float
    read_bytes: float
    written_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainRound:
    """Means of a step of the same model in memory, with torch's fused AdamW."""

    forward_seconds: float
    backward_seconds: float
    compute_cpu_seconds: float  # of forward and backward, all threads
    update_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.update_seconds


class MeasuredTraining:
    """One model in a private daemon and its twin in memory; rounds of either in any order."""

    def __init__(
        self,
        plan: Plan,
        session: memd_client.Session,
        meter: DaemonClient,
        *,
        step_in_backward: bool,
    ) -> None:
        self._plan = plan
        self._session = session
        self._meter = meter
        self._step = 0
        self._model = build_in_memd(plan, session)
        self._optimizer = memd_client.AdamW(
            parameter_groups(self._model, weight_decay=WEIGHT_DECAY),
            lr=LEARNING_RATE,
            betas=BETAS,
            session=session,
            step_in_backward=step_in_backward,
        )
        self._twin: nn.Module = build_model(plan.shape, dtype=plan.dtype, seed=plan.seed)
        self._twin_optimizer = torch.optim.AdamW(
            parameter_groups(self._twin, weight_decay=WEIGHT_DECAY),
            lr=LEARNING_RATE,
            betas=BETAS,
            fused=True,
        )

    def train(self, step_count: int) -> TrainedRound:
        """Time from the end of one step's call to the end of the next one's, after one step more
        that brings the daemon into its stride: an update that goes on after a call is in the time
        of the step that waits for it. Bytes from idle to idle, over that one step too: when a call
        ends, how much of its update is still to be written depends on the machine's load."""
        self._wait_until_idle()
        read_bytes, written_bytes = self._moved_bytes()
        self._train_step()
        began = time.perf_counter()
        for _ in range(step_count):
            self._train_step()
        seconds = time.perf_counter() - began
        self._wait_until_idle()
        read_after, written_after = self._moved_bytes()
        return TrainedRound(
            seconds=seconds / step_count,
            read_bytes=(read_after - read_bytes) / (step_count + 1),
            written_bytes=(written_after - written_bytes) / (step_count + 1),
        )

    def train_in_memory(self, step_count: int) -> PlainRound:
        """After one step that is not counted."""
        clock, cpu_seconds = [0.0] * 3, 0.0
        for number in range(step_count + 1):
            inputs, targets = self._plan.batches.at(number)
            began, began_cpu = time.perf_counter(), time.process_time()
            loss = self._twin(inputs, targets)
            forward_done = time.perf_counter()
            loss.backward()
            backward_done, done_cpu = time.perf_counter(), time.process_time()
            self._twin_optimizer.step()
            self._twin_optimizer.zero_grad()
            done = time.perf_counter()
            if number:
                clock[0] += forward_done - began
                clock[1] += backward_done - forward_done
                clock[2] += done - backward_done
                cpu_seconds += done_cpu - began_cpu
        forward, backward, update = (seconds / step_count for seconds in clock)
        return PlainRound(
            forward_seconds=forward,
            backward_seconds=backward,
            compute_cpu_seconds=cpu_seconds / step_count,
            update_seconds=update,
        )

    def _train_step(self) -> None:
        inputs, targets = self._plan.batches.at(self._step)
        self._model(inputs, targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1

    def _moved_bytes(self) -> tuple[int, int]:
        """Bytes of all devices; verification in the background is no part of a step."""
        status = self._meter.status()
        return (
            sum(device.read_bytes for device in status.devices) - status.scrub.bytes,
            sum(device.written_bytes for device in status.devices),
        )

    def _wait_until_idle(self) -> None:
        """The next measurement must not share the machine with the daemon's work."""
        _ = self._session.committed_step
        deadline = time.monotonic() + _IDLE_S_MAX
        while any(each.priority != "scrub" for each in self._meter.in_flight().activities):
            if time.monotonic() > deadline:
                raise DemoError(f"the daemon was still busy {_IDLE_S_MAX:.0f} s after a step")
            time.sleep(_IDLE_POLL_S)


@contextmanager
def measured_training(
    plan: Plan,
    parent: Path,
    *,
    durability: str,
    step_in_backward: bool,
    more_bytes: int,
) -> Iterator[tuple[MeasuredTraining, Path]]:
    """Also the folder that the volume lies in, with `more_bytes` free for others.

    Raises:
        DemoError: for all that can be wrong with the folder, the daemon or the settings.
    """
    try:
        with volume_folder(parent, bytes_needed=plan.nvme_bytes + more_bytes) as folder:
            address = (
                f"embedded:{quote(str(folder))}?host={plan.host_bytes}B&nvme={plan.nvme_bytes}B"
            )
            with (
                private_daemon(address) as daemon,
                memd_client.connect(address, job="bench", durability=durability) as session,
                DaemonClient(daemon.address.attach_socket) as meter,
            ):
                yield (
                    MeasuredTraining(plan, session, meter, step_in_backward=step_in_backward),
                    folder,
                )
    except (FolderError, Refused, memd_client.MemdError) as error:
        raise DemoError(str(error)) from error
