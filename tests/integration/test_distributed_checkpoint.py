"""torch.distributed.checkpoint streams out of memd and into it, in files of plain torch."""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional

import memd_client
from memd_client.checkpoints import checkpoint_reader
from tests.daemons import fresh
from tests.integration.full_disk import no_file_larger_than

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem

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


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Without the bytes of what is in memd."""
    return {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}


def stream_out(state: dict[str, Any], path: Path) -> None:
    save(state, storage_writer=memd_client.checkpoint.Writer(path))


def stream_in(state: dict[str, Any], path: Path) -> None:
    load(state, storage_reader=memd_client.checkpoint.Reader(path))


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
    """memd's error, which torch has wrapped."""
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
    with pytest.raises(memd_client.NotYet, match="use_collectives"):
        save({"x": torch.zeros(3)}, storage_writer=writer, use_collectives=False)
    with pytest.raises(memd_client.NotYet, match="2 ranks"):
        writer.prepare_global_plan([SavePlan([]), SavePlan([])])
    assert names_in(tmp_path) == []


# In


def saved(path: Path, steps: int = 3, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """By plain torch, what was trained there."""
    plain = Model(seed=1)
    torchs = adamw(plain, **settings)
    trained(plain, torchs, range(steps))
    save({"model": plain.state_dict(), "optimizer": torchs.state_dict()}, checkpoint_id=path)
    return plain, torchs


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    states = optimizer.state_dict()["state"].values()
    return [
        *(bits(value) for value in model.state_dict().values()),
        *(bits(value) for state in states for value in state.values()),
    ]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_job_takes_what_plain_torch_has_saved_and_trains_on_with_the_same_bits(
    daemon: Daemon, tmp_path: Path, amsgrad: bool
) -> None:
    plain, torchs = saved(tmp_path / "a", amsgrad=amsgrad)
    with fresh(daemon, f"dcp-in-{amsgrad}") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model, amsgrad=amsgrad)
        trained(model, optimizer, range(10, 11))
        state = state_of(model, optimizer)
        stream_in(state, tmp_path / "a")
        assert_same(model.state_dict(), plain.state_dict())
        optimizer.load_state_dict(state["optimizer"])
        assert_same_moments(optimizer, torchs)
        assert session.statistics().leases_held == 0
        assert trained(model, optimizer, range(3, 5)) == trained(plain, torchs, range(3, 5))
        assert_same(model.state_dict(), plain.state_dict())
        assert_same_moments(optimizer, torchs)


def test_a_new_job_takes_what_another_has_saved(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "dcp-from") as session:
        first = memd_client.offload(Model(seed=1), session)
        ours = memd_adamw(first)
        trained(first, ours, range(2))
        stream_out(state_of(first, ours), tmp_path / "a")
        expected = everything(first, ours)
    with fresh(daemon, "dcp-to") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        state = state_of(model, optimizer)
        stream_in(state, tmp_path / "a")
        optimizer.load_state_dict(state["optimizer"])
        assert everything(model, optimizer) == expected


def test_a_load_keeps_no_moment_in_this_process(daemon: Daemon, tmp_path: Path) -> None:
    saved(tmp_path / "a")
    with fresh(daemon, "dcp-unkept") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        state = state_of(model, optimizer)
        stream_in(state, tmp_path / "a")
        optimizer.load_state_dict(state["optimizer"])
        wholes = {each["exp_avg"].whole for each in state["optimizer"]["state"].values()}
        assert len(wholes) == 6
        assert all(whole.is_passing for whole in wholes)


def test_moments_of_a_checkpoint_are_not_saved_beside_later_parameters(
    daemon: Daemon, tmp_path: Path
) -> None:
    saved(tmp_path / "a")
    with fresh(daemon, "dcp-later") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        state = state_of(model, optimizer)
        stream_in(state, tmp_path / "a")
        optimizer.load_state_dict(state["optimizer"])
        trained(model, optimizer, range(3, 4))
        with pytest.raises(CheckpointException) as raised:
            stream_out(state, tmp_path / "b")
        assert "call state_dict() again" in str(the_error(raised))
        assert names_in(tmp_path) == ["a"]


def test_a_model_that_is_larger_than_its_pool_is_loaded(daemon: Daemon, tmp_path: Path) -> None:
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(6)]  # 24 MiB, and 48 of moments
    plain = nn.Sequential(*layers)
    torchs = torch.optim.AdamW(plain.parameters(), fused=True)
    plain(torch.ones(1, 1024)).sum().backward()
    torchs.step()
    save({"model": plain.state_dict(), "optimizer": torchs.state_dict()}, checkpoint_id=tmp_path)
    with fresh(daemon, "dcp-large-in", host_bytes="16MiB", nvme_bytes="300MiB") as session:
        with memd_client.init(session):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
        optimizer = memd_client.AdamW(model.parameters())
        state = state_of(model, optimizer)
        stream_in(state, tmp_path)
        optimizer.load_state_dict(state["optimizer"])
        assert_same(model.state_dict(), plain.state_dict())
        assert_same_moments(optimizer, torchs)


