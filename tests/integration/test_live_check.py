"""`memd check` of volumes that a daemon has open: the daemon reads them beside its work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from memd.client import DaemonClient
from memd.refusal import Refused
from tests.daemons import TIMEOUT_S
from tests.golden import image

if TYPE_CHECKING:
    from tests.daemons import Daemon, Daemons

PACKED = Path(image.__file__).parent / "format-1.1.xz.b64"
BLOCK = 4096


def memd(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MEMD_")}
    answer = subprocess.run(
        [sys.executable, "-m", "memd", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    assert answer.returncode == status, answer
    return answer


def answer_of(*arguments: object, status: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(memd(*arguments, "--json", status=status).stdout)
    return told


def started(daemons: Daemons, name: str) -> tuple[Daemon, Path]:
    """A daemon on the golden image, and its volume."""
    folder = daemons.data_folder(name)
    image.unpack(PACKED, folder)
    volume = folder / "memd.volume"
    size = f"{volume.stat().st_size}B"
    return daemons.start(name=name, nvme=size, environ={"MEMD_SCRUB": "0"}), volume


def test_a_daemon_says_the_same_of_its_volumes_as_who_reads_them_without_it(
    daemons: Daemons,
) -> None:
    daemon, volume = started(daemons, "same")
    online = answer_of("check", "--socket", daemon.socket)
    text = memd("check", "--socket", daemon.socket).stdout.splitlines()
    assert text[0].startswith("job golden: all right, step 2, 8 shards")
    assert text[-1].startswith("all right: 4.5 MiB read in ")
    assert online["volumes"][0]["in_use_by"] == f"process {daemon.process.pid}"
    assert daemon.stop() == 0
    offline = answer_of("check", "--data", volume.parent)
    for each in (online, offline):
        for varying in ("seconds", "bytes"):
            del each[varying]
        del each["volumes"][0]["in_use_by"]
        # The daemon's last sync is a commit more.
        del each["volumes"][0]["sequence"]
    assert online == offline


def test_what_is_lost_is_named_and_the_job_stays_where_it_is(daemons: Daemons) -> None:
    daemon, volume = started(daemons, "lost")
    data = volume.read_bytes()
    block = image.pattern("blob", image.UINT8, BLOCK)
    at = next(at for at in range(2 << 20, len(data), BLOCK) if data[at : at + BLOCK] == block)
    with volume.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([data[at + 5] ^ 1]))
    told = answer_of("check", "--socket", daemon.socket, "--job", image.JOB, status=3)
    (finding,) = told["findings"]
    assert finding["lost"]
    assert (finding["path"], finding["offset_bytes"]) == (str(volume), at)
    assert (finding["job"], finding["shards"]) == (image.JOB, ["blob"])
    assert told["jobs"][0]["lost_shards"] == ["blob"]
    assert told["volumes"] == []  # one job was asked for
    text = memd("check", "--socket", daemon.socket, status=3).stdout
    assert f"LOST: {image.JOB}/blob bytes from 0" in text
    jobs = answer_of("status", "--socket", daemon.socket)["jobs"]
    assert next(job for job in jobs if job["name"] == image.JOB)["lost_shards"] == ["blob"]
    other = answer_of("check", "--socket", daemon.socket, "--job", image.OTHER_JOB)
    assert not other["lost"]
    assert daemon.stop() == 0


def test_wrong_use_says_what_is_wrong(daemon: Daemon, tmp_path: Path) -> None:
    both = memd("check", "--socket", daemon.socket, "--data", tmp_path, status=2).stderr
    assert "name one of them" in both
    nobody = memd("check", "--socket", daemon.socket, "--job", "nobody", status=1).stderr
    assert "there is no job" in nobody
    nowhere = memd("check", "--socket", tmp_path / "no.sock", status=4).stderr
    assert "no daemon answers" in nowhere


def test_who_leaves_a_check_ends_it(daemon: Daemon) -> None:
    with DaemonClient(daemon.attach_socket) as client:
        left = client.check("")
        next(left)
        left.close()

        def refusal() -> str:
            try:
                assert list(client.check(""))[-1].HasField("report")
            except Refused as refused:
                return str(refused)
            return ""

        deadline = time.monotonic() + TIMEOUT_S
        while told := refusal():  # the daemon finds out with the next message
            assert "a check runs since" in told
            assert time.monotonic() < deadline


def test_two_at_once_are_refused_or_follow_each_other(daemon: Daemon) -> None:
    reports = []
    refusals = []

    def check() -> None:
        with DaemonClient(daemon.attach_socket) as client:
            try:
                reports.append(list(client.check(""))[-1].HasField("report"))
            except Refused as refused:
                refusals.append(str(refused))

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(reports) + len(refusals) == 4
    assert reports
    assert all(reports)
    assert all("a check runs since" in text for text in refusals)


def test_without_a_token_nobody_checks(daemon: Daemon) -> None:
    from memd_proto.v1 import check_pb2, check_pb2_grpc

    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        stub = check_pb2_grpc.CheckServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Check(check_pb2.CheckRequest()))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
