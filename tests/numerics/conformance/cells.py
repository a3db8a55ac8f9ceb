"""One cell of the matrix: a program with memd in a pool of one size, against plain PyTorch."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import torch

import memd_client
from memd.client import DaemonClient
from memd.demo import sizes
from memd.demo.run import private_daemon
from memd_client import MemdError
from tests.numerics.conformance.program import (
    Plain,
    Program,
    Trained,
    WithMemd,
    built,
    difference,
    train,
    trained,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memd_client.session import Session

POOLS = ("large", "1/4")  # of what parameters and states need
# Its segments have 2 MiB, the least there is: a job ends in two that are partly filled.
DAEMON_HOST_BYTES = 60 << 20
SEGMENT_BYTES = 2 << 20
VOLUME_BYTES = 192 << 20

EQUAL = "equal"
REFUSED = "refused"  # by memd, in one sentence, by design
RAISES = "raises"  # as plain PyTorch does
WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Cell:
    program: Program
    pool: str

    def __str__(self) -> str:
        return f"{self.program}, pool {self.pool}"


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: str
    text: str = ""  # the error, or the first difference
    read_bytes: int = 0  # of the volume, while it trained

    @property
    def is_right(self) -> bool:
        return self.kind != WRONG


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a model needs while it is trained."""

    parameter_and_state: int
    gradient: int
    module: int

    @classmethod
    def of(cls, program: Program) -> Need:
        model = built(program)
        element_bytes = next(model.parameters()).element_size()
        trained_count = sum(parameter.numel() for parameter in trained(model))
        count = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            parameter_and_state=trained_count * sizes.STATE_BYTES
            + (count - trained_count) * element_bytes,
            gradient=trained_count * element_bytes,
            module=max(
                sum(parameter.nbytes for parameter in module.parameters(recurse=False))
                for module in model.modules()
            ),
        )

    def host_bytes(self, pool: str) -> int:
        """For the short pool: gradients, the module in use and the next one, and a quarter of
        parameters and states; with two tiles in work."""
        if pool == "large":
            return DAEMON_HOST_BYTES
        tiles = 2 * sizes.TILE_ELEMENTS * (sizes.STATE_BYTES + sizes.GRADIENT_BYTES_MAX)
        return self.gradient + self.parameter_and_state // 4 + 2 * self.module + tiles


@dataclass(frozen=True, slots=True)
class Expected:
    """The outcome of a program in plain PyTorch."""

    trained: Trained | None
    error: str = ""


def by_plain_torch(program: Program) -> Expected:
    try:
        return Expected(train(program, Plain()))
    except Exception as error:
        return Expected(None, _sentence(error))
    finally:
        _forget_compiled()


class Bench:
    """Trains cells with one daemon, one job after the other."""

    def __init__(self, address: str, meter: DaemonClient) -> None:
        self._address = address
        self._meter = meter

    def verdict(self, cell: Cell, expected: Expected) -> Verdict:
        read_before = self._read_bytes()
        try:
            found = self._trained(cell)
        except MemdError as error:
            if cell.program.is_refused and expected.trained is not None:
                return Verdict(REFUSED, _sentence(error))
            return Verdict(WRONG, _sentence(error))
        except Exception as error:
            text = _sentence(error)
            if not expected.error:
                return Verdict(WRONG, text)
            shown = "" if text == expected.error else f" With memd: {text}"
            return Verdict(RAISES, expected.error + shown)
        finally:
            _forget_compiled()
        read_bytes = self._read_bytes() - read_before
        text = self._complaint(cell, found, expected, read_bytes)
        return Verdict(WRONG if text else EQUAL, text, read_bytes)

    def _complaint(self, cell: Cell, found: Trained, expected: Expected, read_bytes: int) -> str:
        if expected.trained is None:
            return f"plain PyTorch raises: {expected.error}"
        if cell.program.is_refused:
            return "memd trains what it should refuse"
        if cell.program.autocasts and not expected.trained.skipped_steps:
            return "the program skips no step"
        # Moments that were never updated are not read, so half of frozen parameters count less.
        quarter = Need.of(cell.program).parameter_and_state // 4
        if cell.pool == "1/4" and read_bytes < quarter:
            return f"the pool is not short: {read_bytes} bytes were read, less than {quarter}"
        return difference(found, expected.trained)

    def _trained(self, cell: Cell) -> Trained:
        host_bytes = Need.of(cell.program).host_bytes(cell.pool)
        with self._session(host_bytes) as session:
            return train(
                cell.program,
                WithMemd(session, step_in_backward=cell.program.steps_in_backward),
            )

    @contextmanager
    def _session(self, host_bytes: int) -> Iterator[Session]:
        session = memd_client.connect(self._address, job="cell", host_bytes=host_bytes, fresh=True)
        try:
            yield session
        finally:
            gc.collect()  # what an exception's traceback keeps
            session.drop_job()

    def _read_bytes(self) -> int:
        return sum(device.read_bytes for device in self._meter.status().devices)


@contextmanager
def bench(folder: Path) -> Iterator[Bench]:
    """With a daemon of its own, whose volume is in `folder`."""
    torch.set_num_threads(1)  # the tensors are small
    warnings.simplefilter("ignore")
    address = f"embedded:{quote(str(folder))}?host={DAEMON_HOST_BYTES}B&nvme={VOLUME_BYTES}B"
    with private_daemon(address) as daemon, DaemonClient(daemon.address.attach_socket) as meter:
        yield Bench(address, meter)


def _sentence(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _forget_compiled() -> None:
    torch.compiler.reset()
