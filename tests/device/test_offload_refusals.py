"""`offload(device=...)` refuses in one sentence, before anything has changed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from memd_client import CapacityError, InvalidArgument, MemdError, NotResident, NotYet
from memd_client.core.ranks import Ranks
from tests.device.models import are_equal
from tests.device.offloaded import LOOPS, batch, reference, train
from tests.device.offloaded_models import build
from tests.device.simulation import SIM
from tests.device.trained import connected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session
    from tests.daemons import Daemon


@pytest.fixture
def session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with connected(daemon, monkeypatch) as session:
        yield session


def assert_nothing_has_changed(model: nn.Module, session: Session) -> None:
    """The model is what it was, and can be offloaded still."""
    assert {each.device.type for each in model.parameters()} == {"cpu"}
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    memd_client.offload(model, session, device="sim")
    assert are_equal(train(model, session, LOOPS[0], "sim"), reference("norms", LOOPS[0], "sim"))


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device 'cuda' is not there: torch finds 'sim'"),
        ("sim:9", r"device 'sim:9' is not there: torch finds \d, of which the last is sim:\d"),
        ("gpu", 'device is "cpu" or an accelerator of this machine'),
    ],
)
def test_a_device_that_is_not_there(session: Session, device: str, message: str) -> None:
    model = build("norms")
    with pytest.raises(InvalidArgument, match=message):
        memd_client.offload(model, session, device=device)
    assert_nothing_has_changed(model, session)


def test_a_budget_below_the_largest_module_says_how_much_it_needs(session: Session) -> None:
    model = build("norms")
    with pytest.raises(InvalidArgument, match="device_bytes is below what module 'second'") as info:
        memd_client.offload(model, session, device="sim", device_bytes=100)
    needed = re.search(r"pass (\d+) or more", str(info.value))
    assert needed
    least = int(needed[1])
    with pytest.raises(InvalidArgument, match="device_bytes is below"):
        memd_client.offload(model, session, device="sim", device_bytes=least - 1)
    memd_client.offload(model, session, device="sim", device_bytes=least)
    assert are_equal(train(model, session, LOOPS[0], "sim"), reference("norms", LOOPS[0], "sim"))


def test_a_budget_without_a_device(session: Session) -> None:
    model = build("norms")
    with pytest.raises(InvalidArgument, match="device_bytes=4096 needs a device"):
        memd_client.offload(model, session, device_bytes=4096)
    assert_nothing_has_changed(model, session)


def test_a_device_without_room(session: Session) -> None:
    model = build("norms")
    with (
        SIM.limit(1),
        pytest.raises(CapacityError, match=r"sim:0 has no room for .* of parameters"),
    ):
        memd_client.offload(model, session, device="sim")
    assert_nothing_has_changed(model, session)


def test_a_model_half_on_the_device(session: Session) -> None:
    model = build("norms")
    model.second.to("sim")
    with pytest.raises(
        InvalidArgument, match=r"parameter 'second.weight' is on sim:0, and offload\(\) takes a"
    ):
        memd_client.offload(model, session, device="sim")
    model.second.to("cpu")
    assert_nothing_has_changed(model, session)


def test_a_buffer_on_the_device(session: Session) -> None:
    model = build("norms")
    norm = model.get_submodule("norm")
    norm.running_mean = norm.get_buffer("running_mean").to("sim")
    with pytest.raises(InvalidArgument, match=r"buffer 'norm\.running_mean' is on sim:0"):
        memd_client.offload(model, session, device="sim")
    norm.running_mean = norm.get_buffer("running_mean").cpu()
    assert_nothing_has_changed(model, session)


def test_several_ranks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("norms")
    with monkeypatch.context() as patched:
        patched.setattr(Ranks, "are_several", property(lambda _: True))
        with pytest.raises(NotYet, match="several ranks with devices"):
            memd_client.offload(model, session, device="sim")
    assert_nothing_has_changed(model, session)


def test_layers_in_tiles(session: Session) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    memd_client.tile_linears(model, bytes_max=4096)
    with pytest.raises(NotYet, match="layers in tiles on a device"):
        memd_client.offload(model, session, device="sim")


# Uses of a model on a device that come in a later version.


def stepping_in_backward(model: nn.Module, session: Session) -> None:
    del session
    memd_client.AdamW(model.parameters(), step_in_backward=True)


def compiled(model: nn.Module, session: Session) -> None:
    del session
    torch.compile(model, backend="eager")(batch(0).to("sim"))


def transformed(model: nn.Module, session: Session) -> None:
    del session
    torch.func.grad(lambda x: model(x).sum())(batch(0).to("sim"))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (transformed, r"transforms of torch\.func over parameters on sim:0"),
        (stepping_in_backward, "step_in_backward=True with parameters on a device"),
        (compiled, "torch.compile over parameters on a device"),
    ],
)
def test_what_comes_later(
    session: Session, use: Callable[[nn.Module, Session], Any], message: str
) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim")
    with pytest.raises(MemdError, match=message) as info:
        use(model, session)
    assert type(info.value) is NotYet
    assert "later version" in str(info.value)


def test_a_gradient_on_another_device(session: Session) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim")
    parameter = next(model.parameters())
    with pytest.raises(InvalidArgument, match="neither on the parameter's device nor in host"):
        parameter.grad = torch.ones(parameter.shape, device="sim:1")
    assert parameter.grad is None


def test_data_on_another_device(session: Session) -> None:
    model = memd_client.offload(build("mlp"), session, device="sim")
    parameter = next(model.parameters())
    before = parameter.detach().cpu()
    with pytest.raises(NotResident, match=r"cannot become torch\.float32 .* on cpu there"):
        parameter.data = torch.ones(parameter.shape)
    assert torch.equal(parameter.detach().cpu(), before)