def test_an_archive_is_fetched_before_the_tensor_in_it_is_looked_for(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each waits for the disk several times, alone."""
    saved(tmp_path)
    fetched: set[str] = set()
    ahead: list[int] = []
    looked_for: set[str] = set()
    fetch_ends, run = checkpoint_reader._Files.fetch_ends, checkpoint_reader._Files.run

    def noted_fetch(files: checkpoint_reader._Files, item: ReadItem) -> None:
        fetched.add(item.storage_index.fqn)
        ahead.append(len(fetched - looked_for))
        fetch_ends(files, item)

    def noted_run(files: checkpoint_reader._Files, item: ReadItem) -> Any:
        looked_for.add(item.storage_index.fqn)
        assert looked_for <= fetched
        return run(files, item)

    monkeypatch.setattr(checkpoint_reader, "_ARCHIVES_AHEAD", 3)
    monkeypatch.setattr(checkpoint_reader._Files, "fetch_ends", noted_fetch)
    monkeypatch.setattr(checkpoint_reader._Files, "run", noted_run)
    with fresh(daemon, "dcp-archives") as session:
        model = memd_client.offload(Model(seed=1), session)
        optimizer = memd_adamw(model)
        stream_in(state_of(model, optimizer), tmp_path)
    assert len(looked_for) > 12
    # The numbers of updates are read first.
    steps = sum(name.endswith(".step") for name in fetched)
    assert max(ahead) <= steps + 3 + 1


def test_no_tensor_of_the_job_is_loaded_before_it_goes_to_its_place(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, torchs = saved(tmp_path)
    loaded: list[str] = []
    tensor = checkpoint_reader._Files.tensor

    def noted(files: Any, item: ReadItem) -> torch.Tensor:
        loaded.append(item.storage_index.fqn)
        return tensor(files, item)

    monkeypatch.setattr(checkpoint_reader._Files, "tensor", noted)
    with fresh(daemon, "dcp-direct") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        stream_in(state_of(model, optimizer), tmp_path)
        assert {name.rpartition(".")[2] for name in loaded} == {"step"}
        assert_same(model.state_dict(), plain.state_dict())
        assert_same_moments(optimizer, torchs)


class InTwo(DefaultSavePlanner):
    """Saves each tensor in two items, as two ranks do."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self._dimension = dimension

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [part for item in plan.items for part in self._parts(item)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        for first, count in self._halves(value.shape) if isinstance(value, torch.Tensor) else ():
            if index.offset is not None and index.offset[self._dimension] == first:
                return value.narrow(self._dimension, first, count).clone()
        return super().lookup_object(index)

    def _halves(self, shape: torch.Size) -> list[tuple[int, int]]:
        if len(shape) <= self._dimension or shape[self._dimension] < 2:
            return []
        half = shape[self._dimension] // 2
        return [(0, half), (half, shape[self._dimension] - half)]

    def _parts(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        halves = self._halves(data.size) if data is not None else []
        if data is None or not halves:
            return [item]
        parts = []
        for first, count in halves:
            offsets, sizes = [0] * len(data.size), list(data.size)
            offsets[self._dimension], sizes[self._dimension] = first, count
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            parts.append(
                WriteItem(
                    index=MetadataIndex(item.index.fqn, chunk.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, data.properties, data.size),
                )
            )
        return parts


@pytest.mark.parametrize("dimension", [0, 1])
def test_tensors_of_several_items_are_put_together(
    daemon: Daemon, tmp_path: Path, dimension: int
) -> None:
    """Halves of rows are read where they go, and halves of columns by torch."""
    plain = Model(seed=1)
    torchs = adamw(plain)
    trained(plain, torchs, range(3))
    state = {"model": plain.state_dict(), "optimizer": torchs.state_dict()}
    save(state, checkpoint_id=tmp_path, planner=InTwo(dimension))
    with fresh(daemon, f"dcp-halves-{dimension}") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        stream_in(state_of(model, optimizer), tmp_path)
        assert_same(model.state_dict(), plain.state_dict())
        assert_same_moments(optimizer, torchs)


def test_a_tensor_whose_elements_lie_in_another_order_is_loaded(
    daemon: Daemon, tmp_path: Path
) -> None:
    plain, _ = saved(tmp_path / "a")
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    name = "layers.0.weight"
    state[name] = state[name].t().contiguous().t()
    save({"model": state}, checkpoint_id=tmp_path / "b")
    with fresh(daemon, "dcp-transposed") as session:
        model = memd_client.offload(Model(), session)
        stream_in({"model": model.state_dict(keep_vars=True)}, tmp_path / "b")
        assert_same(model.state_dict(), plain.state_dict())


def truncate(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    os.truncate(data, data.stat().st_size - 1000)


def damage_an_item(path: Path) -> None:
    """The archive of the last moment has no end any more, and the file is as long as before."""
    (data,) = path.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-200] + bytes(200))


def save_other_dtypes(path: Path) -> None:
    plain = Model(seed=1).double()
    torchs = adamw(plain)
    loss = plain(torch.ones(1, WIDTH, dtype=torch.float64)).sum()
    loss.backward()
    torchs.step()
    save({"model": plain.state_dict(), "optimizer": torchs.state_dict()}, checkpoint_id=path)


def save_too_few(path: Path) -> None:
    save({"model": Model(seed=1).state_dict()}, checkpoint_id=path)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate, "is truncated"),
        (damage_an_item, "is damaged or hostile"),
        (save_other_dtypes, r"float64 \[64, 64\] in the checkpoint and torch.float32"),
        (save_too_few, "Missing key in checkpoint state_dict: optimizer"),
    ],
)
def test_what_does_not_fit_changes_nothing_of_the_job(
    daemon: Daemon, tmp_path: Path, harm: Any, message: str
) -> None:
    saved(tmp_path / "a")
    harm(tmp_path / "a")
    with fresh(daemon, "dcp-harm") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        before = everything(model, optimizer)
        with pytest.raises(CheckpointException, match=message):
            stream_in(state_of(model, optimizer), tmp_path / "a")
        assert everything(model, optimizer) == before
        names = [shard.spec.name for shard in session.transaction.job.shards.list_all()]
        assert not [name for name in names if name.startswith("@load/")]
        trained(model, optimizer, range(1, 2))


