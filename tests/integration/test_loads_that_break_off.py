"""A load that breaks off changes nothing: a session that goes on trains with the bits of one that
has never loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional

import memd_client
from memd_client.connection.reattach import ReattachingControl
from memd_client.connection.shard import Shard, shard_spec
from memd_client.core import load as loads
from memd_client.core.load import Load
from memd_client.core.moving_moments import MovingMoments
from memd_client.core.snapshot_reader import SnapshotReader
from memd_client.core.tensor_streams import TensorStreams
from memd_client.parameters.residency import Residency
from memd_proto.v1 import job_pb2, types_pb2
from tests.daemons import fresh, running_daemon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.daemons import Daemon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass(frozen=True, kw_only=True)
class Case:
    dtype: torch.dtype = torch.float32
    amsgrad: bool = False
    tier: Any = "nvme"
    durability: str = "step"
    in_tiles: bool = False


CASES = {
    "fp32": Case(),
    "bf16": Case(dtype=torch.bfloat16),
    "amsgrad": Case(amsgrad=True),
    "bf16-amsgrad": Case(dtype=torch.bfloat16, amsgrad=True),
    "host": Case(tier="host"),
    "bf16-host": Case(dtype=torch.bfloat16, tier="host"),
    "every": Case(durability="every:3"),
    "none": Case(durability="none"),
    "bf16-none": Case(dtype=torch.bfloat16, durability="none"),
    "tiles": Case(in_tiles=True),
    "bf16-tiles": Case(dtype=torch.bfloat16, in_tiles=True),
}


class Model(nn.Module):
    """Small parameters in common buckets; one of three tiles, of which one is not full; one that
    the first steps do not use, and so without moments; a frozen one of another dtype with an odd
    number of bytes; buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(64, 600)
        self.large = nn.Linear(600, 1000, bias=False)
        self.late = nn.Linear(1000, 64)
        self.last = nn.Linear(1000, 64)
        self.norm = nn.BatchNorm1d(64)
        self.frozen = nn.Parameter(
            torch.randint(0, 256, (5, 3), dtype=torch.uint8), requires_grad=False
        )

    def forward(self, x: torch.Tensor, *, uses_late: bool) -> torch.Tensor:
        x = functional.gelu(self.large(functional.gelu(self.first(x))))
        x = self.last(x) + self.late(x) if uses_late else self.last(x)
        output: torch.Tensor = self.norm(x) + self.frozen.sum().to(x.dtype) * 1e-5
        return output


