"""`memd snapshot export --format dcp`: a folder that plain torch and memd's Reader load."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import memd_client
from tests.faults.exports import JOB, begun, bytes_of, drop_job, make_job, partial_of
from tests.forks import shared_forks
from tests.integration.test_distributed_checkpoint import assert_same
from tests.integration.test_optimizer_safetensors import exported_states, half_trained
from tests.integration.test_snapshot_export import Model, exported_job, job_of, train

if TYPE_CHECKING:
    from pathlib import Path

    from tests.daemons import Daemon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


_EXPORT = """
import os, sys
for name in [*os.environ]:
    if name.startswith("MEMD_"):
        del os.environ[name]
from memd.cli import main
main({arguments!r})
"""


def export(daemon: Daemon, job: str, name: str, path: Path, *arguments: str) -> None:
    """The command, in a fork: an import of torch takes longer than what is exported here."""
    arguments = ("snapshot", "export", job, name, str(path), "--format", "dcp", *arguments)
    program = _EXPORT.format(arguments=[*arguments, "--socket", str(daemon.socket)])
    status, said = shared_forks("memd.cli", "memd.export.dcp_files").run(program)
    assert status == 0, said


def named_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of each updated parameter, by its name, in memory of its own."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    states = optimizer.state_dict()["state"]
    return {
        name: {key: torch.as_tensor(value).clone() for key, value in states[number].items()}
        for number, name in enumerate(names)
    }


def empty(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 7) for name, value in values.items()}


def assert_whole_archives(path: Path) -> None:
    """Each item is a zip file whose checksums match, and the items fill their files. A tied one has
    several names."""
    ends: dict[str, int] = {}
    stored = FileSystemReader(path).read_metadata().storage_data.values()
    for name, begin, length in sorted({(at.relative_path, at.offset, at.length) for at in stored}):
        assert begin == ends.get(name, 0)
        ends[name] = begin + length
        with (path / name).open("rb") as file:
            file.seek(begin)
            with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                assert archive.testzip() is None
    sizes = {each.name: each.stat().st_size for each in path.glob("*.distcp")}
    assert ends == sizes


@pytest.mark.parametrize(
    ("dtype", "amsgrad"),
    [
        pytest.param(torch.float32, True, id="amsgrad"),
        pytest.param(torch.float32, False, id="fp32", marks=pytest.mark.more),
        pytest.param(torch.bfloat16, False, id="bf16", marks=pytest.mark.more),
    ],
)
def test_plain_torch_loads_the_bits_of_the_step(
    daemon: Daemon, tmp_path: Path, dtype: torch.dtype, amsgrad: bool
) -> None:
    path = tmp_path / "out"
    with exported_job(daemon, dtype, amsgrad=amsgrad) as (session, model, optimizer):
        session.put("notes", torch.arange(300_000))
        for step in range(2):
            train(model, optimizer, step)
            session.commit()
        values = {name: session.get(name).clone() for name in model.state_dict()}
        states = named_states(model, optimizer)
        session.snapshot("kept")
        train(model, optimizer, 2)
        session.commit()
        export(daemon, "trained", "kept", path)
    found: dict[str, Any] = {
        "model": empty(values),
        "optimizer": {"state": {name: empty(state) for name, state in states.items()}},
        "blobs": {"notes": torch.zeros(300_000, dtype=torch.int64)},
    }
    load(found, checkpoint_id=path)
    assert_same(found["model"], values)
    for name, state in states.items():
        assert_same(found["optimizer"]["state"][name], state)
    assert torch.equal(found["blobs"]["notes"], torch.arange(300_000))
    assert_whole_archives(path)
    dcp_to_torch_save(path, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_same(whole["model"], values)
    masters = [name for name, each in whole["optimizer"]["state"].items() if "master" in each]
    assert set(masters) >= (states.keys() if dtype is torch.bfloat16 else set())


def test_a_new_job_goes_on_from_it_with_the_same_bits(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with exported_job(daemon, torch.float32) as (session, model, optimizer):
        for step in range(2):
            train(model, optimizer, step)
            session.commit()
        session.snapshot("kept")
        export(daemon, "trained", "kept", path, "--max-file", "1MiB")
        assert len(list(path.glob("*.distcp"))) > 2
        assert_whole_archives(path)
        for step in range(2, 4):
            train(model, optimizer, step)
            session.commit()
        wanted = {name: session.get(name).clone() for name in model.state_dict()}
        states = named_states(model, optimizer)
    with job_of(daemon, "loaded") as session:
        torch.manual_seed(1)
        other = memd_client.offload(Model(), session)
        updated = [p for p in other.parameters() if p.requires_grad]
        again = memd_client.AdamW(updated, lr=1e-2, session=session)
        state = {"model": other.state_dict(keep_vars=True)}
        optimizer_state = get_state_dict(other, again)[1]
        state["optimizer"] = {"state": optimizer_state["state"]}
        load(state, storage_reader=memd_client.checkpoint.Reader(path))
        for step in range(2, 4):
            train(other, again, step)
        session.commit()
        assert_same({name: value.clone() for name, value in other.state_dict().items()}, wanted)
        for name, each in named_states(other, again).items():
            assert_same(each, states[name])


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Without a byte of what is in memd."""
    states = get_state_dict(model, optimizer)[1]["state"]
    return {"model": model.state_dict(keep_vars=True), "optimizer": {"state": states}}


