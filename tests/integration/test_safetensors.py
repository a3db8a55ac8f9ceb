"""Checkpoints in safetensors stream into memd and out of it, with the bytes that torch has."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

import memd_client
from memd_client.checkpoints.checkpoint_files import CheckpointFile
from memd_client.connection.reattach import ReattachingControl
from memd_client.core import load
from memd_client.core.load import Load
from memd_client.core.old_state import OldState
from memd_client.integrations.load_tensors import load_tensors
from memd_client.parameters.away import ParameterBytes
from memd_client.parameters.loaded_places import _Places
from memd_proto.v1 import job_pb2, session_pb2
from tests.daemons import fresh
from tests.integration.noted_reads import NotedReads

if TYPE_CHECKING:
    from tests.daemons import Daemon


ROOT = Path(__file__).parents[2]
WIDTH = 64
METADATA = {"format": "pt"}


class Model(nn.Module):
    """Parameters of several dtypes, tied ones, buffers, and one that the state does not have."""

    scale: torch.Tensor

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Parameter(
            torch.randint(0, 256, (WIDTH, 3), dtype=torch.uint8), requires_grad=False
        )
        self.odd = nn.Parameter(torch.rand(()).half().view(1), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.tail = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tail.weight = self.head.weight
        self.register_buffer("scale", torch.rand(2, dtype=torch.float64))
        self.register_buffer("hidden", torch.rand(2), persistent=False)
        if dtype != torch.float32:
            self.to(dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = functional.gelu(block(x))
        x = self.norm(x) * self.scale.sum().to(x.dtype) + self.frozen.sum().to(x.dtype) * 1e-5
        output: torch.Tensor = self.tail(x)
        return output


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        x = x.to(model.get_parameter("head.weight").dtype)
        loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3, fused=True)


def memd_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return memd_client.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


def as_in_files(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tied parameter once."""
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    state.pop("tail.weight", None)
    return state


def saved(model: nn.Module, path: Path) -> Path:
    safetensors.torch.save_file(as_in_files(model), path, metadata=METADATA)
    return path


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert bits(found[name]) == bits(value), name


def bits(value: torch.Tensor) -> bytes:
    flat = value.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def staged_names(session: memd_client.Session) -> list[str]:
    return [
        shard.spec.name
        for shard in session.transaction.job.shards.list_all()
        if shard.spec.name.startswith("@load/")
    ]


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# Out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trained_model_is_saved_with_the_bytes_that_the_library_writes(
    daemon: Daemon, tmp_path: Path, dtype: torch.dtype
) -> None:
    plain = Model(dtype=dtype)
    trained(plain, adamw(plain), range(3))
    with fresh(daemon, f"out-{dtype}") as session:
        model = memd_client.offload(Model(dtype=dtype), session)
        trained(model, memd_adamw(model), range(3))
        path = tmp_path / "a.safetensors"
        memd_client.save_safetensors(model, path)
        assert session.statistics().leases_held == 0
        assert names_in(tmp_path) == ["a.safetensors"]
        assert_same(safetensors.torch.load_file(path), as_in_files(model))
        if dtype == torch.float32:
            assert path.read_bytes() == saved(plain, tmp_path / "b.safetensors").read_bytes()


def test_a_model_without_memd_is_saved_and_loaded_too(daemon: Daemon, tmp_path: Path) -> None:
    plain = Model()
    path = tmp_path / "a.safetensors"
    memd_client.save_safetensors(plain, path, metadata={})
    safetensors.torch.save_file(as_in_files(plain), tmp_path / "b.safetensors")
    assert path.read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    with fresh(daemon, "none") as session:
        other = Model(seed=1)
        memd_client.load_safetensors(other, path, session)
        assert_same(other.state_dict(), plain.state_dict())
        assert staged_names(session) == []


def test_saving_converts_floating_point_tensors(daemon: Daemon, tmp_path: Path) -> None:
    plain = Model()
    with fresh(daemon, "as-bf16") as session:
        model = memd_client.offload(Model(), session)
        memd_client.save_safetensors(model, tmp_path / "a.safetensors", dtype=torch.bfloat16)
        with pytest.raises(memd_client.InvalidArgument, match="cannot be saved as"):
            memd_client.save_safetensors(model, tmp_path / "a.safetensors", dtype=torch.int8)
    wanted = {
        name: value.bfloat16() if value.dtype.is_floating_point else value
        for name, value in as_in_files(plain).items()
    }
    assert_same(safetensors.torch.load_file(tmp_path / "a.safetensors"), wanted)