def train(model: Any, optimizer: Any, steps: range, *, uses_late: bool) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        x = x.to(model.first.weight.dtype)
        loss = (model(x, uses_late=uses_late) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def begun(session: memd_client.Session, case: Case, seed: int) -> tuple[Any, Any]:
    model = Model(seed).to(dtype=case.dtype)
    if case.in_tiles:
        memd_client.tile_linears(model, bytes_max="512KiB")
    memd_client.offload(model, session, tier=case.tier)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = memd_client.AdamW(trained, lr=1e-3, amsgrad=case.amsgrad)
    return model, optimizer


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().clone().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def all_bits(model: Any, optimizer: Any) -> dict[str, bytes]:
    found = {name: bits(value) for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": bits(value) for name, value in state.items()}
    return found


@dataclass(frozen=True)
class Other:
    """A checkpoint to load. Another job, trained longer and with other numbers, made it."""

    values: Path
    both: Path
    moments: dict[int, dict[str, torch.Tensor]]


def other(daemon: Daemon, case: Case, folder: Path) -> Other:
    with fresh(daemon, "other") as session:
        model, optimizer = begun(session, Case(dtype=case.dtype, amsgrad=case.amsgrad), seed=1)
        train(model, optimizer, range(10, 13), uses_late=True)
        memd_client.save_safetensors(model, folder / "values.safetensors")
        state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
        save(state, storage_writer=memd_client.checkpoint.Writer(folder / "both"))
        moments = {
            index: {name: value.clone() for name, value in each.items()}
            for index, each in optimizer.state_dict()["state"].items()
        }
    return Other(folder / "values.safetensors", folder / "both", moments)


def load_values(session: memd_client.Session, model: Any, optimizer: Any, given: Other) -> None:
    del optimizer
    memd_client.load_safetensors(model, given.values, session)


def load_both(session: memd_client.Session, model: Any, optimizer: Any, given: Other) -> None:
    del session
    state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
    load(state, storage_reader=memd_client.checkpoint.Reader(given.both))


def load_moments(session: memd_client.Session, model: Any, optimizer: Any, given: Other) -> None:
    del session, model
    optimizer.load_state_dict({**optimizer.state_dict(), "state": given.moments})


def reset(session: memd_client.Session, model: Any, optimizer: Any, given: Other) -> None:
    del session, model, given
    optimizer.reset_state()


LOADS: dict[str, Callable[[memd_client.Session, Any, Any, Other], None]] = {
    "values": load_values,
    "both": load_both,
    "moments": load_moments,
    "reset": reset,
}


def fail(*_: object) -> None:
    raise memd_client.DeviceError("the disk is gone", 5)


def trained_on(
    daemon: Daemon, case: Case, break_off: Callable[[memd_client.Session, Any, Any], None]
) -> tuple[list[float], dict[str, bytes]]:
    """Losses, and all bits in the end."""
    with fresh(daemon, "broken-off", durability=case.durability) as session:
        model, optimizer = begun(session, case, seed=0)
        losses = train(model, optimizer, range(2), uses_late=False)
        before = all_bits(model, optimizer)
        break_off(session, model, optimizer)
        assert all_bits(model, optimizer) == before
        names = [shard.spec.name for shard in session.transaction.job.shards.list_all()]
        assert not [name for name in names if name.startswith("@load/")]
        assert session.statistics().leases_held == 0
        losses += train(model, optimizer, range(2, 4), uses_late=True)
        return losses, all_bits(model, optimizer)


def check(
    daemon: Daemon,
    case: Case,
    what: str,
    folder: Path,
    patch: Callable[[pytest.MonkeyPatch], None],
) -> None:
    given = other(daemon, case, folder)

    def break_off(session: memd_client.Session, model: Any, optimizer: Any) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patch(patched)
            with pytest.raises(
                (memd_client.DeviceError, CheckpointException), match="disk is gone"
            ):
                LOADS[what](session, model, optimizer, given)

    wanted = trained_on(daemon, case, lambda *_: None)
    assert trained_on(daemon, case, break_off) == wanted


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_after_a_load_of_all_that_breaks_off_at_its_end(
    daemon: Daemon, tmp_path: Path, name: str
) -> None:
    check(
        daemon, CASES[name], "both", tmp_path, lambda patched: patched.setattr(Load, "_end", fail)
    )


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-amsgrad"])
@pytest.mark.parametrize("what", ["values", "moments", "reset"])
def test_training_goes_on_after_a_load_of_a_part_that_breaks_off_at_its_end(
    daemon: Daemon, tmp_path: Path, name: str, what: str
) -> None:
    check(daemon, CASES[name], what, tmp_path, lambda patched: patched.setattr(Load, "_end", fail))


@pytest.mark.parametrize("name", ["bf16", "bf16-tiles"])
@pytest.mark.parametrize("moment", ["value", "commit", "piece"])
def test_training_goes_on_after_a_load_that_breaks_off_half_way(
    daemon: Daemon, tmp_path: Path, name: str, moment: str
) -> None:
    """In the middle of a value, beside a commit, and between two pieces of one parameter."""

    def in_a_value(patched: pytest.MonkeyPatch) -> None:
        fill, calls = Residency.fill, []

        def half(residency: Residency, write: Callable[[torch.Tensor], None]) -> Any:
            calls.append(residency)
            if len(calls) < 3:
                return fill(residency, write)

            def cut(into: torch.Tensor) -> None:
                write(into)
                into[into.numel() // 2 :] = 7
                fail()

            return fill(residency, cut)

        patched.setattr(Residency, "fill", half)

    def beside_a_commit(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(loads, "_BEHIND_BYTES", 1)
        write, calls = Load.write, []

        def noted(self: Load, *arguments: Any) -> None:
            calls.append(self)
            if len(calls) == 4:
                fail()
            write(self, *arguments)

        patched.setattr(Load, "write", noted)

    def between_pieces(patched: pytest.MonkeyPatch) -> None:
        put, calls = MovingMoments.put, []

        def noted(self: MovingMoments, *arguments: Any) -> None:
            calls.append(self)
            if len(calls) == 4:
                fail()
            put(self, *arguments)

        patched.setattr(MovingMoments, "put", noted)

    patches = {"value": in_a_value, "commit": beside_a_commit, "piece": between_pieces}
    check(daemon, CASES[name], "both", tmp_path, patches[moment])


def test_an_interrupt_ends_a_load_and_changes_nothing(daemon: Daemon, tmp_path: Path) -> None:
    case = CASES["bf16"]
    given = other(daemon, case, tmp_path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def break_off(session: memd_client.Session, model: Any, optimizer: Any) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Load, "_end", interrupt)
            with pytest.raises(KeyboardInterrupt):
                load_values(session, model, optimizer, given)

    wanted = trained_on(daemon, case, lambda *_: None)
    assert trained_on(daemon, case, break_off) == wanted


def test_a_backward_over_values_of_before_follows_a_load_that_breaks_off(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved tensors of autograd keep their version. After a load that counts they do not, and
    torch refuses the backward."""
    given = other(daemon, CASES["fp32"], tmp_path)
    with fresh(daemon, "saved") as session:
        model, optimizer = begun(session, CASES["fp32"], seed=0)
        view = model.first.bias.detach()
        before = view.clone()
        loss = model(torch.ones(8, 64), uses_late=True).square().sum()
        with monkeypatch.context() as patched:
            patched.setattr(Load, "_end", fail)
            with pytest.raises(memd_client.DeviceError, match="disk is gone"):
                load_values(session, model, optimizer, given)
        assert torch.equal(view, before)
        loss.backward()
        optimizer.zero_grad()
        loss = model(torch.ones(8, 64), uses_late=True).square().sum()
        load_values(session, model, optimizer, given)
        assert torch.equal(view, model.state_dict()["first.bias"])
        assert not torch.equal(view, before)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_write_through_a_view_is_there_after_a_load_that_breaks_off(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = other(daemon, CASES["fp32"], tmp_path)
    with fresh(daemon, "view") as session:
        model, optimizer = begun(session, CASES["fp32"], seed=0)
        view = model.first.bias.detach()
        with torch.no_grad():
            view[3] = 5.0
        with monkeypatch.context() as patched:
            patched.setattr(Load, "_end", fail)
            with pytest.raises(memd_client.DeviceError, match="disk is gone"):
                load_values(session, model, optimizer, given)
        assert model.state_dict()["first.bias"][3] == 5.0


def snapshot_names(session: memd_client.Session) -> list[str]:
    store = session.transaction.job.store
    listed = store.control.list_snapshots(job_pb2.ListSnapshotsRequest(job=store.job))
    return [each.name for each in listed.snapshots]


def test_a_daemon_that_would_not_take_the_job_back_gets_no_load(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has taken the place of the one that the session has asked."""
    given = other(daemon, CASES["fp32"], tmp_path)
    create = ReattachingControl.create_snapshot

    def as_older(control: ReattachingControl, request: Any) -> Any:
        response = create(control, request)
        response.ClearField("is_load")
        return response

    def break_off(session: memd_client.Session, model: Any, optimizer: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(ReattachingControl, "create_snapshot", as_older)
            with pytest.raises(memd_client.NotYet, match="older than this client"):
                load_values(session, model, optimizer, given)
        assert snapshot_names(session) == []

    wanted = trained_on(daemon, CASES["fp32"], lambda *_: None)
    assert trained_on(daemon, CASES["fp32"], break_off) == wanted


def test_training_goes_on_after_a_load_whose_end_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    """The daemon has answered, so its refusal stands."""
    drop = ReattachingControl.drop_snapshot
    refused: list[Any] = []

    def refuse_first(control: ReattachingControl, request: Any) -> Any:
        if refused:
            return drop(control, request)
        refused.append(request)
        return fail()

    check(
        daemon,
        CASES["bf16"],
        "both",
        tmp_path,
        lambda patched: patched.setattr(ReattachingControl, "drop_snapshot", refuse_first),
    )
    assert refused


@pytest.mark.parametrize("error", [KeyboardInterrupt, memd_client.DeadlineExceeded])
def test_an_end_that_comes_late_finds_nothing_half_put_back(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """The daemon begins with the request when the client has given it up."""
    case = CASES["fp32"]
    given = other(daemon, case, tmp_path)
    drop, read = ReattachingControl.drop_snapshot, SnapshotReader.read
    late: list[tuple[ReattachingControl, Any]] = []
    readings: list[SnapshotReader] = []

    def give_up_first(control: ReattachingControl, request: Any) -> Any:
        if late:
            return drop(control, request)
        late.append((control, request))
        raise error("it is given up")

    def read_then_drop(reader: SnapshotReader, *arguments: Any, **options: Any) -> None:
        if readings:
            drop(*late[0])
        readings.append(reader)
        read(reader, *arguments, **options)

    session = memd_client.connect(daemon.address, job="late-end", fresh=True)
    model, optimizer = begun(session, case, seed=0)
    train(model, optimizer, range(2), uses_late=False)
    with monkeypatch.context() as patched:
        patched.setattr(ReattachingControl, "drop_snapshot", give_up_first)
        patched.setattr(SnapshotReader, "read", read_then_drop)
        with pytest.raises((error, CheckpointException)):
            load_both(session, model, optimizer, given)
    with pytest.raises(memd_client.MemdError, match="connect again"):
        train(model, optimizer, range(2, 3), uses_late=True)
    session.close()
    with memd_client.connect(daemon.address, job="late-end") as session:
        model, optimizer = begun(session, case, seed=0)
        found = all_bits(model, optimizer)
        session.drop_job()
    with fresh(daemon, "late-end-wanted") as session:
        model, optimizer = begun(session, case, seed=0)
        train(model, optimizer, range(2), uses_late=False)
        load_both(session, model, optimizer, given)
        assert found == all_bits(model, optimizer)


def test_a_first_value_is_taken_back_by_the_daemon(daemon: Daemon) -> None:
    session = memd_client.connect(daemon.address, job="first-value", fresh=True)
    job, transaction = session.transaction.job, session.transaction
    spec = shard_spec(
        "value", kind=types_pb2.SHARD_KIND_BUFFER, dtype=torch.float32, shape=torch.Size([3])
    )
    (declared,) = job.declare([spec])
    load = Load(job.store, job.steps)

    def create(name: str) -> None:
        transaction.snapshot(name, is_own=True, session_id=job.session_id)

    def write(into: torch.Tensor) -> None:
        into.fill_(1)

    def break_off() -> None:
        with load.all_or_none(create, transaction.watch):
            load.overwrite(Shard.of(declared), write)
            fail()

    with pytest.raises(memd_client.DeviceError, match="'value' had no value before the load"):
        break_off()
    with pytest.raises(memd_client.MemdError, match="connect again"):
        session.commit()
    session.close()
    with memd_client.connect(daemon.address, job="first-value") as session:
        (found,) = session.transaction.job.shards.list_all()
        assert (found.spec.name, found.written) == ("value", False)
        assert snapshot_names(session) == []
        session.drop_job()


def test_moments_for_which_a_commit_has_to_free_room_are_sent_again(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["fp32"]
    given = other(daemon, case, tmp_path)
    begin = TensorStreams.begin_put_moments
    events: list[str] = []

    class Full:
        """A call that the daemon has refused, and of which nothing has reached a parameter."""

        def result(self) -> None:
            events.append("full")
            raise memd_client.CapacityError("the disk quota is full")

    class Noted:
        def __init__(self, call: Any) -> None:
            self._call = call

        def result(self) -> Any:
            events.append("answered")
            return self._call.result()

    def noted_begin(streams: TensorStreams, parts: Any) -> Any:
        events.append("begun")
        return Full() if events.count("begun") == 2 else Noted(begin(streams, parts))

    sync = ReattachingControl.sync

    def noted_sync(control: ReattachingControl, request: Any) -> Any:
        events.append("sync")
        return sync(control, request)

    found = []
    for is_full in (False, True):
        with fresh(daemon, "no-room") as session, monkeypatch.context() as patched:
            model, optimizer = begun(session, case, seed=0)
            train(model, optimizer, range(2), uses_late=False)
            if is_full:
                patched.setattr(TensorStreams, "begin_put_moments", noted_begin)
                patched.setattr(ReattachingControl, "sync", noted_sync)
            load_both(session, model, optimizer, given)
            found.append(all_bits(model, optimizer))
    assert found[0] == found[1]
    full = events.index("full")
    assert events[full + 1 : full + 4] == ["sync", "begun", "answered"]


@pytest.mark.more
def test_a_value_that_a_full_quota_does_not_hold_a_third_time_is_put_back_by_the_daemon(
    tmp_path: Path,
) -> None:
    """The quota holds the old value, the loaded one, and less than this value beside them."""

    def large(session: memd_client.Session, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = memd_client.offload(nn.Linear(1024, 9216, bias=False), session)
        return model, memd_client.AdamW(model.parameters(), lr=1e-3)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(1, 1024)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def load_into(model: Any, optimizer: Any) -> None:
        state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
        load(state, storage_reader=memd_client.checkpoint.Reader(tmp_path / "both"))

    quotas: dict[str, Any] = {"host_bytes": "96MiB", "fresh": True}
    with running_daemon(host="160MiB", nvme="640MiB") as daemon:
        with memd_client.connect(daemon.address, job="large", **quotas) as session:
            model, optimizer = large(session, 1)
            step(model, optimizer)
            state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
            save(state, storage_writer=memd_client.checkpoint.Writer(tmp_path / "both"))
        needed_bytes = 24 * 1024 * 9216 + (24 << 20)
        for _ in range(3):  # for the snapshot, for blobs, and then it is exactly enough
            session = memd_client.connect(
                daemon.address, job="large", nvme_bytes=needed_bytes, **quotas
            )
            model, optimizer = large(session, 0)
            step(model, optimizer)
            before = all_bits(model, optimizer)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Load, "_end", fail)
                with pytest.raises(CheckpointException) as raised:
                    load_into(model, optimizer)
            (failed,) = raised.value.failures.values()
            found = re.search(r"(\d+) bytes = 2 x", str(failed[0]))
            if found is None:
                break
            session.close()
            needed_bytes = int(found[1])
        assert re.search("connect again, .*the disk is gone; .*disk quota", str(failed[0]))
        with pytest.raises(memd_client.MemdError, match="connect again"):
            step(model, optimizer)
        session.close()
        with memd_client.connect(daemon.address, job="large") as session:
            model, optimizer = large(session, 2)
            assert all_bits(model, optimizer) == before
