"""`dcp.async_save` saves the values of its call from a snapshot, while the job trains on."""

from __future__ import annotations

import gc
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import memd_client
from memd.client import DaemonClient
from memd_client.core.temporary_snapshots import PREFIX
from tests.daemons import TIMEOUT_S, fresh
from tests.integration.full_disk import no_file_larger_than
from tests.integration.test_distributed_checkpoint import (
    Model,
    adamw,
    assert_same,
    assert_same_moments,
    bits,
    memd_adamw,
    names_in,
    plain_load,
    state_of,
    the_error,
    trained,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan

    from tests.daemons import Daemon, Daemons

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def begin(state: dict[str, Any], path: Path, **arguments: Any) -> Future[Any]:
    return begin_with(memd_client.checkpoint.Writer(path), state, **arguments)


def begin_with(
    writer: memd_client.checkpoint.Writer, state: dict[str, Any], **arguments: Any
) -> Future[Any]:
    future = async_save(state, storage_writer=writer, **arguments)
    assert isinstance(future, Future)  # for a stager that is done when it returns
    return future


def snapshots(daemon: Daemon, job: str) -> list[str]:
    with DaemonClient(daemon.attach_socket) as client:
        return [each.name for each in client.snapshots(job)]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    model(torch.ones(2, 64, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Held(DefaultSavePlanner):
    """Plans when it may: torch has a thread for it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def create_local_plan(self) -> SavePlan:
        assert self.may_go_on.wait(TIMEOUT_S)
        return super().create_local_plan()


@pytest.mark.parametrize("durability", ["step", "every:3", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_of_the_call_are_saved_while_the_job_trains_on(
    daemon: Daemon, tmp_path: Path, durability: str, dtype: torch.dtype
) -> None:
    job = f"async-{durability.replace(':', '-')}-{str(dtype)[6:]}"
    with fresh(daemon, job, durability=durability) as session:
        model = memd_client.offload(Model().to(dtype), session)
        optimizer = memd_adamw(model, amsgrad=True)
        step(model, optimizer, dtype)
        step(model, optimizer, dtype)
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        moments = {
            index: {name: value.clone() for name, value in each.items()}
            for index, each in optimizer.state_dict()["state"].items()
        }
        planner = Held()
        future = begin(state_of(model, optimizer), tmp_path / "a", planner=planner)
        assert len(snapshots(daemon, job)) == 1
        step(model, optimizer, dtype)
        step(model, optimizer, dtype)
        scale = model.get_buffer("scale")
        scale.zero_()
        assert not torch.equal(model.state_dict()["layers.0.weight"], wanted["layers.0.weight"])
        planner.may_go_on.set()
        future.result(TIMEOUT_S)
        assert snapshots(daemon, job) == []
        found: dict[str, Any] = {
            "model": {name: torch.empty_like(value) for name, value in wanted.items()},
            "optimizer": {
                "state": {
                    index: {name: torch.empty_like(value) for name, value in each.items()}
                    for index, each in moments.items()
                }
            },
        }
        load(found, checkpoint_id=tmp_path / "a")
        assert_same(found["model"], wanted)
        for index, each in moments.items():
            assert_same(found["optimizer"]["state"][index], each)


def test_plain_torch_trains_on_with_the_same_bits(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "async-plain") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(3))
        future = begin(state_of(model, optimizer), tmp_path / "a")
        losses = trained(model, optimizer, range(3, 5))
        future.result(TIMEOUT_S)
        plain = Model(seed=1)
        torchs = adamw(plain)
        plain_load(tmp_path / "a", plain, torchs)
        assert trained(plain, torchs, range(3, 5)) == losses
        assert_same(plain.state_dict(), model.state_dict())
        assert_same_moments(torchs, optimizer)


def test_all_forms_of_a_state_are_those_of_the_call(daemon: Daemon, tmp_path: Path) -> None:
    """Names of parameters, `detach()` of parameters, objects with a state, tensors and data."""
    with fresh(daemon, "async-forms") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        model_state, optimizer_state = get_state_dict(model, optimizer)
        own, notes = torch.ones(3), {"epochs": [1]}
        state = {
            "model": model_state,
            "optimizer": optimizer_state,
            "detached": {name: p.detach() for name, p in model.named_parameters()},
            "rows": model.get_parameter("layers.0.weight").detach()[:2],
            "object": model,
            "own": own,
            "notes": notes,
        }
        planner = Held()
        future = begin(state, tmp_path / "a", planner=planner)
        del state, model_state, optimizer_state
        own.zero_()
        notes["epochs"].append(2)
        trained(model, optimizer, range(1, 2))
        planner.may_go_on.set()
        future.result(TIMEOUT_S)
        empty = {name: torch.empty_like(value) for name, value in wanted.items()}
        found: dict[str, Any] = {
            "model": dict(empty),
            "detached": {name: empty[name].clone() for name, _ in model.named_parameters()},
            "rows": torch.empty(2, 64),
            "object": {name: value.clone() for name, value in empty.items()},
            "own": torch.empty(3),
            "notes": {"epochs": []},
        }
        load(found, checkpoint_id=tmp_path / "a")
        assert_same(found["model"], wanted)
        assert_same(found["object"], wanted)
        assert_same(found["detached"], {name: wanted[name] for name in found["detached"]})
        assert bits(found["rows"]) == bits(wanted["layers.0.weight"][:2])
        assert found["own"].tolist() == [1, 1, 1]
        assert found["notes"] == {"epochs": [1]}


def test_nothing_of_a_job_is_copied_or_read_by_the_call(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "async-none") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        leases = session.statistics().lease_count
        planner = Held()
        state = state_of(model, optimizer)
        wholes = [each["exp_avg"].whole for each in state["optimizer"]["state"].values()]
        future = begin(state, tmp_path / "a", planner=planner)
        assert session.statistics().lease_count == leases
        assert all(whole.is_passing for whole in wholes)
        del state
        gc.disable()  # the call itself keeps nothing
        try:
            trained(model, optimizer, range(1, 2))
        finally:
            gc.enable()
        planner.may_go_on.set()
        future.result(TIMEOUT_S)


def test_saves_may_overlap_and_each_has_its_values(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "async-two", nvme_bytes="256MiB") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        planners, futures, wanted = [Held(), Held()], [], []
        for step, planner in enumerate(planners):
            trained(model, optimizer, range(step, step + 1))
            wanted.append({name: value.clone() for name, value in model.state_dict().items()})
            futures.append(begin(state_of(model, optimizer), tmp_path / f"{step}", planner=planner))
        assert len(snapshots(daemon, "async-two")) == 2
        for planner in planners:
            planner.may_go_on.set()
        for step, future in enumerate(futures):
            future.result(TIMEOUT_S)
            found = {"model": {name: torch.empty_like(v) for name, v in wanted[step].items()}}
            load(found, checkpoint_id=tmp_path / f"{step}")
            assert_same(found["model"], wanted[step])
        assert snapshots(daemon, "async-two") == []


def test_one_writer_in_two_saves_at_a_time_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    class HeldLater(DefaultSavePlanner):
        """Holds the save within `write_data`."""

        def __init__(self, reached: threading.Event, may_go_on: threading.Event) -> None:
            super().__init__()
            self.reached, self.may_go_on = reached, may_go_on

        def resolve_data(self, write_item: Any) -> Any:
            self.reached.set()
            assert self.may_go_on.wait(TIMEOUT_S)
            return super().resolve_data(write_item)

    reached, may_go_on = threading.Event(), threading.Event()
    writer = memd_client.checkpoint.Writer(tmp_path / "a")
    planner = HeldLater(reached, may_go_on)
    first = begin_with(writer, {"x": torch.ones(3)}, planner=planner)
    assert reached.wait(TIMEOUT_S)
    second = begin_with(writer, {"x": torch.zeros(3)})
    with pytest.raises(CheckpointException) as raised:
        second.result(TIMEOUT_S)
    assert "this Writer is in another save" in str(the_error(raised))
    may_go_on.set()
    first.result(TIMEOUT_S)
    begin_with(writer, {"x": torch.full((3,), 2.0)}).result(TIMEOUT_S)
    found = {"x": torch.zeros(3)}
    load(found, checkpoint_id=tmp_path / "a")
    assert found["x"].tolist() == [2, 2, 2]


def test_a_save_that_fails_drops_its_snapshot_and_leaves_nothing(
    daemon: Daemon, tmp_path: Path
) -> None:
    with fresh(daemon, "async-full") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        planner = Held()
        future = begin(state_of(model, optimizer), tmp_path / "a", planner=planner)
        with no_file_larger_than(32 << 10):
            planner.may_go_on.set()
            error = future.exception(TIMEOUT_S)
        assert isinstance(error, CheckpointException)
        ((failure, _),) = error.failures.values()
        assert isinstance(failure, memd_client.CapacityError)
        assert snapshots(daemon, "async-full") == []
        assert names_in(tmp_path) == []
        begin(state_of(model, optimizer), tmp_path / "a").result(TIMEOUT_S)


def test_a_save_that_never_begins_to_write_drops_its_snapshot(
    daemon: Daemon, tmp_path: Path
) -> None:
    class Broken(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise ValueError("a planner of the user")

    with fresh(daemon, "async-broken") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        future = begin(state_of(model, optimizer), tmp_path / "a", planner=Broken())
        with pytest.raises(CheckpointException):
            future.result(TIMEOUT_S)
        del future
        gc.collect()
        begin(state_of(model, optimizer), tmp_path / "a").result(TIMEOUT_S)
        assert snapshots(daemon, "async-broken") == []


def test_closing_the_session_waits_for_the_save(daemon: Daemon, tmp_path: Path) -> None:
    session = memd_client.connect(daemon.address, job="async-close", host_bytes="16MiB")
    model = memd_client.offload(Model(), session)
    optimizer = memd_adamw(model)
    trained(model, optimizer, range(1))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    planner = Held()
    future = begin(state_of(model, optimizer), tmp_path / "a", planner=planner)
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    planner.may_go_on.set()
    future.result(TIMEOUT_S)
    closing.join(TIMEOUT_S)
    found = {"model": {name: torch.empty_like(value) for name, value in wanted.items()}}
    load(found, checkpoint_id=tmp_path / "a")
    assert_same(found["model"], wanted)
    assert snapshots(daemon, "async-close") == []
    with DaemonClient(daemon.attach_socket) as client:
        client.drop_job("async-close", force=False)


@pytest.mark.parametrize("where", ["step", "gather", "sessions", "outdated", "process"])
def test_what_cannot_be_saved_is_one_clear_error(
    daemon: Daemon, tmp_path: Path, where: str
) -> None:
    job = f"async-bad-{where}"
    with fresh(daemon, job) as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        state = state_of(model, optimizer)
        if where == "sessions":
            with fresh(daemon, job + "-other") as other:
                state["other"] = memd_client.offload(Model(), other).state_dict(keep_vars=True)
                with pytest.raises(memd_client.InvalidArgument, match="several sessions"):
                    begin(state, tmp_path / "a")
        elif where == "step":
            session.track(rng=True)
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            with pytest.raises(memd_client.InvalidArgument, match="commit"):
                begin(state, tmp_path / "a")
            session.commit()
        elif where == "gather":
            with (
                memd_client.gather(model, write=True),
                pytest.raises(memd_client.InvalidArgument, match="outside of gather"),
            ):
                begin(state, tmp_path / "a")
        elif where == "outdated":
            assert state["optimizer"]["state"][0]["exp_avg"].sum() != 0
            trained(model, optimizer, range(1, 2))
            with pytest.raises(memd_client.InvalidArgument, match="call state_dict"):
                begin(state, tmp_path / "a")
        else:
            # As torch does for its process: AsyncCheckpointerType.PROCESS.
            with pytest.raises(memd_client.NotYet, match="in the process that made it"):
                pickle.dumps(memd_client.checkpoint.Writer(tmp_path / "a").stage(state))
        assert names_in(tmp_path) == []
        begin(state_of(model, optimizer), tmp_path / "b").result(TIMEOUT_S)
        assert snapshots(daemon, job) == []


def test_a_quota_that_holds_no_state_more_is_refused_by_the_call(
    daemon: Daemon, tmp_path: Path
) -> None:
    with fresh(daemon, "async-quota", nvme_bytes="3MiB") as session:
        layers = [torch.nn.Linear(128, 128) for _ in range(2)]
        model = memd_client.offload(torch.nn.Sequential(*layers), session)
        optimizer = memd_client.AdamW(model.parameters(), 1e-3)
        for _ in range(8):
            model(torch.ones(1, 128)).sum().backward()
            optimizer.step()
        try:
            for index in range(40):
                session.snapshot(f"s{index}")
        except memd_client.CapacityError:
            pass
        with pytest.raises(memd_client.CapacityError, match="quota"):
            begin(state_of(model, optimizer), tmp_path / "a")
        assert names_in(tmp_path) == []
        with DaemonClient(daemon.attach_socket) as client:
            for name in snapshots(daemon, "async-quota"):
                assert not name.startswith(PREFIX)
                client.drop_snapshot("async-quota", name)
        begin(state_of(model, optimizer), tmp_path / "a").result(TIMEOUT_S)


def test_another_daemon_goes_on_with_the_save(daemons: Daemons, tmp_path: Path) -> None:
    daemon = daemons.start(name="async-again", nvme="512MiB")
    with memd_client.connect(
        daemon.address, job="again", host_bytes="16MiB", nvme_bytes="400MiB"
    ) as session:
        layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)]
        model = memd_client.offload(torch.nn.Sequential(*layers), session)
        optimizer = memd_client.AdamW(model.parameters(), 1e-3)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        future = begin(state_of(model, optimizer), tmp_path / "a")
        partial = tmp_path / "a"
        until = time.monotonic() + TIMEOUT_S
        while not any(each.stat().st_blocks * 512 > 4 << 20 for each in partial.glob(".*.partial")):
            assert time.monotonic() < until
            assert not future.done()
        daemon.stop(signal.SIGKILL)
        daemons.start(name="async-again", nvme="512MiB")
        future.result(4 * TIMEOUT_S)
        found = {"model": {name: torch.empty_like(value) for name, value in wanted.items()}}
        load(found, checkpoint_id=partial)
        assert_same(found["model"], wanted)
        session.drop_job()


KILLED = """
import sys, threading, torch, memd_client
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save

class Held(DefaultSavePlanner):
    def resolve_data(self, item):
        if sys.argv[2] == "kill":
            print("writing", flush=True)
            threading.Event().wait()
        return super().resolve_data(item)

session = memd_client.connect(sys.argv[1], job="async-killed", host_bytes="16MiB")
model = memd_client.offload(torch.nn.Linear(64, 64), session)
optimizer = memd_client.AdamW(model.parameters(), 1e-3)
model(torch.ones(1, 64)).sum().backward()
optimizer.step()
state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
async_save(
    state, storage_writer=memd_client.checkpoint.Writer(sys.argv[3]), planner=Held()
)
print(model.weight.sum().item().hex(), flush=True)
"""


def run_script(daemon: Daemon, how: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, daemon.address, how, str(path)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_script_that_ends_has_saved(daemon: Daemon, tmp_path: Path) -> None:
    process = run_script(daemon, "end", tmp_path / "a")
    said, _ = process.communicate(timeout=2 * TIMEOUT_S)
    assert process.returncode == 0
    found = {"model": {"weight": torch.empty(64, 64)}}
    load(found, checkpoint_id=tmp_path / "a")
    assert float(found["model"]["weight"].sum()).hex() == said.split()[-1]
    assert snapshots(daemon, "async-killed") == []
    with DaemonClient(daemon.attach_socket) as client:
        client.drop_job("async-killed", force=True)


def test_the_next_session_drops_what_a_killed_save_has_left(daemon: Daemon, tmp_path: Path) -> None:
    process = run_script(daemon, "kill", tmp_path / "a")
    with process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "writing":
            assert process.poll() is None
        process.kill()
    (left,) = snapshots(daemon, "async-killed")
    assert left.startswith(PREFIX)
    command = ["snapshot", "list", "async-killed", "--json", "--socket", str(daemon.socket)]
    listed = subprocess.run(
        [sys.executable, "-m", "memd", *command],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [each["name"] for each in json.loads(listed.stdout)] == [left]
    with memd_client.connect(daemon.address, job="async-killed", host_bytes="16MiB") as session:
        model = memd_client.offload(torch.nn.Linear(64, 64), session)
        assert snapshots(daemon, "async-killed") == []
        begin({"model": model.state_dict(keep_vars=True)}, tmp_path / "a").result(TIMEOUT_S)
        assert not [name for name in names_in(tmp_path / "a") if name.endswith(".partial")]
        session.drop_job()
