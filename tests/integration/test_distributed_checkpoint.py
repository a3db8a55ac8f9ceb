"""torch.distributed.checkpoint streams out of memd, into files that plain torch reads."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.nn import functional

import memd_client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

WIDTH = 64
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Model(nn.Module):
    """Trained parameters, a frozen one of another dtype with an odd number of bytes, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = nn.Parameter(
            torch.randint(0, 256, (5, 3), dtype=torch.uint8), requires_grad=False
        )
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.register_buffer("scale", torch.rand(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x + self.frozen.sum() * 1e-5


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, 1e-3, fused=True, **settings)


def memd_adamw(model: nn.Module, **settings: Any) -> memd_client.AdamW:
    return memd_client.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, **settings)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextmanager
def fresh(daemon: Daemon, job: str, **quotas: Any) -> Iterator[memd_client.Session]:
    """A session of a new job, which goes with it."""
    session = memd_client.connect(daemon.address, job=job, fresh=True, **quotas)
    try:
        yield session
    finally:
        session.drop_job()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Without the bytes of what is in memd."""
    return {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}


def stream_out(state: dict[str, Any], path: Path) -> None:
    save(state, storage_writer=memd_client.checkpoint.Writer(path))


def plain_load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """By plain torch alone, into a model and an optimizer of plain torch."""
    trained(model, optimizer, range(1))  # torch's optimizer has no state to load into before
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.param_groups[0]["fused"] = True  # which memd's need not be told


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert bits(found[name]) == bits(value), name


def assert_same_moments(found: torch.optim.Optimizer, wanted: torch.optim.Optimizer) -> None:
    ours, theirs = found.state_dict()["state"], wanted.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        assert_same(ours[index], state)


def bits(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def the_error(raised: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """What torch has wrapped."""
    ((error, _),) = raised.value.failures.values()
    return error


# Out


@pytest.mark.parametrize("amsgrad", [False, True])
def test_plain_torch_reads_a_trained_job_and_trains_on_with_the_same_bits(
    daemon: Daemon, tmp_path: Path, amsgrad: bool
) -> None:
    with fresh(daemon, f"dcp-out-{amsgrad}") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model, amsgrad=amsgrad)
        trained(model, optimizer, range(3))
        stream_out(state_of(model, optimizer), tmp_path / "a")
        assert session.statistics().leases_held == 0
        assert session.committed_step == 3
        plain = Model(seed=1)
        torchs = adamw(plain, amsgrad=amsgrad)
        plain_load(tmp_path / "a", plain, torchs)
        assert_same(plain.state_dict(), model.state_dict())
        assert_same_moments(torchs, optimizer)
        assert torchs.state_dict()["state"][0]["step"] == 3
        assert trained(plain, torchs, range(3, 5)) == trained(model, optimizer, range(3, 5))
        assert_same(plain.state_dict(), model.state_dict())
        assert_same_moments(torchs, optimizer)


def test_the_recipe_with_names_of_parameters_is_read_by_plain_torch(
    daemon: Daemon, tmp_path: Path
) -> None:
    with fresh(daemon, "dcp-names") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(2))
        model_state, state = get_state_dict(model, optimizer)
        stream_out({"model": model_state, "optimizer": state}, tmp_path / "a")
        plain = Model(seed=1)
        torchs = adamw(plain)
        model_state, state = get_state_dict(plain, torchs)
        loaded: dict[str, Any] = {"model": model_state, "optimizer": state}
        load(loaded, checkpoint_id=tmp_path / "a")
        set_state_dict(
            plain,
            torchs,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert_same(plain.state_dict(), model.state_dict())
        assert_same_moments(torchs, optimizer)


def test_objects_with_a_state_are_saved_as_torch_saves_them(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "dcp-stateful") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        stream_out({"model": model, "optimizer": optimizer, "epoch": 7}, tmp_path / "a")
        found: dict[str, Any] = {"model": Model(seed=1).state_dict(), "epoch": 0}
        load(found, checkpoint_id=tmp_path / "a")
        assert found["epoch"] == 7
        assert_same(found["model"], model.state_dict())


def test_one_parameter_is_leased_at_a_time_and_its_moments_are_not_kept(
    daemon: Daemon, tmp_path: Path
) -> None:
    """A state_dict that has read moments keeps them: the Writer reads past it."""
    held: list[int] = []

    class Counting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            held.append(session.statistics().leases_held)
            return super().resolve_data(write_item)

    with fresh(daemon, "dcp-passing") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        state = state_of(model, optimizer)
        writer = memd_client.checkpoint.Writer(tmp_path / "a")
        save(state, storage_writer=writer, planner=Counting())
        assert set(held) == {0}
        moments = session.transaction.moments
        wholes = [each["exp_avg"].whole for each in state["optimizer"]["state"].values()]
        assert wholes
        assert all(whole.is_unread_in(moments) for whole in wholes)


def test_a_model_that_is_larger_than_its_pool_is_saved(daemon: Daemon, tmp_path: Path) -> None:
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]  # 24 MiB, and 48 of moments
    with fresh(daemon, "dcp-large", host_bytes="16MiB") as session:
        model = memd_client.offload(nn.Sequential(*layers), session)
        optimizer = memd_client.AdamW(model.parameters(), 1e-3)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        stream_out(state_of(model, optimizer), tmp_path / "a")
        found = {"model": {name: torch.empty(1024, 1024) for name in model.state_dict()}}
        load(found, checkpoint_id=tmp_path / "a")
        assert_same(found["model"], model.state_dict())
        assert session.statistics().leases_held == 0


@pytest.mark.parametrize("change", ["step", "load", "write"])
def test_moments_that_the_optimizer_has_no_more_are_not_saved_beside_parameters_of_now(
    daemon: Daemon, tmp_path: Path, change: str
) -> None:
    """In torch a state shows the moments of now, as it does the parameters."""
    with fresh(daemon, "dcp-outdated") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        state = state_of(model, optimizer)
        first = state["optimizer"]["state"][0]["exp_avg"]
        assert first.sum() != 0  # whoever has looked at them may save them
        stream_out(state, tmp_path / "a")
        if change == "step":
            trained(model, optimizer, range(1, 2))
        elif change == "load":
            other = optimizer.state_dict()
            other["state"][0]["exp_avg"] = torch.ones(first.shape)
            optimizer.load_state_dict(other)
        else:
            first.zero_()
        before = {name: (tmp_path / "a" / name).read_bytes() for name in names_in(tmp_path / "a")}
        with pytest.raises(CheckpointException) as raised:
            stream_out(state, tmp_path / "a")
        assert isinstance(the_error(raised), memd_client.InvalidArgument)
        assert "call state_dict() again" in str(the_error(raised))
        for name, data in before.items():
            assert (tmp_path / "a" / name).read_bytes() == data
        assert names_in(tmp_path / "a") == sorted(before)
        stream_out(state_of(model, optimizer), tmp_path / "a")


def test_a_state_is_saved_when_its_session_is_over(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "dcp-over") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        stream_out(state, tmp_path / "a")
    stream_out(state, tmp_path / "b")
    for found in ("a", "b"):
        plain = Model(seed=1)
        torchs = adamw(plain)
        plain_load(tmp_path / found, plain, torchs)
        assert_same(plain.state_dict(), state["model"])
        for index, moments in state["optimizer"]["state"].items():
            assert bits(torchs.state_dict()["state"][index]["exp_avg"]) == bits(moments["exp_avg"])


def test_a_second_save_replaces_the_first_and_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save({"x": torch.zeros(3)}, checkpoint_id=path)  # torch's own
    (path / "__0_0.0123456789ab.distcp").write_bytes(b"left by a process that was killed")
    (path / "notes.txt").write_text("not memd's")
    for value in (1.0, 2.0):
        stream_out({"x": torch.full((3,), value)}, path)
        found = {"x": torch.zeros(3)}
        load(found, checkpoint_id=path)
        assert found["x"].tolist() == [value] * 3
        kinds = [name for name in names_in(path) if name.endswith(".distcp")]
        assert len(kinds) == 1
    assert len(names_in(path)) == 3


@contextmanager
def no_file_larger_than(size_bytes: int) -> Iterator[None]:
    """As a full disk: EFBIG in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_writer_that_saves_again_keeps_the_earlier_items_until_the_end(tmp_path: Path) -> None:
    writer = memd_client.checkpoint.Writer(tmp_path / "a")
    names = []
    for value in (1.0, 2.0):
        save({"x": torch.full((3,), value)}, storage_writer=writer)
        names += [name for name in names_in(tmp_path / "a") if name.endswith(".distcp")]
    assert len(set(names)) == 2