class Hostile:
    """Its pickle calls a function."""

    def __init__(self, called: Path) -> None:
        self._called = called

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._called),)


def test_a_hostile_metadata_is_refused_by_name_and_calls_nothing(tmp_path: Path) -> None:
    called = tmp_path / "called"
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"x": Hostile(called)}))
    with pytest.raises(memd_client.InvalidArgument, match=r"posix\.mkdir.*nothing was called"):
        stream_in({"x": torch.zeros(3)}, tmp_path)
    assert not called.exists()


def test_a_metadata_cannot_change_a_class(tmp_path: Path) -> None:
    text = (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n"  # the class itself
        b"(N(dVversion\nVchanged\nstb."  # BUILD with attributes to set
    )
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(memd_client.InvalidArgument, match="it sets fields of"):
        stream_in({"x": torch.zeros(3)}, tmp_path)
    assert Metadata.version is None


def test_a_metadata_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../a/__0_0.distcp"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(memd_client.InvalidArgument, match="no file of its folder"):
        stream_in({"x": torch.zeros(3)}, tmp_path / "a")


def test_a_hostile_value_beside_the_tensors_calls_nothing(tmp_path: Path) -> None:
    called = tmp_path / "called"
    save({"x": torch.ones(3), "y": Hostile(called)}, checkpoint_id=tmp_path / "a")
    found: dict[str, Any] = {"x": torch.zeros(3), "y": 0}
    with pytest.raises(CheckpointException, match=r"posix\.mkdir"):
        stream_in(found, tmp_path / "a")
    assert not called.exists()
    assert found["x"].tolist() == [0.0] * 3


def test_a_folder_without_a_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(memd_client.InvalidArgument, match="No such file"):
        stream_in({"x": torch.zeros(3)}, tmp_path)


def test_between_step_and_commit_nothing_is_loaded(daemon: Daemon, tmp_path: Path) -> None:
    plain, _ = saved(tmp_path / "a")
    with fresh(daemon, "dcp-between-in") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        session.track(rng=True)
        trained(model, optimizer, range(1))
        state = {"model": model.state_dict(keep_vars=True)}
        with pytest.raises(
            CheckpointException, match=r"dcp\.load\(\) is not possible between step"
        ):
            stream_in(state, tmp_path / "a")
        session.commit()
        with (
            memd_client.gather(model),
            pytest.raises(CheckpointException, match=r"dcp\.load\(\)"),
        ):
            stream_in(state, tmp_path / "a")
        stream_in(state, tmp_path / "a")
        assert_same(model.state_dict(), plain.state_dict())