def test_names_are_those_of_state_dict_whatever_wraps_a_module(
    daemon: Daemon, tmp_path: Path
) -> None:
    with fresh(daemon, "wrapped") as session:
        model: Any = torch.compile(Model(), backend="eager")
        memd_client.offload(model, session)
        path = tmp_path / "a.safetensors"
        memd_client.save_safetensors(model, path)
        state = model.state_dict()
        assert all(name.startswith("_orig_mod.") for name in state)
        del state["_orig_mod.tail.weight"]
        assert_same(safetensors.torch.load_file(path), state)


def test_between_step_and_commit_nothing_is_saved_or_loaded(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "between") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        session.track(rng=True)
        path = saved(Model(seed=1), tmp_path / "a.safetensors")
        trained(model, optimizer, range(1))
        with pytest.raises(memd_client.InvalidArgument, match="save_safetensors"):
            memd_client.save_safetensors(model, tmp_path / "b.safetensors")
        with pytest.raises(memd_client.InvalidArgument, match="load_safetensors"):
            memd_client.load_safetensors(model, path, session)
        session.commit()
        assert names_in(tmp_path) == ["a.safetensors"]
        memd_client.save_safetensors(model, tmp_path / "b.safetensors")
        assert_same(safetensors.torch.load_file(tmp_path / "b.safetensors"), as_in_files(model))


def test_a_file_that_is_too_large_leaves_the_old_one(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "full") as session:
        model = memd_client.offload(Model(), session)
        path = tmp_path / "a.safetensors"
        path.write_bytes(b"old")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        try:
            with pytest.raises(memd_client.CapacityError, match=r"a\.safetensors needs .* bytes"):
                memd_client.save_safetensors(model, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == b"old"
        assert names_in(tmp_path) == ["a.safetensors"]
        with pytest.raises(memd_client.InvalidArgument, match="No such file"):
            memd_client.save_safetensors(model, tmp_path / "no" / "a.safetensors")
        with pytest.raises(memd_client.InvalidArgument, match="Not a directory"):
            memd_client.save_safetensors(model, path / "folder")


# In


@pytest.mark.parametrize("durability", ["step", "every:2", "none"])
def test_a_checkpoint_replaces_a_trained_model_and_its_moments_stay(
    daemon: Daemon, tmp_path: Path, durability: str
) -> None:
    other = Model(seed=1)
    path = saved(other, tmp_path / "a.safetensors")
    plain = Model()
    optimizer = adamw(plain)
    wanted = trained(plain, optimizer, range(3))
    plain.load_state_dict(other.state_dict())
    wanted += trained(plain, optimizer, range(3, 6))
    session = memd_client.connect(daemon.address, job="in", fresh=True, durability=durability)
    model = memd_client.offload(Model(), session)
    found = trained(model, memd_adamw(model), range(3))
    assert memd_client.load_safetensors(model, path, session) == ([], [])
    assert session.committed_step == 3
    assert staged_names(session) == []
    assert_same(model.state_dict(), other.state_dict())
    session.close()
    # Another process finds it, and nothing else.
    with memd_client.connect(daemon.address, job="in") as session:
        model = memd_client.offload(Model(seed=2), session)
        assert_same(model.state_dict(), other.state_dict())
        optimizer = memd_adamw(model)
        assert session.resume() == 3
        found += trained(model, optimizer, range(3, 6))
        assert found == wanted
        assert_same(model.state_dict(), plain.state_dict())
        session.drop_job()


def test_what_stays_in_the_process_is_loaded_into_the_job_too(
    daemon: Daemon, tmp_path: Path
) -> None:
    other = Model(seed=1)
    path = saved(other, tmp_path / "a.safetensors")
    with memd_client.connect(daemon.address, job="stays", fresh=True) as session:
        model = Model()
        optimizer = memd_client.AdamW(
            [(n, p) for n, p in model.named_parameters() if p.requires_grad], 1e-3, session=session
        )
        trained(model, optimizer, range(1))
        memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), other.state_dict())
    with memd_client.connect(daemon.address, job="stays") as session:
        again = Model(seed=2)
        memd_client.AdamW(
            [(n, p) for n, p in again.named_parameters() if p.requires_grad], 1e-3, session=session
        )
        assert bits(again.get_parameter("blocks.1.weight")) == bits(
            other.get_parameter("blocks.1.weight")
        )
        session.drop_job()


