"""A daemon whose updates of large parameters a test holds, or lets fail, while it makes others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memd_client.connection.reattach import RepeatedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from memd_client import Session
    from memd_client.connection.shard import Shard
    from tests.daemons import Daemon, Daemons

LIBRARY = Path(__file__).parents[2] / "build/release/libstalled_device.so"
# Transfers of the volume from this size on are held. Those of a small parameter are shorter.
HELD_BYTES_MIN = 64 << 10
INPUTS, WIDTH = 24, 16
LARGE = 512 << 10  # elements, of more than one tile


@dataclass
class HeldUpdates:
    """Updates of `large` read and write the volume, and wait for it."""

    flag: Path
    daemon: Daemon

    @property
    def are_held(self) -> bool:
        return self.flag.exists()

    def hold(self) -> None:
        self.flag.touch()

    def fail(self) -> None:
        self.flag.write_text("fail")

    def release(self) -> None:
        self.flag.unlink(missing_ok=True)


def held_updates(made: Daemons, folder: Path, *, name: str = "held") -> HeldUpdates:
    flag = folder / "held"
    environ = {
        "LD_PRELOAD": str(LIBRARY),
        "STALLED_WHILE": str(flag),
        "STALLED_BYTES_MIN": str(HELD_BYTES_MIN),
        "MEMD_IO_ENGINE": "threads",
    }
    return HeldUpdates(flag, made.start("--holder-seconds", "0", name=name, environ=environ))


class SmallAndLarge(nn.Module):
    """A daemon updates them one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.Parameter(torch.randn(INPUTS, WIDTH) / INPUTS)
        self.large = nn.Parameter(torch.randn(WIDTH, LARGE // WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.small @ self.large).square().mean()


class WhenLargeIsNext:
    """Calls `action` when the value of `large` is asked for, of which the update is held. `heals`:
    the volume is well again when the answer is there."""

    def __init__(
        self,
        session: Session,
        held: HeldUpdates,
        patch: pytest.MonkeyPatch,
        action: Callable[[], None],
        *,
        heals: bool = True,
    ) -> None:
        self.count = 0
        plain_value, plain_result = session.leases.value, RepeatedStep.result

        def value(shard: Shard, *arguments: Any) -> Tensor:
            if shard.name == "large" and held.are_held and not self.count:
                self.count += 1
                action()
            return plain_value(shard, *arguments)

        def result(call: RepeatedStep) -> Any:
            if not self.count:
                held.release()  # otherwise nobody would
            try:
                return plain_result(call)
            finally:
                if heals:
                    held.release()

        patch.setattr(session.leases, "value", value)
        patch.setattr(RepeatedStep, "result", result)
