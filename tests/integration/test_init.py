"""Models that are built in memd: what the trainer's memory holds meanwhile, and what a killed one
leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import memd_client
from memd_client.parameters import unnamed
from tests.daemons import running_daemon
from tests.forks import shared_forks
from tests.unit.client_cases import Gpt, assert_same_state, build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemons import Daemon

# 8 MiB each.
_LAYER_COUNT, _LAYER_BYTES = 24, 8 << 20
_BUILT = """
import json, sys, threading
import torch

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

before = anonymous_bytes()
import memd_client

torch.set_num_threads(1)
peak, is_over = 0, threading.Event()

def watch():
    global peak
    while not is_over.wait(0.001):
        peak = max(peak, anonymous_bytes())

class Model(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(1024, 2048, bias=False) for _ in range(count)]
        )
        self.apply(self.initialise)

    def initialise(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(std=0.02)

session = memd_client.connect(sys.argv[1], job="built")
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
torch.manual_seed(0)
with memd_client.init(session):
    model = Model(int(sys.argv[2]))
    print("built", flush=True)
    if len(sys.argv) > 3:
        threading.Event().wait()
is_over.set()
watcher.join()
torch.manual_seed(0)
equal = all(
    torch.equal(one, other)
    for one, other in zip(model.parameters(), Model(int(sys.argv[2])).parameters(), strict=True)
)
print(json.dumps({"peak": peak - before, "equal": equal}))
session.drop_job()
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="96MiB", nvme="1GiB") as daemon:
        yield daemon


def test_a_model_ten_times_larger_than_what_the_trainer_may_hold_is_built(daemon: Daemon) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BUILT, daemon.address, str(_LAYER_COUNT)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    assert found["peak"] < _LAYER_BYTES + (64 << 20), found


def test_a_trainer_that_is_killed_while_it_builds_leaves_nothing(daemon: Daemon) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BUILT, daemon.address, "6", "wait"],
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "built\n"
        trainer.send_signal(signal.SIGKILL)
    session = memd_client.connect(daemon.address, job="built")
    job = session.transaction.job
    assert any(shard.spec.name.startswith("@init/") for shard in job.shards.list_all())
    with memd_client.init(session):
        pass
    assert not list(job.shards.list_all())
    session.drop_job()


_KILLED = """
import os, signal, sys
import torch
import memd_client
from memd_client.core.leases import Leases

write, count = Leases.write, 0

def killed_write(self, shard, value):
    global count
    if not shard.name.startswith("@init/"):
        count += 1
        if count > int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
    write(self, shard, value)

session = memd_client.connect(sys.argv[1], job="killed")
torch.manual_seed(1)
Leases.write = killed_write
if sys.argv[2] == "init":
    with memd_client.init(session):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
else:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    memd_client.offload(model, session)
"""


@pytest.mark.parametrize("way", ["init", "offload"])
@pytest.mark.parametrize("written_count", [1, 4])
def test_values_of_a_trainer_that_was_killed_while_it_stored_them_do_not_count(
    daemon: Daemon, way: str, written_count: int
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    trainers = shared_forks("memd_client")
    status, said = trainers.run(_KILLED, daemon.address, way, str(written_count))
    if written_count < 4:
        assert status == -signal.SIGKILL, said
    with memd_client.connect(daemon.address, job="killed") as session:
        model = memd_client.offload(make(), session, strict=written_count < 4)
        if written_count < 4:
            assert_same_state(model, make())
        else:
            assert not torch.equal(model.state_dict()["0.weight"], make().state_dict()["0.weight"])
        session.drop_job()


def test_a_checkpoint_is_loaded_before_and_after_the_model_has_names(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unnamed, "_HOME_BYTES_MAX", 0)
    monkeypatch.setattr(unnamed, "_SMALL_BYTES", 0)
    reference, file = build(Gpt), tmp_path / "model.safetensors"
    memd_client.save_safetensors(reference, file)
    with memd_client.connect(daemon.address, job="loaded") as session:
        with memd_client.init(session):
            model = Gpt()
            memd_client.load_safetensors(model, file, session)
        assert_same_state(model, reference)
        with memd_client.gather(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        memd_client.load_safetensors(model, file, session)
        assert_same_state(model, reference)
        session.drop_job()


class Mapped(nn.Module):
    """Its parameters are mapped files, as those of a checkpoint that a library has opened."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        for path in paths:
            values = torch.from_file(str(path), shared=False, size=1 << 20)
            self.weights.append(nn.Parameter(values.view(1024, 1024)))


def read_bytes() -> int:
    """What this process has read with system calls. Pages of mapped files are not in it."""
    first, *_ = Path("/proc/self/io").read_text().splitlines()
    return int(first.removeprefix("rchar:"))


def test_mapped_parameters_are_read_from_their_files_and_changed_ones_from_memory(
    daemon: Daemon, tmp_path: Path
) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    torch.manual_seed(0)
    values = [torch.randn(1024, 1024) for _ in paths]
    for path, value in zip(paths, values, strict=True):
        value.numpy().tofile(path)
    with memd_client.connect(daemon.address, job="mapped", fresh=True) as session:
        before_bytes = read_bytes()
        with memd_client.init(session):
            model = Mapped(paths)
            with torch.no_grad():
                model.weights[2][5, 7] = 1.5
        assert 3 << 22 <= read_bytes() - before_bytes < 4 << 22
        values[2][5, 7] = 1.5
        for weight, value in zip(model.weights, values, strict=True):
            assert torch.equal(weight, value)
        session.drop_job()


def test_a_mapped_file_that_became_shorter_is_an_error_and_stores_nothing(
    daemon: Daemon, tmp_path: Path
) -> None:
    paths = [tmp_path / str(number) for number in range(2)]
    for path in paths:
        torch.ones(1024, 1024).numpy().tofile(path)
    with memd_client.connect(daemon.address, job="mapped", fresh=True) as session:
        model = Mapped(paths)
        os.truncate(paths[1], 1 << 20)
        with pytest.raises(memd_client.DeviceError, match="became shorter"):
            memd_client.offload(model, session)
        torch.ones(1024, 1024).numpy().tofile(paths[1])
        memd_client.offload(model, session)
        for weight in model.weights:
            assert torch.equal(weight, torch.ones(1024, 1024))
        session.drop_job()
