"""How a daemon starts, or does not: one clear message each, and nothing changed."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memd_proto.v1 import status_pb2
from tests.daemons import HOST_BYTES, Attached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon, Daemons


@pytest.fixture
def folder(daemons: Daemons) -> Iterator[Path]:
    """An empty folder on a disk."""
    path = Path(tempfile.mkdtemp(dir=daemons.data))
    yield path
    path.chmod(0o700)
    shutil.rmtree(path)


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def test_a_daemon_says_in_one_line_where_it_serves(daemon: Daemon) -> None:
    assert daemon.ready_line.startswith(f"memd ready: unix://{daemon.socket}, host 64 MiB, nvme ")
    assert daemon.socket.stat().st_mode & 0o777 == 0o660
    assert daemon.attach_socket.stat().st_mode & 0o777 == 0o660


def test_a_daemon_says_that_it_is_ready_after_all_that_its_log_says_of_the_start(
    daemons: Daemons,
) -> None:
    # One pipe for both: what is read is in the order in which it was written.
    with subprocess.Popen(
        daemons.command(name="order"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        before = list(itertools.takewhile(lambda line: not line.startswith("memd ready: "), lines))
        process.terminate()
    assert "event=ready " in before[-1], before


def test_a_daemon_names_its_volumes_before_it_reads_them(daemon: Daemon) -> None:
    events = daemon.log.read_text()
    opening = events.index('event="opening the volumes"')
    assert str(daemon.data) in events[opening:].splitlines()[0]
    assert opening < events.index("event=ready")


def test_a_daemon_is_small_beside_its_pool(daemon: Daemon) -> None:
    with Attached(daemon.attach_socket) as client:
        client.attach("small")
    assert daemon.get("/readyz") == "ready\n"
    # The pool is shared memory: it does not count here.
    assert daemon.rss_anon_bytes() < 80 << 20


def test_a_volume_is_written_once_and_used_as_it_is_from_then_on(daemons: Daemons) -> None:
    def format_seconds() -> float:
        daemon = daemons.start(name="quick")
        assert daemon.stop() == 0
        return float(daemon.log.read_text().partition("format_seconds=")[2].split()[0])

    assert format_seconds() > 0
    assert format_seconds() == 0


def test_what_was_calibrated_is_used_from_the_next_start_on(daemons: Daemons) -> None:
    def path_event() -> str:
        daemon = daemons.start(name="calibrated")
        with Attached(daemon.attach_socket) as client:
            (device,) = client.call(client.status.GetStatus, status_pb2.GetStatusRequest()).devices
        assert daemon.stop() == 0
        (event,) = [line for line in daemon.log.read_text().splitlines() if "event=path" in line]
        assert f"depth={device.io_depth} chunk_bytes={device.io_chunk_bytes} " in event
        return event.partition("depth=")[2]

    kept = daemons.data_folder("calibrated") / "memd.calibration"
    assert path_event() == f"32 chunk_bytes={1 << 20} origin=default"
    kept.write_text('{"version": 1, "depth": 5, "chunk_bytes": 524288}')
    assert path_event() == f"5 chunk_bytes={512 << 10} origin={kept}"
    kept.write_text('{"version": 1, "depth":')
    assert path_event() == f"32 chunk_bytes={1 << 20} origin=default"


def test_a_second_daemon_on_the_same_data_is_refused(daemons: Daemons, daemon: Daemon) -> None:
    refusal = daemons.refusal(name="second", data=str(daemon.data))
    assert str(daemon.data) in refusal
    assert str(daemon.process.pid) in refusal
    assert daemon.get("/readyz") == "ready\n"


def test_a_second_daemon_on_the_same_socket_is_refused(daemons: Daemons, daemon: Daemon) -> None:
    refusal = daemons.refusal(data=str(daemons.data_folder("other")))
    assert f"another daemon serves {daemon.socket}" in refusal
    assert "choose another socket with --socket" in refusal
    assert not list(daemons.data_folder("other").iterdir())
    with Attached(daemon.attach_socket) as client:
        assert client.welcome.token


def test_sockets_of_a_killed_daemon_are_replaced(daemons: Daemons) -> None:
    killed = daemons.start(name="killed")
    killed.process.kill()
    killed.process.wait()
    assert killed.socket.is_socket()
    assert killed.attach_socket.is_socket()
    after = daemons.start(name="killed")
    with Attached(after.attach_socket) as client:
        assert client.attach("again").created
    assert after.stop() == 0


def test_what_is_no_socket_is_left_where_it_is(daemons: Daemons) -> None:
    path = daemons.sockets / "taken" / "memd.sock"
    path.parent.mkdir()
    path.write_text("mine")
    assert f"{path} is in the way and is no socket" in daemons.refusal(name="taken")
    assert path.read_text() == "mine"


def test_a_socket_folder_that_cannot_be_made_is_named(daemons: Daemons) -> None:
    refusal = daemons.refusal(socket="/proc/none/memd.sock")
    assert "/proc/none/memd.sock cannot be used" in refusal
    assert "choose another with --socket" in refusal


def test_a_taken_metrics_port_is_refused(daemons: Daemons) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        refusal = daemons.refusal(name="metrics", metrics=endpoint)
    assert f"metrics cannot be served at {endpoint}: Address already in use" in refusal
    assert not (daemons.sockets / "metrics" / "memd.sock").exists()
    assert not (daemons.sockets / "metrics" / "attach.sock").exists()
    assert list(daemons.data_folder("metrics").iterdir()) == [], "nothing was formatted for it"


def test_wrong_settings_are_wrong_use(daemons: Daemons) -> None:
    refusal = daemons.refusal(name="wrong", status=2, host="64")
    assert "--host: host: '64' has no unit; write a number and one of B, KiB" in refusal


def test_a_pool_larger_than_memory_is_refused(daemons: Daemons, folder: Path) -> None:
    refusal = daemons.refusal(name="large", host="900TiB", data=str(folder))
    assert "does not fit" in refusal
    assert "choose a smaller pool" in refusal
    assert not list(folder.glob("*.volume*"))


def test_a_pool_beyond_the_memlock_limit_is_refused_for_the_service(
    daemons: Daemons, folder: Path
) -> None:
    needs("setpriv")
    needs("prlimit")
    before = ["prlimit", "--memlock=1048576"]
    if os.geteuid() == 0:  # root may lock beyond the limit
        before += ["setpriv", "--bounding-set", "-ipc_lock"]
    command = daemons.command(name="locked", data=str(folder))
    command.remove("--unlocked-ok")
    answer = subprocess.run(
        [*before, *command], capture_output=True, text=True, check=False, timeout=60
    )
    refusal = answer.stderr.splitlines()[-1]
    assert answer.returncode == 1
    assert "memlock" in refusal
    assert "1048576 bytes" in refusal or "1 MiB" in refusal
    assert str(HOST_BYTES) in refusal or "64 MiB" in refusal
    unlocked = daemons.start(name="unlocked", before=before)
    assert "the pool is not locked" in unlocked.log.read_text()
    assert unlocked.stop() == 0


def test_huge_pages_are_said_to_be_written_by_everybody(daemons: Daemons) -> None:
    huge = daemons.start(name="huge", environ={"MEMD_HUGE_PAGES": "true"})
    assert "a write to a parameter through .data or a view changes it for" in huge.log.read_text()
    assert huge.stop() == 0
    small = daemons.start(name="small")
    assert "a write to a parameter" not in small.log.read_text()
    assert small.stop() == 0


def test_a_missing_data_folder_is_refused(daemons: Daemons, folder: Path) -> None:
    missing = folder / "missing"
    assert f"{missing} does not exist; create it" in daemons.refusal(data=str(missing), name="m")
    assert not missing.exists()


def test_a_data_folder_that_may_not_be_written_is_refused(daemons: Daemons, folder: Path) -> None:
    needs("setpriv")
    folder.chmod(0o500)
    before = []
    if os.geteuid() == 0:  # root may write where the mode says no
        before = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    refusal = daemons.refusal(name="readonly", before=before, data=str(folder))
    assert str(folder) in refusal
    assert "Permission denied" in refusal
    assert not list(folder.iterdir())


def test_a_volume_larger_than_the_disk_is_refused(daemons: Daemons, folder: Path) -> None:
    refusal = daemons.refusal(name="full", nvme="900TiB", data=str(folder))
    assert str(folder) in refusal
    assert "free" in refusal
    assert not [path for path in folder.iterdir() if path.stat().st_size]


def test_a_data_folder_in_memory_is_refused(daemons: Daemons) -> None:
    command = ["stat", "--file-system", "--format=%T", "/dev/shm"]
    if subprocess.run(command, capture_output=True, text=True, check=False).stdout != "tmpfs\n":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        refusal = daemons.refusal(name="tmpfs", data=name)
        assert not list(Path(name).iterdir())
    assert name in refusal
    assert "tmpfs" in refusal
    assert "on a disk" in refusal


def test_a_file_system_without_direct_io_is_refused(daemons: Daemons, folder: Path) -> None:
    needs("unshare")
    mount = f"mount -t ramfs none {folder}"
    before = ["unshare", "--mount", "bash", "-c", f'{mount} || exit 99; exec "$0" "$@"']
    probe = subprocess.run([*before, "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("a file system without O_DIRECT can't be mounted here")
    refusal = daemons.refusal(name="ramfs", before=before, data=str(folder))
    assert str(folder) in refusal
    assert "O_DIRECT" in refusal or "in memory" in refusal


def test_a_data_folder_made_for_another_size_is_refused(daemons: Daemons, daemon: Daemon) -> None:
    sized = daemons.start(name="sized", nvme="64MiB")
    assert sized.stop() == 0
    refusal = daemons.refusal(name="sized", nvme="128MiB")
    assert "memd.volume has another size" in refusal
    assert "67108864" in refusal
