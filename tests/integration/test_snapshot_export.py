"""`memd snapshot export`: a committed step becomes a folder of safetensors files."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import memd_client
from memd.client import DaemonClient
from memd.refusal import Refused, StatusCode
from memd_client.checkpoints.safetensors_header import encode_header as client_encode_header
from memd_proto.v1 import job_pb2
from tests.daemons import TIMEOUT_S, Attached
from tests.faults.exports import (
    JOB,
    LARGE_BLOBS,
    begun,
    bytes_of,
    drop_job,
    export,
    make_job,
    partial_of,
)
from tests.integration.test_snapshots import memd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.daemons import Daemon, Daemons

HOST_BYTES = 40 << 20


class Model(nn.Module):
    """A weight of several tiles, small ones that share a bucket, a buffer and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, 1100)
        self.norm = nn.BatchNorm1d(1100)
        self.last = nn.Linear(1100, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.frozen(self.last(self.norm(self.wide(inputs))))
        return output


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    model(torch.randn(4, 512, generator=generator).to(dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def job_of(daemon: Daemon, name: str) -> Iterator[memd_client.Session]:
    """It goes with its snapshots."""
    session = memd_client.connect(daemon.address, job=name, host_bytes=HOST_BYTES)
    try:
        yield session
    finally:
        session.close()
        with DaemonClient(daemon.attach_socket) as client:
            client.drop_job(name, force=True)


@contextmanager
def exported_job(daemon: Daemon, dtype: torch.dtype, *, amsgrad: bool = False) -> Iterator[Any]:
    with job_of(daemon, "trained") as session:
        torch.manual_seed(0)
        model = memd_client.offload(Model().to(dtype), session)
        updated = [p for p in model.parameters() if p.requires_grad]
        optimizer = memd_client.AdamW(updated, lr=1e-2, amsgrad=amsgrad, session=session)
        session.track(rng=True)
        yield session, model, optimizer


@pytest.mark.parametrize(
    ("dtype", "amsgrad"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["fp32", "amsgrad", "bf16"],
)
def test_an_export_has_the_bits_of_its_step_while_the_job_trains_on(
    daemon: Daemon, tmp_path: Path, dtype: torch.dtype, amsgrad: bool
) -> None:
    path = tmp_path / "out"
    with exported_job(daemon, dtype, amsgrad=amsgrad) as (session, model, optimizer):
        session.put("notes", torch.arange(300_000))
        session.put("flags", torch.tensor([True, False]))
        for step in range(2):
            train(model, optimizer, step)
            session.commit()
        names = list(model.state_dict())
        values = {name: session.get(name).clone() for name in names}
        state = optimizer.state_dict()["state"]
        updated = [name for name, p in model.named_parameters() if p.requires_grad]
        states = {
            f"{name}.{key}": torch.as_tensor(value).clone()
            for number, name in enumerate(updated)
            for key, value in state[number].items()
        }
        assert session.snapshot("kept") == 2
        train(model, optimizer, 2)
        session.commit()
        report = json.loads(
            memd(daemon, "snapshot", "export", "trained", "kept", str(path), "--json").stdout
        )
        train(model, optimizer, 3)
        session.commit()
        assert not torch.equal(session.get("wide.weight"), values["wide.weight"])
    assert (report["step"], report["path"]) == (2, str(path))
    assert sorted(report["files"]) == sorted(each.name for each in path.iterdir())
    found = load_file(path / "model.safetensors")
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    moments = load_file(path / "optimizer.safetensors")
    masters = {name: moments.pop(f"{name}.master") for name in updated if dtype != torch.float32}
    assert moments.keys() >= states.keys()
    for name, value in states.items():
        assert torch.equal(moments[name], value.to(moments[name].dtype)), name
    for name, master in masters.items():
        assert master.dtype == torch.float32
        # Ties go away from zero.
        halves = ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16)
        assert torch.equal(halves, values[name].view(torch.int16)), name
    if masters:
        assert not torch.equal(masters["wide.weight"], values["wide.weight"].float())
    blobs = load_file(path / "blobs.safetensors")
    assert torch.equal(blobs["notes"], torch.arange(300_000))
    assert torch.equal(blobs["flags"], torch.tensor([True, False]))
    assert any(name.startswith("memd.tracked.") for name in blobs)
    assert not any("@" in name for name in blobs)
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata == {"format": "pt", "job": "trained", "snapshot": "kept", "step": "2"}


def test_the_masters_of_bf16_are_what_training_goes_on_from(daemon: Daemon, tmp_path: Path) -> None:
    """An fp32 parameter with the master's value, the same moments and gradient, updated once, is
    the bf16 parameter's next master."""
    with exported_job(daemon, torch.bfloat16) as (session, model, optimizer):
        train(model, optimizer, 0)
        session.commit()
        session.snapshot("before")
        generator = torch.Generator().manual_seed(9)
        model(torch.randn(4, 512, generator=generator).bfloat16()).square().mean().backward()
        gradient = model.last.weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        session.commit()
        session.snapshot("after")
        for name in ("before", "after"):
            memd(daemon, "snapshot", "export", "trained", name, str(tmp_path / name))
    before, after = (
        load_file(tmp_path / name / "optimizer.safetensors") for name in ("before", "after")
    )
    plain = nn.Parameter(before["last.weight.master"].clone())
    fused = torch.optim.AdamW([plain], lr=1e-2, fused=True)
    fused.state[plain] = {
        "step": before["last.weight.step"].float(),
        "exp_avg": before["last.weight.exp_avg"],
        "exp_avg_sq": before["last.weight.exp_avg_sq"],
    }
    plain.grad = gradient.float()
    fused.step()
    assert torch.equal(plain.detach(), after["last.weight.master"])
    assert after["last.weight.step"] == 2


def test_a_folder_of_shards_is_loaded_into_a_new_job(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with exported_job(daemon, torch.float32) as (session, model, optimizer):
        train(model, optimizer, 0)
        session.commit()
        session.snapshot("kept")
        values = {name: session.get(name).clone() for name in model.state_dict()}
        given = ("snapshot", "export", "trained", "kept", str(path), "--max-file", "1MiB")
        memd(daemon, *given)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(values)
    assert len(set(index["weight_map"].values())) == 2
    assert (path / "optimizer.safetensors.index.json").exists()
    with job_of(daemon, "loaded") as session:
        torch.manual_seed(1)
        other = memd_client.offload(Model(), session)
        memd_client.load_safetensors(other, path, session)
        for name, value in values.items():
            assert torch.equal(session.get(name), value), name


def test_a_tiled_weight_is_one_tensor(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with job_of(daemon, "tiled") as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 1500), nn.Linear(1500, 4))
        memd_client.tile_linears(model, bytes_max="1MiB")
        model = memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2, session=session)
        train(model, optimizer, 0)
        session.snapshot("kept")
        with memd_client.gather(model):
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
        moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
        memd(daemon, "snapshot", "export", "tiled", "kept", str(path))
    found = load_file(path / "model.safetensors")
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())
    states = load_file(path / "optimizer.safetensors")
    assert torch.equal(states["0.weight.exp_avg"], moments)


def test_headers_are_those_that_the_client_writes() -> None:
    from memd.export.contents import BYTES_OF, Tensor
    from memd.export.dcp_files import DTYPES
    from memd.export.safetensors_files import encode_header

    codes = {code: DTYPES[code] for code in BYTES_OF}
    tensors = [
        (f"{code}.µ{number}", code, shape)
        for code in codes
        for number, shape in enumerate([(), (0, 3), (5,), (2, 3, 4)])
    ]
    metadata = {"format": "pt", "step": "3"}
    ours, _ = encode_header([Tensor(*each) for each in tensors], metadata)
    theirs, _ = client_encode_header(
        [(name, codes[code], torch.Size(shape)) for name, code, shape in tensors], metadata
    )
    assert ours == theirs


# ---- Refusals ------------------------------------------------------------------------------------


@pytest.fixture
def job(daemon: Daemon) -> Iterator[Daemon]:
    make_job(daemon, blobs=4)
    yield daemon
    drop_job(daemon)


def test_a_wrong_request_is_one_clear_error_and_leaves_nothing(job: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "out"

    def refusal(*arguments: str, status: int = 1) -> str:
        return memd(job, "snapshot", "export", *arguments, status=status).stderr

    assert "has no snapshot other; it has first" in refusal(JOB, "other", str(path))
    assert "there is no job 'nobody'" in refusal("nobody", "first", str(path))
    missing = tmp_path / "none" / "out"
    assert "cannot be written: No such file or directory" in refusal(JOB, "first", str(missing))
    assert "is not a size" in refusal(JOB, "first", str(path), "--max-file", "much", status=2)
    detached = refusal(JOB, "other", str(path), "--detach")
    assert detached.startswith("Error: job exported has no snapshot other")
    assert list(tmp_path.iterdir()) == []
    path.mkdir()
    (path / "file").touch()
    assert f"{path} is there already" in refusal(JOB, "first", str(path))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is there already" in refusal(JOB, "first", str(tmp_path / "link"))
    assert bytes_of(path) == {"file": b""}
    assert not partial_of(path).exists()


def test_one_export_of_a_job_runs_at_a_time_and_keeps_its_snapshot(
    job: Daemon, tmp_path: Path
) -> None:
    drop_job(job)
    make_job(job, blobs=LARGE_BLOBS)
    path = tmp_path / "out"
    with begun(job, path, pieces=2) as process:
        busy = memd(job, "snapshot", "export", JOB, "first", str(path), status=1).stderr
        assert "another export writes" in busy
        other = str(tmp_path / "other")
        busy = memd(job, "snapshot", "export", JOB, "first", other, status=1).stderr
        assert "one of a job at a time" in busy
        assert f"process {process.pid}" in busy
        refused = memd(job, "snapshot", "drop", JOB, "first", "--yes", status=1).stderr
        assert f"is being exported; wait for its end, or end process {process.pid}" in refused
        assert "exported: " in memd(job, "snapshot", "list", JOB).stdout
        listed = json.loads(memd(job, "snapshot", "list", JOB, "--json").stdout)
        assert listed[0]["is_exported"]
        assert 0 < listed[0]["exported_part"] <= 1
        in_flight = json.loads(memd(job, "status", "--inflight", "--json").stdout)["activities"]
        (activity,) = [each for each in in_flight if each["kind"] == "export"]
        assert activity["job"] == JOB
        assert "snapshot first" in activity["what"]
        assert "memd_snapshot_exports 1.0" in job.get("/metrics")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.partial"]
    export(job, path)
    assert "memd_snapshot_exports 0.0" in job.get("/metrics")
    with DaemonClient(job.attach_socket) as client:
        client.drop_snapshot(JOB, "first")


def reading_begun(client: Attached) -> tuple[grpc.Call, list[int]]:
    """A raw reading that has begun, once the daemon takes it, with its descriptors."""
    end = time.monotonic() + TIMEOUT_S
    request = job_pb2.ReadSnapshotRequest(job=JOB, name="first")
    while True:
        answers = client.call(client.jobs.ReadSnapshot, request)
        try:
            next(answers)
        except grpc.RpcError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
            continue
        _, fds, _, _ = socket.recv_fds(client.connection, 4096, 2)
        return answers, fds


def test_memory_that_a_caller_keeps_is_that_of_its_next_exports(job: Daemon) -> None:
    kept: list[int] = []
    with Attached(job.attach_socket) as client:
        for _ in range(20):
            answers, fds = reading_begun(client)
            kept += fds
            answers.cancel()
    assert len({os.fstat(fd).st_ino for fd in kept[::2]}) <= 8
    for fd in kept:
        os.close(fd)


def test_a_caller_that_makes_its_descriptors_wait_holds_no_thread(daemon: Daemon) -> None:
    make_job(daemon, blobs=LARGE_BLOBS)
    with Attached(daemon.attach_socket) as client:
        for _ in range(10):  # a caller may have 8 streams
            answers, fds = reading_begun(client)
            for fd in fds:
                fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            time.sleep(0.3)  # the daemon looks every 0.1 s for what its caller gives back
            answers.cancel()
            for fd in fds:
                os.close(fd)
    drop_job(daemon)


def test_dropping_the_job_with_force_ends_the_export(daemon: Daemon, tmp_path: Path) -> None:
    make_job(daemon, blobs=24)
    with (
        DaemonClient(daemon.attach_socket) as client,
        DaemonClient(daemon.attach_socket) as other,
        client.read_snapshot(JOB, "first") as reading,
    ):
        reading.shards()
        other.drop_job(JOB, force=True)
        with pytest.raises(Refused, match="was dropped with its job") as caught:
            list(reading.pieces())
    assert caught.value.code is StatusCode.FENCED


@pytest.mark.parametrize("is_detached", [False, True])
def test_damage_on_disk_ends_the_export_with_the_shards_name(
    daemons: Daemons, tmp_path: Path, is_detached: bool
) -> None:
    name = f"damaged{is_detached}"
    daemon = daemons.start(name=name, nvme="192MiB", environ={"MEMD_SCRUB": "0"})
    make_job(daemon, blobs=4)
    with fresh_values(daemon) as values:
        needle = values["blob2"].numpy().tobytes()[:4096]
    volume = daemon.data / "memd.volume"
    data = volume.read_bytes()
    at = data.index(needle)
    with volume.open("r+b") as file:
        file.seek(at + 5)
        file.write(bytes([data[at + 5] ^ 1]))
        os.fsync(file.fileno())
    path = tmp_path / "out"
    given = ("snapshot", "export", JOB, "first", str(path))
    if is_detached:
        memd(daemon, *given, "--detach")
        text = said_in(partial_of(path) / "messages", "Error: ")
    else:
        text = memd(daemon, *given, status=3).stderr
    assert "the export stops at shard blob2: " in text
    assert f"{volume} at {at}" in text
    assert not path.exists()
    assert "1 shards lost" in memd(daemon, "snapshot", "list", JOB).stdout
    assert "is not whole any more" in memd(daemon, *given, status=3).stderr
    assert "memd_snapshot_export_errors_total 1.0" in daemon.get("/metrics")
    daemon.stop()


def said_in(path: Path, wanted: str) -> str:
    """The text of a file once that is in it."""
    end = time.monotonic() + TIMEOUT_S
    while wanted not in (text := path.read_text()):
        assert time.monotonic() < end, text
        time.sleep(0.02)
    return text


@contextmanager
def fresh_values(daemon: Daemon) -> Iterator[dict[str, torch.Tensor]]:
    session = memd_client.connect(daemon.address, job=JOB, host_bytes=HOST_BYTES)
    yield {"blob2": session.get("blob2").clone()}
    session.close()


# Another user may enter neither the checkout nor the temporary folder: see STRANGER in
# test_daemon_service.py.
STRANGER = """
import os, sys
from pathlib import Path
import grpc
from memd_proto.v1 import job_pb2
from tests.daemons import Attached
grpc.insecure_channel("unix:memd.sock").close()
os.chdir(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.meta_path.clear()
client = Attached(Path("attach.sock"), control_address="unix:memd.sock")
request = job_pb2.ReadSnapshotRequest(job="exported", name="first")
try:
    for answer in client.call(client.jobs.ReadSnapshot, request):
        print("read", answer)
except grpc.RpcError as error:
    print(error.code().name, error.details())
"""


def test_another_users_snapshot_is_refused(job: Daemon) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    paths = (job.socket.parent, job.socket, job.attach_socket)
    modes = [path.stat().st_mode for path in paths]
    try:
        for path in paths:
            path.chmod(0o777)
        command = [sys.executable, "-c", STRANGER, str(job.socket.parent)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)
    assert said.startswith("PERMISSION_DENIED job 'exported' belongs to user root")


def test_a_part_that_belongs_to_another_user_is_not_touched(job: Daemon, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    path = tmp_path / "out"
    partial_of(path).mkdir()
    os.chown(partial_of(path), 65534, 65534)
    text = memd(job, "snapshot", "export", JOB, "first", str(path), status=1).stderr
    assert "belongs to another user" in text
    partial_of(path).rmdir()
    partial_of(path).symlink_to(tmp_path)
    text = memd(job, "snapshot", "export", JOB, "first", str(path), status=1).stderr
    assert "cannot be written" in text
    assert [each.name for each in tmp_path.iterdir()] == ["out.partial"]


def limited(size_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


def test_a_disk_that_is_too_small_is_found_out_before_anything_is_written(
    job: Daemon, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    given = ("snapshot", "export", JOB, "first", str(path), "--socket", str(job.socket))
    answer = subprocess.run(
        [sys.executable, "-m", "memd", *given],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited(1 << 20),
        timeout=TIMEOUT_S,
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"Error: no room for {path}; it needs ")
    assert list(tmp_path.iterdir()) == []
    export(job, path)


# ---- In the background ---------------------------------------------------------------------------


def test_a_detached_export_goes_on_without_its_command(job: Daemon, tmp_path: Path) -> None:
    export(job, tmp_path / "whole")
    path = tmp_path / "out"
    text = memd(job, "snapshot", "export", JOB, "first", str(path), "--detach").stdout
    assert text.startswith(f"{JOB}: snapshot first is exported to {path} by process ")
    end = time.monotonic() + TIMEOUT_S
    while partial_of(path).exists() or not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert bytes_of(path) == bytes_of(tmp_path / "whole")