def test_a_full_disk_is_one_clear_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a"
    with no_file_larger_than(64 << 10), pytest.raises(CheckpointException) as raised:
        stream_out({"x": torch.zeros(1 << 16)}, path)
    error = the_error(raised)
    assert isinstance(error, memd_client.CapacityError)
    assert "there is no room; what was written is removed" in str(error)
    assert names_in(tmp_path) == []


def test_a_save_of_a_job_that_fails_ends_its_leases(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "dcp-full") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        state = state_of(model, optimizer)
        with no_file_larger_than(8 << 10), pytest.raises(CheckpointException) as raised:
            stream_out(state, tmp_path / "a")
        assert isinstance(the_error(raised), memd_client.CapacityError)
        assert session.statistics().leases_held == 0
        assert names_in(tmp_path) == []
        trained(model, optimizer, range(1, 2))
        stream_out(state_of(model, optimizer), tmp_path / "a")


def test_an_earlier_checkpoint_survives_a_save_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    stream_out({"x": torch.ones(1 << 16)}, path)
    before = {name: (path / name).read_bytes() for name in names_in(path)}
    rename = os.rename

    def fail_at_the_last(source: Any, target: Any) -> None:
        if str(target).endswith("/.metadata"):
            raise OSError(5, os.strerror(5))
        rename(source, target)

    with no_file_larger_than(64 << 10), pytest.raises(CheckpointException) as raised:
        stream_out({"x": torch.zeros(1 << 16)}, path)
    assert isinstance(the_error(raised), memd_client.CapacityError)
    assert {name: (path / name).read_bytes() for name in names_in(path)} == before
    monkeypatch.setattr(os, "rename", fail_at_the_last)
    with pytest.raises(CheckpointException) as raised:
        stream_out({"x": torch.zeros(1 << 16)}, path)
    assert isinstance(the_error(raised), memd_client.DeviceError)
    assert {name: (path / name).read_bytes() for name in names_in(path)} == before
    found = {"x": torch.zeros(1 << 16)}
    load(found, checkpoint_id=path)
    assert found["x"].eq(1).all()


