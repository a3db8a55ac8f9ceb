"""The guide's picture of a step on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.device.draw_timeline import PICTURE, draw, one_step
from tests.device.simulation import SIM

if TYPE_CHECKING:
    from tests.daemons import Daemon


@pytest.mark.parametrize("seed", [0, 1])
def test_the_guides_picture_is_that_of_a_step(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    SIM.seed(seed)
    picture = draw(one_step(daemon, monkeypatch))
    assert PICTURE.read_text(encoding="utf-8") == picture, (
        "run python -m tests.device.draw_timeline"
    )
