"""`memd doctor`: each obstacle is planted, answered with its cure, and stops a daemon too if the
doctor says so."""

from __future__ import annotations

import grp
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from memd.config import Settings
from memd.doctor import calls, folders, kernel, memory, sockets
from memd.doctor.command import run
from memd.doctor.finding import State
from memd.users import user_name
from memd_proto.v1 import job_pb2, status_pb2
from tests.cgroups import memory_limit
from tests.daemons import TIMEOUT_S
from tests.integration.failing_reads import JOB, stored_blobs
from tests.integration.test_daemon_service import with_mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memd.client import DaemonClient
    from memd.doctor.finding import Finding
    from tests.daemons import Daemons

FILTER = Path(__file__).parents[2] / "build/release/without_io_uring"


@pytest.fixture
def folder(daemons: Daemons) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=daemons.data))
    yield path
    path.chmod(0o700)
    shutil.rmtree(path)


def doctor(
    daemons: Daemons, *, name: str = "ill", before: Sequence[str] = (), **settings: str
) -> dict[str, dict[str, Any]]:
    """Findings by check."""
    found = doctor_lines(daemons, name=name, before=before, **settings)
    return {each["check"]: each for each in found}


def doctor_lines(
    daemons: Daemons, *, name: str = "ill", before: Sequence[str] = (), **settings: str
) -> list[dict[str, Any]]:
    """Findings in order. The exit code is 1 where one is an obstacle."""
    command = daemons.command(name=name, **settings)
    command.remove("--unlocked-ok")
    command[command.index("serve")] = "doctor"
    answer = subprocess.run(
        [*before, *command, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert answer.returncode in (0, 1), answer
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    obstacles = [each for each in found if each["state"] == "obstacle"]
    assert answer.returncode == (1 if obstacles else 0), found
    for each in found:
        assert bool(each["cure"]) == (each["state"] != "ok"), each
    return found


def obstacles(found: dict[str, dict[str, Any]]) -> list[str]:
    return [check for check, each in found.items() if each["state"] == "obstacle"]


def without(capabilities: str) -> list[str]:
    """Root may do what the limits and modes forbid."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    return ["setpriv", "--bounding-set", capabilities]


def serve_refuses(daemons: Daemons, *, before: Sequence[str] = (), **settings: str) -> None:
    command = daemons.command(name="ill", **settings)
    command.remove("--unlocked-ok")
    answer = subprocess.run(
        [*before, *command], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert answer.returncode != 0, "what the doctor calls an obstacle stops no daemon"


def test_a_memlock_limit_below_the_pool(daemons: Daemons, folder: Path) -> None:
    before = ["prlimit", "--memlock=1048576", *without("-ipc_lock")]
    found = doctor(daemons, before=before, data=str(folder))
    assert obstacles(found) == ["memlock"]
    assert "the memlock limit is 1 MiB" in found["memlock"]["found"]
    assert "LimitMEMLOCK=infinity" in found["memlock"]["cure"]
    serve_refuses(daemons, before=before, data=str(folder))


def test_a_pool_beyond_what_is_available(daemons: Daemons, folder: Path) -> None:
    found = doctor(daemons, data=str(folder), host="100TiB")
    assert "memory" in obstacles(found)
    assert "choose a smaller host" in found["memory"]["cure"]
    serve_refuses(daemons, data=str(folder), host="100TiB")


def test_few_descriptors(daemons: Daemons, folder: Path) -> None:
    found = doctor(daemons, before=["prlimit", "--nofile=512:512"], data=str(folder))
    assert found["descriptors"]["state"] == "note"
    assert "LimitNOFILE=65536" in found["descriptors"]["cure"]
    assert obstacles(found) == []


@pytest.mark.parametrize("errno_name", ["EPERM", "ENOSYS"])
def test_io_uring_behind_a_seccomp_filter(daemons: Daemons, folder: Path, errno_name: str) -> None:
    found = doctor(daemons, before=[str(FILTER), errno_name], data=str(folder))
    assert found["io_uring"]["state"] == "note"
    assert errno_name in found["io_uring"]["found"]
    assert "a seccomp filter refuses it" in found["io_uring"]["cure"]
    assert obstacles(found) == []


def test_a_data_folder_that_is_missing(daemons: Daemons, folder: Path) -> None:
    missing = folder / "missing"
    found = doctor(daemons, data=str(missing))
    assert obstacles(found) == [f"data {missing}"]
    assert f"install -d -o memd -g memd -m 700 {missing}" in found[f"data {missing}"]["cure"]
    serve_refuses(daemons, data=str(missing))


def test_a_data_folder_that_may_not_be_written(daemons: Daemons, folder: Path) -> None:
    folder.chmod(0o500)
    before = without("-dac_override,-dac_read_search")
    found = doctor(daemons, before=before, data=str(folder))
    assert obstacles(found) == [f"data {folder}"]
    assert "Permission denied" in found[f"data {folder}"]["found"]
    assert f"ReadWritePaths={folder}" in found[f"data {folder}"]["cure"]
    serve_refuses(daemons, before=before, data=str(folder))


def test_a_data_folder_in_memory(daemons: Daemons) -> None:
    if folders.file_system_of(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        found = doctor(daemons, data=name)
        assert list(Path(name).iterdir()) == []
        assert obstacles(found) == [f"data {name}"]
        assert "tmpfs" in found[f"data {name}"]["found"]
        assert "choose a folder on a disk" in found[f"data {name}"]["cure"]
        serve_refuses(daemons, data=name)


DIRECT = """
import sys
from pathlib import Path
from memd.doctor import folders
folders._IN_MEMORY = ()  # ramfs is refused for that; here it stands for any without O_DIRECT
for found in folders.look(Path(sys.argv[1]), volume_bytes=0):
    print(found.state, found.found, found.cure)
"""


def test_a_file_system_without_direct_io(folder: Path) -> None:
    mount = f'mount -t ramfs none {folder} || exit 99; exec "$0" "$@"'
    before = ["unshare", "--mount", "bash", "-c", mount]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system without O_DIRECT can't be mounted here")
    command = [*before, sys.executable, "-c", DIRECT, str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == (
        "obstacle its file system takes no O_DIRECT use ext4 or xfs, or another that does\n"
    )


def test_a_disk_that_is_too_small(daemons: Daemons, folder: Path) -> None:
    found = doctor(daemons, data=str(folder), nvme="900TiB")
    assert obstacles(found) == [f"space {folder}"]
    assert "add a folder on another drive" in found[f"space {folder}"]["cure"]
    serve_refuses(daemons, data=str(folder), nvme="900TiB")


def test_a_volume_of_another_size_and_one_that_is_in_use(daemons: Daemons) -> None:
    daemon = daemons.start(name="sized", nvme="64MiB")
    # Another socket, the same data.
    found = doctor(daemons, name="other", data=str(daemon.data), nvme="64MiB")
    assert obstacles(found) == [f"volume {daemon.data}"]
    assert "is in use by" in found[f"volume {daemon.data}"]["found"]
    assert daemon.stop() == 0
    found = doctor(daemons, name="sized", nvme="128MiB")
    assert obstacles(found) == [f"volume {daemon.data}"]
    assert 'nvme = "64MiB"' in found[f"volume {daemon.data}"]["cure"]
    assert obstacles(doctor(daemons, name="sized", nvme="64MiB")) == []


def test_a_port_that_is_taken_and_one_that_is_open_to_all(daemons: Daemons, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = doctor(daemons, data=str(folder), metrics=f"127.0.0.1:{port}")
    assert obstacles(found) == ["metrics"]
    assert f"ss -ltnp sport = :{port}" in found["metrics"]["cure"]
    found = doctor(daemons, data=str(folder), metrics="0.0.0.0:0")
    assert found["metrics"]["state"] == "note"
    assert "firewall" in found["metrics"]["cure"]


def test_a_healthy_machine_and_a_daemon_that_answers(daemons: Daemons, folder: Path) -> None:
    found = doctor(daemons, data=str(folder))
    assert obstacles(found) == []
    assert found["daemon"]["state"] == "note"
    assert list(folder.iterdir()) == []
    daemon = daemons.start(name="well", before=[str(FILTER), "EPERM"])
    found = doctor(daemons, name="well")
    assert found["socket"]["state"] == found["daemon"]["state"] == "ok"
    assert "Operation not permitted" in found["io_uring"]["found"]
    assert obstacles(found) == []
    assert daemon.stop() == 0


# It loads what it needs before it becomes a user who may enter neither the checkout nor a closed
# home, as test_daemon_service.py does.
OUTSIDER = """
import os, sys
from pathlib import Path
from memd.doctor import sockets
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
found = sockets.group_member(Path(sys.argv[1]) / "attach.sock")
print(found.state, found.found, "|", found.cure)
"""


def test_a_user_outside_of_the_sockets_group(daemons: Daemons) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    daemon = daemons.start(name="closed")
    sockets_folder = daemon.socket.parent

    def said() -> str:
        command = [sys.executable, "-c", OUTSIDER, str(sockets_folder)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with with_mode(0o755, daemons.sockets):
        assert said().startswith(f"obstacle {sockets_folder} is closed to user nobody")
        with with_mode(0o755, sockets_folder):
            text = said()
            assert text.startswith(f"obstacle {daemon.attach_socket} is closed to user nobody")
            assert "usermod --append --groups root nobody, and then log in again" in text
            with with_mode(0o666, daemon.attach_socket):
                assert said().startswith("ok ")
    assert daemon.stop() == 0


def test_a_member_of_the_group_who_has_not_logged_in_since(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = user_name(os.geteuid())
    attach_socket = folder / "attach.sock"
    attach_socket.touch()

    def entry(name: str) -> grp.struct_group:
        return grp.struct_group((name, "x", os.getegid(), [user]))

    monkeypatch.setattr("memd.doctor.sockets.os.access", lambda *_, **__: False)
    monkeypatch.setattr("memd.doctor.sockets.grp.getgrnam", entry)
    found = sockets.group_member(attach_socket)
    assert found is not None
    assert found.state is State.OBSTACLE
    assert f"although {user} is in its group" in found.found
    assert found.cure == "log in again, so that new processes are in the group"


class IllDaemon:
    """Its answer is that of one whose drive has failed."""

    def __enter__(self) -> IllDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> status_pb2.GetStatusResponse:
        return status_pb2.GetStatusResponse(
            version="9.9",
            io_engine="io_uring",
            pool=status_pb2.Pool(locked=False, note="Cannot allocate memory"),
            fence_reason="/data/memd.volume: Input/output error",
            jobs=[job_pb2.Job(name="gpt", lost_shard_count=2, committed_step=7)],
        )


def test_a_daemon_that_is_fenced_and_has_lost_shards(tmp_path: Path) -> None:
    settings = Settings(socket=tmp_path / "memd.sock")
    found = {each.check: each for each in run(settings, lambda: cast("DaemonClient", IllDaemon()))}
    assert found["memlock"].state is State.NOTE
    assert "Cannot allocate memory" in found["memlock"].found
    assert found["volumes"].state is found["job gpt"].state is State.OBSTACLE
    assert "nothing is committed: /data/memd.volume: Input/output" in found["volumes"].found
    assert "`memd check`" in found["volumes"].cure
    assert found["job gpt"].found == "2 shards are lost; it stays at step 7"
    assert "`memd snapshot restore` an older step" in found["job gpt"].cure


def test_a_daemon_that_lost_one_shard_and_cannot_read_another(daemons: Daemons) -> None:
    with stored_blobs(daemons, "whole", "flipped", "failing", name="two-ills") as job:
        assert obstacles(doctor(daemons, name="two-ills")) == []
        job.flip_a_bit("flipped")
        assert "read twice" in job.failure_of("flipped")
        with job.failing_from("failing"):
            assert "can't be read now" in job.failure_of("failing")
            found = doctor_lines(daemons, name="two-ills")
        assert [each["found"] for each in found if each["state"] == "obstacle"] == [
            "1 shards are lost; it stays at step 0",
            "the device failed to read failing; nothing is lost yet",
        ]
        assert "`memd snapshot restore` an older step" in found[-2]["cure"]
        assert "look at the drive: the next use tries again" in found[-1]["cure"]
        assert job.failure_of("failing") == ""
        found = doctor_lines(daemons, name="two-ills")
        assert [each["check"] for each in found if each["state"] == "obstacle"] == [f"job {JOB}"]


def test_huge_pages_that_are_not_reserved(tmp_path: Path) -> None:
    free = tmp_path / "free_hugepages"
    free.write_text("3\n")
    found = memory.huge_pages(64 << 20, wanted=True, free=free)
    assert found.state is State.NOTE
    assert found.found.startswith("3 of the 32 that host needs")
    assert "sysctl vm.nr_hugepages=32" in found.cure
    assert memory.huge_pages(64 << 20, wanted=False, free=free).state is State.OK
    assert memory.huge_pages(1, wanted=True, free=tmp_path / "none").state is State.NOTE


def test_a_drive_whose_flush_is_slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("memd.doctor.folders.time.monotonic", lambda: next(clock) * 0.01)
    found = {each.check: each for each in folders.look(folder, volume_bytes=1 << 20)}
    sync = found[f"sync {folder}"]
    assert sync.state is State.NOTE
    assert sync.found.startswith("10.00 ms for a write and its sync")
    assert "power-loss protection" in sync.cure
    assert list(folder.iterdir()) == []


def test_a_link_that_is_planted_is_not_followed(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "shadow"
    probe = folder / "memd.doctor"
    for is_there in (True, False):
        if is_there:
            victim.write_text("secret")
        else:
            victim.unlink()
        probe.symlink_to(victim)
        (found,) = folders.look(folder, volume_bytes=1 << 20)
        assert found.state is State.OBSTACLE
        assert "memd.doctor that is no plain file" in found.found
        assert found.cure == f"rm {probe}"
        assert probe.is_symlink()
        assert victim.exists() == is_there
        assert not is_there or victim.read_text() == "secret"
        probe.unlink()


def test_the_file_of_a_doctor_that_was_killed_is_no_obstacle(folder: Path) -> None:
    (folder / "memd.doctor").write_text("stale")
    states = {each.state for each in folders.look(folder, volume_bytes=1 << 20)}
    assert State.OBSTACLE not in states
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [1, 2])
def test_io_uring_that_a_sysctl_disables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disabled = tmp_path / "io_uring_disabled"
    disabled.write_text(f"{number}\n")
    monkeypatch.setattr(kernel, "io_uring_errno", lambda: 1)
    assert calls.io_uring(disabled=disabled).cure == "sysctl kernel.io_uring_disabled=0"


def control_group(
    tmp_path: Path, *, version: int, limits: Mapping[str, str], used: int, cached: int = 0
) -> Finding:
    """Of a host of 3 GiB, in a group that is two below the root of its hierarchy. `limits` are
    those of groups by path."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   67108864 kB\n")
    root, line = tmp_path / "cgroup", "0::/kubepods/pod1/box\n"
    names = ("memory.max", "memory.current", "")
    if version == 1:
        # A later kernel mounts the second version beside it, without the memory controller.
        line = f"12:pids:/elsewhere\n5:memory,hugetlb:/kubepods/pod1/box\n{line}"
        root, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    (tmp_path / "proc/self/cgroup").write_text(line)
    for path, limit in limits.items():
        group = root / path
        group.mkdir(parents=True, exist_ok=True)
        (group / names[0]).write_text(f"{limit}\n")
        (group / names[1]).write_text(f"{used}\n")
        statistics = {"inactive_file": cached // 2, "active_file": cached - cached // 2}
        lines = [f"{names[2]}{name} {size}\n" for name, size in statistics.items()]
        (group / "memory.stat").write_text("anon 1\n" + "".join(lines))
    return memory.room(3 << 30, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")


# As the kernel shows that there is none.
NO_LIMIT = {1: "9223372036854771712", 2: "max"}


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_that_is_smaller_than_the_pool(tmp_path: Path, version: int) -> None:
    limits = {"kubepods/pod1/box": NO_LIMIT[version], "kubepods/pod1": f"{3 << 30}"}
    found = control_group(tmp_path, version=version, limits=limits, used=1 << 30)
    assert found.state is State.OBSTACLE
    assert "2 GiB is what its control group /kubepods/pod1 has left" in found.found


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_whose_memory_is_page_cache_has_room(tmp_path: Path, version: int) -> None:
    limits = {"kubepods/pod1": f"{4 << 30}"}
    found = control_group(tmp_path, version=version, limits=limits, used=4 << 30, cached=3 << 30)
    assert found.state is State.OK
    assert "3 GiB is what its control group /kubepods/pod1 has left" in found.found


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_control_group_as_the_root(tmp_path: Path, version: int) -> None:
    found = control_group(tmp_path, version=version, limits={"": f"{1 << 30}"}, used=0)
    assert found.state is State.OBSTACLE
    assert "1 GiB is what its control group / has left" in found.found


def test_a_control_group_of_the_kernel_s_that_is_smaller_than_the_pool(
    daemons: Daemons, folder: Path
) -> None:
    try:
        with memory_limit(256 << 20) as before:
            found = doctor(daemons, before=before, data=str(folder), host="1GiB")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    assert "memory" in obstacles(found)
    assert re.search(
        r"MiB is what its control group /\S*memd-\d+ has left", found["memory"]["found"]
    )
    assert "raise the limit of the container or unit" in found["memory"]["cure"]


def test_system_calls_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls.needed().state is State.OK

    def refused(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("memd.doctor.calls.os.pidfd_open", refused)
    found = calls.needed()
    assert found.state is State.OBSTACLE
    assert "pidfd_open: Function not implemented (ENOSYS)" in found.found
    monkeypatch.setattr(kernel, "peer_pidfd_errno", lambda: 92)
    assert "Linux 6.5 or newer" in calls.peer_pidfds().cure