def refusals(model: Model, folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    state = as_in_files(model)
    without = {name: value for name, value in state.items() if name != "blocks.0.bias"}
    return {
        "missing": (without, "missing there: 'blocks.0.bias'"),
        "extra": ({**state, "more": torch.ones(1)}, "not in the model: 'more'"),
        "shape": (
            {**state, "blocks.0.bias": torch.ones(WIDTH, 1)},
            rf"'blocks.0.bias' is float32 \[{WIDTH}, 1\] there and float32 \[{WIDTH}\] in",
        ),
        "dtype": (
            {**state, "blocks.0.bias": torch.ones(WIDTH).bfloat16()},
            r"'blocks.0.bias' is bfloat16 .* \(convert=True",
        ),
        "kind": (
            {**state, "frozen": torch.ones(WIDTH, 3)},
            r"'frozen' is float32 .* \(memd does not convert it",
        ),
        "untied": (
            {**state, "tail.weight": torch.zeros(WIDTH, WIDTH)},
            "'head.weight' and 'tail.weight' are one parameter in the model, and differ",
        ),
    }


def test_files_that_do_not_fit_change_nothing(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "misfits") as session:
        model = memd_client.offload(Model(), session)
        before = model.state_dict()
        path = tmp_path / "a.safetensors"
        for state, said in refusals(Model(seed=1), tmp_path).values():
            safetensors.torch.save_file(state, path)
            with pytest.raises(memd_client.InvalidArgument, match=said):
                memd_client.load_safetensors(model, path, session)
            assert_same(model.state_dict(), before)
        saved(Model(seed=1), path)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(memd_client.InvalidArgument, match="truncated"):
            memd_client.load_safetensors(model, path, session)
        saved(Model(seed=1), path)
        with (
            memd_client.gather(model.blocks[0]),
            pytest.raises(memd_client.MemdError, match="in use"),
        ):
            memd_client.load_safetensors(model, path, session)
        with (
            memd_client.connect(daemon.address, job="other", fresh=True) as other,
            pytest.raises(memd_client.InvalidArgument, match="belongs to job 'misfits'"),
        ):
            memd_client.load_safetensors(model, path, other)
        assert_same(model.state_dict(), before)
        assert staged_names(session) == []


def test_what_is_left_out_is_named_and_stays(daemon: Daemon, tmp_path: Path) -> None:
    other = Model(seed=1)
    state = {**as_in_files(other), "more": torch.ones(1)}
    del state["blocks.0.bias"]
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    with fresh(daemon, "loose") as session:
        model = memd_client.offload(Model(), session)
        found = memd_client.load_safetensors(
            model, tmp_path / "a.safetensors", session, strict=False
        )
        assert found.missing_keys == ["blocks.0.bias"]
        assert found.unexpected_keys == ["more"]
        wanted = other.state_dict()
        wanted["blocks.0.bias"] = Model().state_dict()["blocks.0.bias"]
        assert_same(model.state_dict(), wanted)


@pytest.mark.parametrize("names", [("tail.weight",), ("head.weight", "tail.weight")])
def test_a_tied_parameter_has_any_of_its_names(
    daemon: Daemon, tmp_path: Path, names: tuple[str, ...]
) -> None:
    other = Model(seed=1)
    state = as_in_files(other)
    weight = state.pop("head.weight")
    state.update({name: weight.clone() for name in names})
    safetensors.torch.save_file(state, tmp_path / "a.safetensors")
    with fresh(daemon, "tied") as session:
        model = memd_client.offload(Model(), session)
        memd_client.load_safetensors(model, tmp_path / "a.safetensors", session)
        assert_same(model.state_dict(), other.state_dict())


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_loading_converts_when_it_is_asked_to(
    daemon: Daemon, tmp_path: Path, stored: torch.dtype
) -> None:
    other = {
        name: value.to(stored) if value.dtype.is_floating_point else value
        for name, value in as_in_files(Model(seed=1)).items()
    }
    safetensors.torch.save_file(other, tmp_path / "a.safetensors")
    with fresh(daemon, f"from-{stored}") as session:
        model = memd_client.offload(Model(), session)
        memd_client.load_safetensors(model, tmp_path / "a.safetensors", session, convert=True)
        wanted = {name: other[name].to(value.dtype) for name, value in as_in_files(model).items()}
        assert_same(as_in_files(model), wanted)


def test_a_file_that_cannot_be_read_to_its_end_changes_nothing(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    read = CheckpointFile.read
    calls: list[int] = []
    with fresh(daemon, "cut") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        plain = Model()
        plain_optimizer = adamw(plain)
        wanted = trained(plain, plain_optimizer, range(1))
        assert trained(model, optimizer, range(1)) == wanted
        whole = path.read_bytes()

        def cut(file: CheckpointFile, begin: int, into: memoryview) -> None:
            calls.append(begin)
            if len(calls) == 4:
                os.truncate(path, len(whole) // 3)
            read(file, begin, into)

        monkeypatch.setattr(CheckpointFile, "read", cut)
        with pytest.raises(memd_client.InvalidArgument, match="became shorter"):
            memd_client.load_safetensors(model, path, session)
        monkeypatch.undo()
        assert len(calls) == 4
        assert staged_names(session) == []
        assert_same(model.state_dict(), plain.state_dict())
        # The session goes on, with the bits of plain PyTorch.
        assert trained(model, optimizer, range(1, 3)) == trained(
            plain, plain_optimizer, range(1, 3)
        )
        path.write_bytes(whole)
        memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), Model(seed=1).state_dict())


def noted_commits_behind(monkeypatch: pytest.MonkeyPatch, bytes_each: int) -> list[str]:
    """`begun` for each commit that begins while values are read, and `read` for each read of a
    file."""
    events: list[str] = []
    begin, read = ReattachingControl.begin_sync, CheckpointFile.read

    def noted_begin(control: ReattachingControl, request: Any) -> Any:
        events.append("begun")
        return begin(control, request)

    def noted_read(file: CheckpointFile, first: int, into: memoryview) -> None:
        events.append("read")
        read(file, first, into)

    monkeypatch.setattr(load, "_BEHIND_BYTES", bytes_each)
    monkeypatch.setattr(ReattachingControl, "begin_sync", noted_begin)
    monkeypatch.setattr(CheckpointFile, "read", noted_read)
    return events


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(5)))