@pytest.mark.parametrize(
    ("amsgrad", "is_tiled", "way"),
    [
        pytest.param(False, False, "export", id="export"),
        pytest.param(True, True, "export", id="export-tiled", marks=pytest.mark.more),
        pytest.param(True, True, "save", id="save-tiled"),
        pytest.param(False, False, "save", id="save", marks=pytest.mark.more),
        pytest.param(False, False, "async_save", id="async_save"),
        pytest.param(True, True, "async_save", id="async_save-tiled", marks=pytest.mark.more),
    ],
)
def test_a_new_job_in_bf16_goes_on_from_it_with_the_same_bits(
    daemon: Daemon, tmp_path: Path, amsgrad: bool, is_tiled: bool, way: str
) -> None:
    """The masters too, which decide about values only steps later."""

    def begun(session: memd_client.Session, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 5000), torch.nn.Linear(5000, 64))
        model = model.bfloat16()
        if is_tiled:
            memd_client.tile_linears(model, bytes_max="256KiB")
        memd_client.offload(model, session)
        return model, memd_client.AdamW(model.parameters(), lr=1e-3, amsgrad=amsgrad)

    path = tmp_path / "out"
    with job_of(daemon, "bf16-a") as session:
        model, optimizer = begun(session, 0)
        half_trained(model, optimizer, range(3))
        before = exported_states(daemon, session, tmp_path / "before")
        saving: Any = None
        if way == "export":
            export(daemon, "bf16-a", "before", path, "--max-file", "1MiB")
        elif way == "save":
            state = whole_state(model, optimizer)
            # Somebody has read it.
            state["optimizer"]["state"]["0.weight"]["exp_avg"].value()
            save(state, storage_writer=memd_client.checkpoint.Writer(path))
        else:
            writer = memd_client.checkpoint.Writer(path)
            saving = async_save(whole_state(model, optimizer), storage_writer=writer)
        half_trained(model, optimizer, range(3, 6))
        if saving is not None:
            saving.result()
        wanted = exported_states(daemon, session, tmp_path / "wanted")
    masters = {name: each for name, each in before.items() if name.endswith(".master")}
    found: dict[str, Any] = {"optimizer": {"state": {}}}
    for name, each in masters.items():
        found["optimizer"]["state"][name.removesuffix(".master")] = {"master": each.clone().zero_()}
    load(found, checkpoint_id=path)
    for name, each in masters.items():
        states = found["optimizer"]["state"]
        assert torch.equal(states[name.removesuffix(".master")]["master"], each)
    with job_of(daemon, "bf16-b") as session:
        model, optimizer = begun(session, 1)
        # Remainders of its own, which may not stay.
        half_trained(model, optimizer, range(7, 9))
        state = whole_state(model, optimizer)
        load(state, storage_reader=memd_client.checkpoint.Reader(path))
        half_trained(model, optimizer, range(3, 6))
        assert_same(exported_states(daemon, session, tmp_path / "found"), wanted)
        # Without the values, they would be those of other ones.
        half_trained(model, optimizer, range(6, 30))
        del state["model"]
        load(state, storage_reader=memd_client.checkpoint.Reader(path))
        half_trained(model, optimizer, range(1))


