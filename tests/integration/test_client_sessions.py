"""Sessions with a real daemon: forks, refusals, memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import memd_client
from memd_client.base.address import EmbeddedAddress, parse_address
from memd_client.connection.embedded import embedded_daemon
from tests.daemons import Daemon, Daemons, running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="384MiB", nvme="768MiB") as daemon:
        yield daemon


def connect(daemon: Daemon, job: str) -> memd_client.Session:
    return memd_client.connect(daemon.address, job=job, host_bytes="128MiB", nvme_bytes="256MiB")


def test_a_tensor_larger_than_the_job_is_refused(daemon: Daemon) -> None:
    with connect(daemon, "small") as session:
        with pytest.raises(memd_client.CapacityError, match="x"):
            session.put("x", torch.empty(200 * MIB, dtype=torch.uint8))
        session.put("y", torch.ones(3))
        assert torch.equal(session.get("y"), torch.ones(3))
        session.drop_job()


def test_more_than_what_is_free_is_refused(daemon: Daemon) -> None:
    with pytest.raises(memd_client.CapacityError, match="host_bytes"):
        memd_client.connect(daemon.address, job="huge", host_bytes="1TiB")
    with pytest.raises(memd_client.CapacityError, match="nvme_bytes"):
        memd_client.connect(daemon.address, job="huge", nvme_bytes="1TiB")


def test_a_model_larger_than_the_pool_is_refused_and_stays(daemon: Daemon) -> None:
    with connect(daemon, "small") as session:
        module = torch.nn.Linear(5000, 5000)
        with pytest.raises(memd_client.CapacityError, match=r"host_bytes.*'Linear'.*95\.4 MiB"):
            memd_client.offload(module, session)
        assert type(module.weight) is torch.nn.Parameter
        session.drop_job()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_loop_waited_for_is_told_alike_by_its_session_and_by_the_daemon(
    daemon: Daemon,
) -> None:
    with connect(daemon, "stalls") as session:
        model = memd_client.offload(
            torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))), session
        )
        optimizer = memd_client.AdamW(model.parameters())
        began = time.perf_counter()
        for _ in range(4):
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()
        assert session.committed_step == 4
        elapsed_s = time.perf_counter() - began
        told = session.statistics()
        scraped = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(daemon.get("/metrics"))
            for sample in family.samples
            if sample.labels.get("memd_job") == "stalls"
        }
        assert 0 < told.step_wall_seconds < elapsed_s
        wall = scraped["memd_step_wall_seconds_total", "stalls"]
        assert wall == pytest.approx(told.step_wall_seconds)
        for name, parts in (
            ("memd_stall_seconds_total", told.stall_phase_seconds),
            ("memd_stall_group_seconds_total", told.stall_group_seconds),
        ):
            for part, waits in parts.items():
                for reason, seconds in waits.items():
                    assert scraped[(name, *sorted(("stalls", part, reason)))] == pytest.approx(
                        seconds
                    )
        assert set(told.stall_phase_seconds) == {"forward", "backward", "step", "other"}
        assert set(told.stall_group_seconds) == {"*", "other"}
        in_loop = [sum(told.stall_phase_seconds[each].values()) for each in ("forward", "backward")]
        assert min(in_loop) > 0
        assert sum(in_loop) < elapsed_s, "one thread cannot wait longer than it ran"
        session.drop_job()


# In a process of its own: gRPC's handler of fork() waits for its threads, and other tests have left
# some that do not end.
_FORKED = """
import os, sys
import torch
import memd_client
from tests.unit.client_cases import Mlp, loss_of

quota = {"host_bytes": "128MiB", "nvme_bytes": "256MiB"}
session = memd_client.connect(sys.argv[1], job="forked", **quota)
session.put("x", torch.arange(100_000))
tensor = session.get("x")
model = memd_client.offload(Mlp(), session)
child = os.fork()
if child == 0:
    status = 0 if int(tensor[99_999]) == 99_999 else 1
    del tensor
    try:
        loss_of(model)
        status |= 2
    except memd_client.MemdError as error:
        status |= 0 if "connect again in the child" in str(error) else 4
    os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert session.statistics().leases_held == 1, "the child gave back a pin of the parent's"
assert int(tensor.sum()) == 99_999 * 50_000
loss_of(model).backward()
del tensor
assert session.statistics().leases_held == 0
session.drop_job()
"""


def test_a_forked_child_reads_what_it_inherited_and_harms_nobody(daemon: Daemon) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _FORKED, daemon.address],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert answer.returncode == 0, answer.stderr


_MEMORY = """
import json, sys
import torch
import memd_client

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

session = memd_client.connect(sys.argv[1], job="memory", nvme_bytes="512MiB")
warm_up = torch.nn.Linear(512, 512)  # what torch and gRPC allocate once
memd_client.offload(warm_up, session)
once = memd_client.AdamW(warm_up.parameters())
warm_up(torch.ones(4, 512)).sum().backward()
once.step()
before = anonymous_bytes()
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(40)))
built = anonymous_bytes()
memd_client.offload(model, session)
offloaded = anonymous_bytes()
optimizer = memd_client.AdamW(model.parameters())
peak = 0
for step in range(3):
    model(torch.ones(4, 512)).sum().backward()
    peak = max(peak, anonymous_bytes())
    optimizer.step()
    peak = max(peak, anonymous_bytes())