def disk_bytes_of(session: memd_client.Session) -> int:
    store = session.transaction.job.store
    answer = store.control.get_job(job_pb2.GetJobRequest(name=store.job))
    return answer.job.nvme_bytes_used


def test_the_disk_takes_what_was_read_while_more_is_read(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(layers(1), tmp_path / "a.safetensors")
    with fresh(daemon, "behind") as session:
        model = memd_client.offload(layers(0), session)
        events = noted_commits_behind(monkeypatch, 8 << 20)
        memd_client.load_safetensors(model, path, session)
        assert events == ["read", "read", "begun", "read", "read", "begun", "read"]
        assert_same(model.state_dict(), layers(1).state_dict())
        assert staged_names(session) == []


def test_a_state_of_a_mapped_file_is_read_from_it(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the integrations load the files of their libraries."""
    torch.save(layers(1).state_dict(), tmp_path / "a.pt")
    state = torch.load(tmp_path / "a.pt", mmap=True)
    state["4.weight"] = state["4.weight"].double()  # in memory, and of another dtype
    noted = NotedReads(monkeypatch)
    with fresh(daemon, "mapped-state") as session:
        model = memd_client.offload(layers(0), session)
        load_tensors(model, state, session, what="load")
        assert noted.sizes == [4 << 20] * 4
        noted.assert_fetched()
        assert_same(model.state_dict(), layers(1).state_dict())


def test_a_model_over_a_mapped_file_is_offloaded_from_it(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(layers(1).state_dict(), tmp_path / "a.pt")
    noted = NotedReads(monkeypatch)
    with fresh(daemon, "mapped-model") as session:
        model = layers(0)
        model.load_state_dict(torch.load(tmp_path / "a.pt", mmap=True), assign=True)
        memd_client.offload(model, session)
        assert noted.sizes == [4 << 20] * 5
        noted.assert_fetched()
        assert_same(model.state_dict(), layers(1).state_dict())


def test_a_state_in_another_job_is_read_a_tensor_at_a_time(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = {"host_bytes": "16MiB"}
    with (
        fresh(daemon, "state-of", **quotas) as other,
        fresh(daemon, "state-into", **quotas) as session,
    ):
        source = memd_client.offload(layers(1), other)
        model = memd_client.offload(layers(0), session)
        events: list[str] = []
        using, write = ParameterBytes.using, Load.write

        def noted_using(shown: ParameterBytes, *, writes: bool) -> Any:
            events.append("read")
            return using(shown, writes=writes)

        def noted_write(load: Load, *arguments: Any) -> None:
            events.append("write")
            write(load, *arguments)

        monkeypatch.setattr(ParameterBytes, "using", noted_using)
        monkeypatch.setattr(Load, "write", noted_write)
        state = {name: each.detach() for name, each in source.named_parameters()}
        load_tensors(model, state, session, what="load")
        assert events == ["write", "read"] * 5
        assert_same(model.state_dict(), layers(1).state_dict())


def test_a_state_in_the_job_itself_is_read_before_it_is_replaced(daemon: Daemon) -> None:
    with fresh(daemon, "state-within") as session:
        model = memd_client.offload(layers(0), session)
        state = model.state_dict(keep_vars=True)
        names = list(state)
        turned = {name: state[names[index - 1]] for index, name in enumerate(names)}
        load_tensors(model, turned, session, what="load")
        wanted = layers(0).state_dict()
        assert_same(
            model.state_dict(),
            {name: wanted[names[index - 1]] for index, name in enumerate(names)},
        )


def test_a_load_that_breaks_off_beside_a_commit_changes_nothing(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(layers(1), tmp_path / "a.safetensors")
    with fresh(daemon, "behind-cut") as session:
        model = memd_client.offload(layers(0), session)
        used_bytes = disk_bytes_of(session)
        events = noted_commits_behind(monkeypatch, 1)
        read = CheckpointFile.read

        def cut(file: CheckpointFile, first: int, into: memoryview) -> None:
            read(file, first, into)
            if events.count("read") == 4:
                raise OSError(5, "the file is gone")

        monkeypatch.setattr(CheckpointFile, "read", cut)
        with pytest.raises(OSError, match="the file is gone"):
            memd_client.load_safetensors(model, path, session)
        assert events.count("begun") == 3
        assert disk_bytes_of(session) < used_bytes + (1 << 20)
        monkeypatch.undo()
        assert staged_names(session) == []
        assert_same(model.state_dict(), layers(0).state_dict())
        memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), layers(1).state_dict())


def test_each_value_is_written_once(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(layers(1), tmp_path / "a.safetensors")
    written: list[int] = []
    sync = ReattachingControl.sync

    def noted(control: ReattachingControl, request: Any) -> Any:
        answer = sync(control, request)
        written.append(answer.written_bytes)
        return answer

    with fresh(daemon, "once", host_bytes="48MiB") as session:
        model = memd_client.offload(layers(0), session)
        monkeypatch.setattr(ReattachingControl, "sync", noted)
        memd_client.load_safetensors(model, path, session)
        (bytes_written,) = written
        value_bytes = 5 * 4 * 1024**2
        assert value_bytes <= bytes_written < value_bytes + (1 << 20)
        assert_same(model.state_dict(), layers(1).state_dict())


def test_a_quota_without_room_for_both_values_is_named_and_nothing_changes(
    daemon: Daemon, tmp_path: Path
) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))

    path = saved(build(1), tmp_path / "a.safetensors")
    # Old and new values take 48 MiB.
    with fresh(daemon, "tight", host_bytes="24MiB", nvme_bytes="40MiB") as session:
        model = memd_client.offload(build(0), session)
        with pytest.raises(memd_client.CapacityError, match="a load keeps what the job has"):
            memd_client.load_safetensors(model, path, session)
        assert staged_names(session) == []
        assert_same(model.state_dict(), build(0).state_dict())
    with fresh(daemon, "tight", host_bytes="24MiB", nvme_bytes="76MiB") as session:
        model = memd_client.offload(build(0), session)
        memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), build(1).state_dict())


def test_a_quota_that_the_state_fills_says_what_a_load_takes(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Though not even the first blob of a load finds room."""
    built = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2)))
    path = saved(built, tmp_path / "a.safetensors")
    state_bytes = sum(12 * parameter.numel() for parameter in built.parameters())
    catalogue_bytes = 8192
    quota_bytes = 2 * state_bytes + catalogue_bytes
    with fresh(daemon, "full", host_bytes="24MiB", nvme_bytes=quota_bytes) as session:
        model = memd_client.offload(built, session)
        optimizer = memd_client.AdamW(model.parameters())
        terms = r"\(tiles that are being replaced\).*; a load keeps what the job has"
        with pytest.raises(memd_client.CapacityError, match=terms):
            memd_client.load_safetensors(model, path, session)
        assert staged_names(session) == []
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        session.commit(wait=True)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt, OSError])
def test_old_values_that_cannot_be_put_back_end_the_session_s_steps(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """And the daemon puts them back, before anybody connects."""
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    plain = Model()

    def fail(*_: object) -> None:
        raise error("it failed")

    session = memd_client.connect(daemon.address, job="broken-off", fresh=True)
    model = memd_client.offload(Model(), session)
    optimizer = memd_adamw(model)
    session.track(rng=True)
    trained(model, optimizer, range(1))
    session.commit()
    trained(plain, adamw(plain), range(1))
    with monkeypatch.context() as patch:
        patch.setattr(Load, "_end", fail)
        patch.setattr(OldState, "put_back", fail)
        kind = error if error is KeyboardInterrupt else memd_client.MemdError
        with pytest.raises(kind, match="it failed") as raised:
            memd_client.load_safetensors(model, path, session)
    said = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    assert any("connect again" in each for each in said)
    with pytest.raises(memd_client.MemdError, match="connect again"):
        trained(model, optimizer, range(1, 2))
    with pytest.raises(memd_client.MemdError, match="connect again"):
        session.commit()
    with pytest.raises(memd_client.MemdError, match="connect again"):
        session.transaction.skip(lambda: None)
    session.close()
    with memd_client.connect(daemon.address, job="broken-off") as session:
        model = memd_client.offload(Model(), session)
        assert session.committed_step == 1
        assert staged_names(session) == []
        assert_same(model.state_dict(), plain.state_dict())
        session.drop_job()


def test_an_end_whose_answer_is_lost_ends_the_session_s_steps(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    drop = ReattachingControl.drop_snapshot

    def lose(control: ReattachingControl, request: Any) -> None:
        drop(control, request)
        raise memd_client.DaemonUnavailable("its answer is lost")

    session = memd_client.connect(daemon.address, job="answer-lost", fresh=True)
    model = memd_client.offload(Model(), session)
    optimizer = memd_adamw(model)
    trained(model, optimizer, range(1))
    with monkeypatch.context() as patch:
        patch.setattr(ReattachingControl, "drop_snapshot", lose)
        with pytest.raises(
            memd_client.DaemonUnavailable, match=r"connect again, .* its answer is lost"
        ):
            memd_client.load_safetensors(model, path, session)
    with pytest.raises(memd_client.MemdError, match="connect again"):
        trained(model, optimizer, range(1, 2))
    with pytest.raises(memd_client.MemdError, match="connect again"):
        session.commit()
    session.close()
    with memd_client.connect(daemon.address, job="answer-lost") as session:
        model = memd_client.offload(Model(), session)
        assert session.committed_step == 1
        assert_same(model.state_dict(), Model(seed=1).state_dict())
        session.drop_job()


def test_a_load_whose_session_has_ended_does_not_count(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes it before the end, and the daemon does not know its snapshot either."""
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    drop = ReattachingControl.drop_snapshot

    def late(control: ReattachingControl, request: Any) -> Any:
        control.detach(session_pb2.DetachRequest(session_id=request.session_id))
        return drop(control, request)

    session = memd_client.connect(daemon.address, job="ended", fresh=True)
    model = memd_client.offload(Model(), session)
    with monkeypatch.context() as patch:
        patch.setattr(ReattachingControl, "drop_snapshot", late)
        with pytest.raises(memd_client.MemdError, match=r"connect again|attach again"):
            memd_client.load_safetensors(model, path, session)
    with suppress(memd_client.MemdError):
        session.close()
    with memd_client.connect(daemon.address, job="ended") as session:
        model = memd_client.offload(Model(seed=2), session)
        assert_same(model.state_dict(), Model().state_dict())
        session.drop_job()


def test_tensors_that_do_not_get_the_values_of_a_load_end_the_session_s_steps(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load counts."""
    path = saved(Model(seed=1), tmp_path / "a.safetensors")

    def fail(*_: object) -> None:
        raise memd_client.DeviceError("it failed", 5)

    session = memd_client.connect(daemon.address, job="not-shown", fresh=True)
    model = memd_client.offload(Model(), session)
    optimizer = memd_adamw(model)
    with monkeypatch.context() as patch:
        patch.setattr(_Places, "show", fail)
        with pytest.raises(memd_client.DeviceError, match=r"connect again, .* it failed"):
            memd_client.load_safetensors(model, path, session)
    with pytest.raises(memd_client.MemdError, match="connect again"):
        trained(model, optimizer, range(1))
    session.close()
    with memd_client.connect(daemon.address, job="not-shown") as session:
        model = memd_client.offload(Model(), session)
        assert staged_names(session) == []
        assert_same(model.state_dict(), Model(seed=1).state_dict())
        session.drop_job()


def test_an_end_that_is_refused_leaves_the_session_as_it_was(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    plain = Model()
    drop = ReattachingControl.drop_snapshot
    calls: list[str] = []

    def refuse(control: ReattachingControl, request: Any) -> Any:
        calls.append(request.name)
        if len(calls) == 1:
            raise memd_client.DeviceError("it failed", 5)
        return drop(control, request)

    with fresh(daemon, "not-counting") as session:
        model = memd_client.offload(Model(), session)
        with monkeypatch.context() as patch:
            patch.setattr(ReattachingControl, "drop_snapshot", refuse)
            with pytest.raises(memd_client.DeviceError, match=r"^it failed$"):
                memd_client.load_safetensors(model, path, session)
        assert len(calls) == 2
        assert staged_names(session) == []
        wanted = trained(plain, adamw(plain), range(2))
        assert trained(model, memd_adamw(model), range(2)) == wanted


def test_tensors_that_cannot_be_written_are_refused_before_a_load(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    with torch.inference_mode():
        made_for_inference = torch.rand(2, dtype=torch.float64)
    unwritable = {
        "inference_mode": made_for_inference,
        "share memory": torch.rand(1, dtype=torch.float64).expand(2),
    }
    for said, scale in unwritable.items():
        model = Model()
        model.scale = scale
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with fresh(daemon, "unwritable") as session:
            with pytest.raises(memd_client.InvalidArgument, match=f"'scale' .*{said}"):
                memd_client.load_safetensors(model, path, session)
            assert staged_names(session) == []
            assert_same(model.state_dict(), before)
            model.scale = scale.clone()
            memd_client.load_safetensors(model, path, session)
            assert_same(model.state_dict(), Model(seed=1).state_dict())


class WithExtra(Model):
    def get_extra_state(self) -> torch.Tensor:
        return torch.full((3,), 5.0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


def test_what_is_no_tensor_of_the_model_is_saved_and_refused_by_a_load(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    memd_client.save_safetensors(WithExtra(seed=1), path)
    assert "_extra_state" in safetensors.torch.load_file(path)
    cloning: Any = Model()
    cloning.register_state_dict_post_hook(
        lambda module, state, *_: state.update(scale=state["scale"].clone())
    )
    for model, name in ((WithExtra(), "_extra_state"), (cloning, "scale")):
        with fresh(daemon, "copies") as session:
            memd_client.offload(model, session)
            stored = as_in_files(Model(seed=1))
            if name == "_extra_state":
                stored[name] = torch.ones(3)
            safetensors.torch.save_file(stored, path)
            before = model.state_dict()
            with pytest.raises(memd_client.InvalidArgument, match=f"'{name}' .* neither"):
                memd_client.load_safetensors(model, path, session)
            assert staged_names(session) == []
            assert_same(model.state_dict(), before)
            safetensors.torch.save_file({k: v for k, v in stored.items() if k != name}, path)
            found = memd_client.load_safetensors(model, path, session, strict=False)
            assert found.missing_keys == [name]
            wanted = Model(seed=1).state_dict() | {name: before[name]}
            assert_same(model.state_dict(), wanted)


def test_a_state_that_shares_the_bytes_of_a_buffer_loads_into_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    with fresh(daemon, "sharing") as session:
        model: Any = memd_client.offload(Model(), session)
        model.register_state_dict_post_hook(
            lambda module, state, *_: state.update(scale=state["scale"].detach())
        )
        memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), Model(seed=1).state_dict())
        assert bits(session.get("scale")) == bits(Model(seed=1).scale)


def test_a_job_that_others_use_is_not_loaded_into(daemon: Daemon, tmp_path: Path) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    with fresh(daemon, "company") as session:
        model = memd_client.offload(Model(), session)
        with (
            memd_client.connect(daemon.address, job="company"),
            pytest.raises(memd_client.InvalidArgument, match="has 1 other sessions"),
        ):
            memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), Model().state_dict())
        memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), Model(seed=1).state_dict())


def test_names_of_loads_are_memd_s_own(daemon: Daemon) -> None:
    with fresh(daemon, "own-names") as session:
        with pytest.raises(memd_client.InvalidArgument, match="are memd's own"):
            session.put("@load/0", torch.ones(1))
        session.put("load/0", torch.ones(1))
        with pytest.raises(memd_client.InvalidArgument, match="snapshots that loads make"):
            session.snapshot("load/0")


@pytest.mark.more
def test_nobody_connects_while_a_session_loads(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    read = CheckpointFile.read
    seen: list[int] = []
    with fresh(daemon, "two") as session:
        model = memd_client.offload(Model(), session)

        def look(file: CheckpointFile, begin: int, into: memoryview) -> None:
            if not seen:
                seen.append(begin)
                with pytest.raises(memd_client.InvalidArgument, match="another session loads"):
                    memd_client.connect(daemon.address, job="two")
                with pytest.raises(memd_client.InvalidArgument):
                    session.snapshot("meanwhile")
            read(file, begin, into)

        monkeypatch.setattr(CheckpointFile, "read", look)
        memd_client.load_safetensors(model, path, session)
        assert seen
        assert staged_names(session) == []
        assert_same(model.state_dict(), Model(seed=1).state_dict())


def test_a_model_that_is_built_in_memd_is_loaded(daemon: Daemon, tmp_path: Path) -> None:
    path = saved(Model(seed=1), tmp_path / "a.safetensors")
    with fresh(daemon, "built") as session:
        with memd_client.init(session):
            model = Model()
        memd_client.load_safetensors(model, path, session)
        assert_same(model.state_dict(), Model(seed=1).state_dict())
        memd_client.save_safetensors(model, tmp_path / "b.safetensors")
        assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


# Folders of shards


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name.startswith("model") or path.name.startswith(".")
    }


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("shard_kib", [8, 40, 1000])
def test_a_folder_has_the_files_of_save_pretrained(
    daemon: Daemon, tmp_path: Path, shard_kib: int
) -> None:
    transformers = pytest.importorskip("transformers")

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=97, n_positions=16)
        )

    plain, folder = build(0), tmp_path / "memd"
    plain.save_pretrained(tmp_path / "plain", max_shard_size=shard_kib * 1024)
    with fresh(daemon, f"gpt2-{shard_kib}") as session:
        model = memd_client.offload(build(0), session)
        memd_client.save_safetensors(model, folder, max_shard_bytes=shard_kib * 1024)
        wanted = folder_bytes(tmp_path / "plain")
        assert len(wanted) == (1 if shard_kib == 1000 else len(wanted)) > 0
        assert folder_bytes(folder) == wanted
        # And save_pretrained of the offloaded model writes them as well.
        model.save_pretrained(tmp_path / "own", max_shard_size=shard_kib * 1024)
        assert folder_bytes(tmp_path / "own") == wanted
        # As the README says: all of it, streamed.
        model.save_pretrained(tmp_path / "both", state_dict={})
        memd_client.save_safetensors(model, tmp_path / "both", max_shard_bytes=shard_kib * 1024)
        assert all_bytes(tmp_path / "both") == all_bytes(tmp_path / "plain")
    with fresh(daemon, f"gpt2-{shard_kib}") as session:
        model = memd_client.offload(build(1), session)
        memd_client.load_safetensors(model, tmp_path / "plain", session)
        assert_same(model.state_dict(), plain.state_dict())


