"""What a commit stored of tracked objects, read where it is not as track() writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_client.base.plain import decode
from memd_client.tracked import Tracked, checked, read_stored
from tests.unit.client_cases import Mlp, build
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Callable

    Damage = Callable[[dict[str, Any]], object]


def stored() -> Any:
    session = FakeDaemon().session()
    model = memd_client.offload(build(Mlp), session)
    optimizer = memd_client.AdamW(model.parameters())
    tracked = Tracked()
    tracked.add({}, rng=True)
    data = torch.frombuffer(bytearray(tracked.encode(1, [optimizer])), dtype=torch.uint8)
    return decode(read_stored(data)[1])


DAMAGES: dict[str, Damage] = {
    "a missing generator": lambda data: data["rng"].pop("torch"),
    "one more generator": lambda data: data["rng"].update(jax=None),
    "generators that are none": lambda data: data.update(rng=3),
    "a state of Python that is none": lambda data: data["rng"].update(python=[3]),
    "a state of numpy that is none": lambda data: data["rng"].update(numpy=b"x"),
    "a state of torch that is none": lambda data: data["rng"].update(torch=None),
    "a state of CUDA that is none": lambda data: data["rng"].update(cuda=[None]),
    "other devices' states that are none": lambda data: data["rng"].update(others={"xpu": [None]}),
    "parameters that are no text": lambda data: data["optimizers"][0][0].update(parameters=4),
    "parameters without a number": lambda data: data["optimizers"][0][0].update(parameters="x y"),
    "parameters among settings": lambda data: data["optimizers"][0][0]["settings"].update(
        params=[]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_track_does_not_write_is_refused_before_anything_is_restored(damage: Damage) -> None:
    data = stored()
    assert checked(data) is data
    damage(data)
    with pytest.raises(memd_client.IntegrityError, match="not what track"):
        checked(data)