@pytest.mark.parametrize(
    ("master", "message"),
    [
        (torch.full((4, 4), 2.0), "fp32 values in the files; they are of another step"),
        (torch.ones(4), r"'optimizer.state.weight.master' is torch.float32 \[4\]"),
        (torch.ones(4, 4).bfloat16(), "'optimizer.state.weight.master' is torch.bfloat16"),
    ],
    ids=["other", "shape", "dtype"],
)
def test_masters_that_do_not_fit_the_values_are_refused_and_nothing_changes(
    daemon: Daemon, tmp_path: Path, master: torch.Tensor, message: str
) -> None:
    moment = torch.zeros(4, 4)
    state = {"exp_avg": moment, "exp_avg_sq": moment, "step": torch.tensor(3.0)}
    save(
        {
            "model": {"weight": torch.ones(4, 4).bfloat16()},
            "optimizer": {"state": {"weight": {**state, "master": master}}},
        },
        checkpoint_id=tmp_path / "in",
    )
    with job_of(daemon, "bf16-other") as session:
        model = memd_client.offload(torch.nn.Linear(4, 4, bias=False).bfloat16(), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
        model(torch.ones(1, 4).bfloat16()).sum().backward()
        optimizer.step()
        before = exported_states(daemon, session, tmp_path / "before")
        value = model.state_dict()["weight"]
        wanted = whole_state(model, optimizer)
        reader = memd_client.checkpoint.Reader(tmp_path / "in")
        with pytest.raises(CheckpointException, match=message):
            load(wanted, storage_reader=reader)
        assert torch.equal(model.state_dict()["weight"], value)
        assert_same(exported_states(daemon, session, tmp_path / "after"), before)


def test_a_tiled_parameter_is_one_item(daemon: Daemon, tmp_path: Path) -> None:
    with job_of(daemon, "tiled") as session:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 1100))
        memd_client.tile_linears(model, bytes_max="512KiB")
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2, session=session)
        train(model, optimizer, 0)
        session.snapshot("kept")
        values = {name: value.clone() for name, value in model.state_dict().items()}
        states = named_states(model, optimizer)
        export(daemon, "tiled", "kept", tmp_path / "out")
    found: dict[str, Any] = {
        "model": empty(values),
        "optimizer": {"state": {name: empty(state) for name, state in states.items()}},
    }
    load(found, checkpoint_id=tmp_path / "out")
    assert_same(found["model"], values)
    for name, state in states.items():
        assert_same(found["optimizer"]["state"][name], state)


@pytest.mark.parametrize(
    ("number", "damage"),
    [
        (signal.SIGKILL, "bytes"),
        pytest.param(signal.SIGKILL, "none", marks=pytest.mark.more),
        pytest.param(signal.SIGINT, "none", marks=pytest.mark.more),
    ],
)
def test_the_same_command_goes_on_to_the_same_files(
    daemon: Daemon, tmp_path: Path, number: signal.Signals, damage: str
) -> None:
    """With checksums over what an earlier run has written."""
    make_job(daemon)
    try:
        export(daemon, JOB, "first", tmp_path / "whole")
        path = tmp_path / "out"
        for pieces in (4, 10):
            with begun(daemon, path, "--format", "dcp", pieces=pieces) as process:
                process.send_signal(number)
            assert not path.exists()
            if damage == "bytes":
                with (partial_of(path) / "files" / "__0_0.distcp").open("r+b") as file:
                    file.seek(1 << 20)
                    file.write(bytes(4096))
        export(daemon, JOB, "first", path)
        assert bytes_of(path) == bytes_of(tmp_path / "whole")
        assert_whole_archives(path)
        assert not partial_of(path).exists()
    finally:
        drop_job(daemon)


@pytest.mark.more
def test_a_part_in_another_format_is_begun_anew(daemon: Daemon, tmp_path: Path) -> None:
    make_job(daemon)
    try:
        export(daemon, JOB, "first", tmp_path / "whole")
        with begun(daemon, tmp_path / "out", pieces=10) as process:
            process.kill()
        export(daemon, JOB, "first", tmp_path / "out")
        assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    finally:
        drop_job(daemon)


def test_without_torch_the_refusal_says_what_to_install(daemon: Daemon, tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None; from memd.cli import main; main()"
    given = ["snapshot", "export", "any", "any", str(tmp_path / "out"), "--format", "dcp"]
    answer = subprocess.run(
        [sys.executable, "-c", script, *given, "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: files of torch.distributed.checkpoint are made with")
    assert "pip install torch, or take" in answer.stderr
    assert list(tmp_path.iterdir()) == []