def test_files_of_an_earlier_save_are_replaced_and_others_stay(tmp_path: Path) -> None:
    model = Model()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-best.safetensors").write_text("mine")
    kept = {"config.json", "model-best.safetensors"}
    for shard_bytes in (WIDTH * WIDTH * 4, None, WIDTH * WIDTH * 8, WIDTH * WIDTH * 8, 10**9):
        model = Model(seed=shard_bytes or 3)
        memd_client.save_safetensors(model, tmp_path, max_shard_bytes=shard_bytes)
        names = set(names_in(tmp_path)) - kept
        if shard_bytes in (None, 10**9):
            assert names == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
            assert len(names) > 2
        found: dict[str, torch.Tensor] = {}
        for name in names:
            if name.endswith(".safetensors"):
                found |= safetensors.torch.load_file(tmp_path / name)
        assert_same(found, as_in_files(model))
        assert kept <= set(names_in(tmp_path))


# Memory


def test_a_save_leases_one_parameter_at_a_time(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    using = ParameterBytes.using

    def counting(source: ParameterBytes, *, writes: bool) -> Any:
        held.append(session.statistics().leases_held)
        return using(source, writes=writes)

    with fresh(daemon, "st-one") as session:
        model = memd_client.offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), session)
        monkeypatch.setattr(ParameterBytes, "using", counting)
        memd_client.save_safetensors(model, tmp_path / "a.safetensors")
    assert held == [0] * 4


def test_neither_way_takes_more_memory_than_a_module(daemon: Daemon, tmp_path: Path) -> None:
    """In a process of its own, whose memory begins with torch imported."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.integration.safetensors_memory", daemon.address, tmp_path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )
    said = dict(re.findall(r"(\w+) (-?\d+)", found.stdout))
    assert int(said["model"]) == 96 << 20
    largest_bytes = int(said["largest"])
    assert largest_bytes == 8 << 20
    for way in ("save", "load", "folder"):
        assert 0 < int(said[way]) <= largest_bytes + (64 << 20), said