print(json.dumps({"built": built - before, "offloaded": offloaded - before, "peak": peak - before}))
session.drop_job()
"""


def test_the_trainer_keeps_neither_parameters_nor_gradients_nor_states(
    daemon: Daemon,
) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _MEMORY, daemon.address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    grown = json.loads(answer.stdout)
    parameters_bytes = 40 * 513 * 512 * 4
    assert grown["built"] > 0.9 * parameters_bytes
    assert grown["offloaded"] < 4 * MIB, grown
    assert grown["peak"] < 12 * MIB, grown  # a layer's gradient at a time, and the steps' messages


def test_an_embedded_daemon_lives_as_long_as_its_process(disk_path: Path) -> None:
    script = (
        "import memd_client, torch\n"
        "where = 'embedded:?host=64MiB&nvme=64MiB'\n"
        "with memd_client.connect(where, job='a') as session:\n"
        "    session.put('x', torch.ones(3)); daemon = session.daemon_process_id\n"
        "with memd_client.connect(where, job='a') as session:\n"
        "    print(daemon == session.daemon_process_id, session.get('x').tolist(), daemon)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(disk_path)}
    answer = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    same, *values, process_id = answer.stdout.split()
    assert (same, values) == ("True", ["[1.0,", "1.0,", "1.0]"]), answer.stderr
    assert not Path(f"/proc/{process_id}").exists()
    assert list((disk_path / "memd").iterdir()) == []


def test_the_next_embedded_daemon_removes_what_a_killed_script_left(disk_path: Path) -> None:
    """Killed with its daemon, and killed alone: that daemon's folder stays until it has ended."""
    sockets = disk_path / "run"
    sockets.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(disk_path), "XDG_RUNTIME_DIR": str(sockets)}

    def script(then: str) -> list[str]:
        source = (
            "import memd_client, os, signal, torch\n"
            "session = memd_client.connect('embedded:?host=64MiB&nvme=64MiB', job='a')\n"
            "session.put('x', torch.ones(3))\n"
            f"{then}\n"
        )
        return [sys.executable, "-c", source]

    kill_both = (
        "[os.kill(each, signal.SIGKILL) for each in (session.daemon_process_id, os.getpid())]"
    )
    subprocess.run(script(kill_both), env=environment, check=False)
    left = [*(disk_path / "memd").iterdir(), *sockets.iterdir()]
    assert len(left) == 2
    with subprocess.Popen(
        script("print(flush=True); input()"),
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as live:
        assert live.stdout is not None
        live.stdout.readline()
        assert not any(folder.exists() for folder in left)
        others = [*(disk_path / "memd").iterdir(), *sockets.iterdir()]
        subprocess.run(script("session.close()"), env=environment, check=True)
        assert [*(disk_path / "memd").iterdir(), *sockets.iterdir()] == others
        live.kill()


def test_an_embedded_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(memd_client.DaemonUnavailable, match=r"file/nowhere cannot be made"):
        memd_client.connect(f"embedded:{tmp_path}/file/nowhere", job="a")
    with pytest.raises(memd_client.DaemonUnavailable, match="too little free space"):
        memd_client.connect(f"embedded:{tmp_path}/large?nvme=1000TiB", job="a")


def test_an_embedded_daemon_makes_the_folder_that_it_is_given(daemons: Daemons) -> None:
    folder = daemons.data / "new" / "embedded"
    address = f"embedded:{folder}?host=64MiB&nvme=64MiB"
    with memd_client.connect(address, job="a") as session:
        session.put("x", torch.ones(3))
        # A terminal interrupts the group.
        assert os.getpgid(session.daemon_process_id) != os.getpgid(0)
    assert (folder / "memd.volume").exists()
    embedded_daemon(cast("EmbeddedAddress", parse_address(address))).stop()


def test_what_ended_a_session_is_shown_before_what_closing_it_met(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMD_REATTACH_SECONDS", "0")
    daemon = daemons.start(name="masked")

    def fail() -> None:
        with memd_client.connect(daemon.address, job="masked") as session:
            session.put("x", torch.ones(3))
            daemon.process.kill()
            daemon.process.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        fail()
    assert "closing the session failed too" in raised.value.__notes__[0]


def test_closed_sessions_that_somebody_refers_to_hold_no_connection(daemon: Daemon) -> None:
    """As by a hook of a parameter, in a cycle that Python does not see."""
    kept: list[tuple[memd_client.Session, torch.Tensor]] = []
    for _ in range(40):  # the daemon gives a process 32
        session = memd_client.connect(daemon.address, job="kept")
        session.put("x", torch.ones(5000))
        kept.append((session, session.get("x")))
        session.close()
    assert all(torch.equal(tensor, torch.ones(5000)) for _, tensor in kept)
    with pytest.raises(memd_client.MemdError, match="the session is closed"):
        kept[0][0].get("x")


def test_a_closed_session_keeps_no_descriptor_open(daemon: Daemon) -> None:
    def descriptor_count() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    def put() -> None:
        with memd_client.connect(daemon.address, job="closed") as session:
            session.put("x", torch.ones(3))

    put()  # gRPC keeps some of the first call's
    gc.disable()
    try:
        before = descriptor_count()
        for _ in range(8):
            put()
        assert descriptor_count() - before < 8, "they wait for the garbage collector"
    finally:
        gc.enable()