def test_two_saves_to_one_folder_at_a_time_are_refused(tmp_path: Path) -> None:
    writer = memd_client.checkpoint.Writer(tmp_path / "a")

    class Nested(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            with pytest.raises(CheckpointException) as raised:
                stream_out({"x": torch.zeros(3)}, tmp_path / "a")
            assert "another dcp.save writes to" in str(the_error(raised))
            return super().resolve_data(write_item)

    save({"x": torch.ones(3)}, storage_writer=writer, planner=Nested())
    found = {"x": torch.zeros(3)}
    load(found, checkpoint_id=tmp_path / "a")
    assert found["x"].tolist() == [1.0] * 3


def test_between_step_and_commit_nothing_is_saved(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "dcp-between") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        session.track(rng=True)
        state = {"model": model.state_dict(keep_vars=True)}
        trained(model, optimizer, range(1))
        with pytest.raises(CheckpointException) as raised:
            stream_out(state, tmp_path / "a")
        assert isinstance(the_error(raised), memd_client.InvalidArgument)
        assert "commit()" in str(the_error(raised))
        assert names_in(tmp_path) == []
        session.commit()
        stream_out(state, tmp_path / "a")


def test_what_is_not_there_yet_is_refused_in_a_sentence(tmp_path: Path) -> None:
    writer = memd_client.checkpoint.Writer(tmp_path / "a")
    with pytest.raises(memd_client.NotYet, match=r"dcp\.async_save needs a snapshot"):
        async_save({"x": torch.zeros(3)}, storage_writer=writer)
    with pytest.raises(memd_client.NotYet, match="use_collectives"):
        save({"x": torch.zeros(3)}, storage_writer=writer, use_collectives=False)
    with pytest.raises(memd_client.NotYet, match="2 ranks"):
        writer.prepare_global_plan([SavePlan([]), SavePlan([])])
    assert names_in(tmp_path) == []
