"""Loads or saves a checkpoint in one process after another. Each kills itself at a later moment,
and the next sees what is there then.

Run: python -m tests.faults.killed_checkpoint ADDRESS FOLDER WHAT STRIDE   (by
test_checkpoint_killed.py), where WHAT is load, save, state, dcp-load or dcp-save
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import memd_client
from memd_client.checkpoints import checkpoint_reader, torch_archive
from memd_client.checkpoints.checkpoint_files import CheckpointFile, CheckpointFiles
from memd_client.connection.reattach import ReattachingControl
from memd_client.core import load as loads
from memd_client.core.job_store import JobStore
from memd_client.core.leases import Leases
from memd_client.core.tensor_streams import TensorStreams

if TYPE_CHECKING:
    from collections.abc import Callable

JOB = "killed-checkpoint"
OLD, NEW = 1, 2
# Two digits: the writer of the values, and the writer of the moments.
ALL_OLD = 11
AT_STEP_2 = 29  # what a step has made of moments is no writer's
ALL_NEW = {"load": 21, "state": 12, "dcp-load": 22}


class Model(nn.Module):
    scale: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(64, 64)
        self.large = nn.Linear(512, 1024, bias=False)  # a bucket of its own
        self.bf16 = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.register_buffer("scale", torch.rand(8))


def values_of(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: value.detach().view(-1).view(torch.uint8).numpy().tobytes()
        for name, value in state.items()
    }


def seed_of(state: dict[str, torch.Tensor]) -> int:
    """The writer of these values; 0 for a mixture."""
    found = values_of(state)
    return next((seed for seed in (OLD, NEW) if found == values_of(Model(seed).state_dict())), 0)


def moments_of(seed: int) -> dict[int, dict[str, torch.Tensor]]:
    """In torch's format, of the parameters of `Model`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        index: {
            "step": torch.tensor(10.0 + seed),
            "exp_avg": torch.randn(parameter.shape, generator=generator),
            "exp_avg_sq": torch.rand(parameter.shape, generator=generator),
        }
        for index, parameter in enumerate(Model(seed).parameters())
    }


def seed_of_moments(states: dict[int, dict[str, torch.Tensor]]) -> int:
    """The writer of these; 0 for a mixture."""
    return next((seed for seed in (OLD, NEW) if _are_same(states, moments_of(seed))), 0)


def _are_same(
    one: dict[int, dict[str, torch.Tensor]], other: dict[int, dict[str, torch.Tensor]]
) -> bool:
    return one.keys() == other.keys() and all(
        one[index].keys() == other[index].keys()
        and all(torch.equal(one[index][name], other[index][name]) for name in one[index])
        for index in other
    )


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Without the bytes of what is in memd."""
    return {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}


def in_child(work: Callable[[], int]) -> int:
    """The status of a forked process, negative if it was killed. It attaches for itself."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        except BaseException:  # noqa: BLE001 # os._exit would swallow it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def nobody() -> None:
    """Is told when a call begins."""


class Killing:
    """Counts moments, and kills the process at one of them; 0: at none."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.count = 0

    def note(self) -> None:
        self.count += 1
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str) -> None:
        """Before and after each call."""
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.note()
            result = function(*arguments, **named)
            self.note()
            return result

        setattr(owner, name, call)


def connect(**changes: Any) -> memd_client.Session:
    """To the daemon at MEMD_ADDRESS."""
    return memd_client.connect(job=JOB, host_bytes="16MiB", nvme_bytes="64MiB", **changes)


def begin(seed: int) -> int:
    """A job that stands at one step, with these values and moments."""
    with connect(fresh=True) as session:
        model = memd_client.offload(Model(seed), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=0.0)
        make_step(model, optimizer)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments_of(seed)})
        return session.committed_step


def look() -> int:
    with connect() as session:
        if session.committed_step == 2:
            return _look_at_step_2(session)
        if session.committed_step != 1:
            return 50
        model = memd_client.offload(Model(3), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=0.0)
        listed = session.transaction.job.shards.list_all()
        if any(shard.spec.name.startswith("@load/") for shard in listed):
            return 51
        states = optimizer.state_dict()["state"]
        return 10 * seed_of(model.state_dict()) + seed_of_moments(states)


def _look_at_step_2(session: memd_client.Session) -> int:
    """A step has changed the moments, and nothing else."""
    model = memd_client.offload(Model(3), session)
    return AT_STEP_2 if seed_of(model.state_dict()) == NEW else 52


def kill_in_memd(at: int) -> Killing:
    """Before or after this action of a load."""
    killing = Killing(at)
    killing.around(Leases, "value")
    killing.around(JobStore, "delete")
    killing.around(TensorStreams, "begin_put_moments")
    for name in ("sync", "create_snapshot", "drop_snapshot"):
        killing.around(ReattachingControl, name)
    return killing


def load(
    what: str,
    path: Path,
    at: int = 0,
    *,
    begins: Callable[[], None] = nobody,
    count_in: Path | None = None,
) -> int:
    """Writes the number of its moments to a file, if there is one."""
    session = connect()
    model = memd_client.offload(Model(3), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=0.0)
    state = everything(model, optimizer)
    killing = kill_in_memd(at)
    killing.around(CheckpointFile, "read")
    killing.around(checkpoint_reader._Loading, "read_part")
    loads._BEHIND_BYTES = 1  # a commit is under way while the next value is read
    begins()
    if what == "load":
        memd_client.load_safetensors(model, path, session)
    elif what == "state":
        optimizer.load_state_dict({**state["optimizer"], "state": moments_of(NEW)})
    else:
        state_dict_loader.load(state, storage_reader=memd_client.checkpoint.Reader(path))
        optimizer.load_state_dict(state["optimizer"])
    if count_in is not None:
        count_in.write_text(str(killing.count))
    session.close()
    return 0


def finish(at: int) -> int:
    """A session that comes after a killed one, and is killed too."""
    kill_in_memd(at)
    return look()


def save_all(path: Path, at: int = 0, *, begins: Callable[[], None] = nobody) -> int:
    session = connect()
    model = memd_client.offload(Model(3), session)
    state = everything(model, memd_client.AdamW(model.parameters()))
    killing = Killing(at)
    for name in ("fsync", "rename"):
        killing.around(os, name)
    killing.around(Path, "unlink")
    killing.around(Leases, "value")
    killing.around(torch_archive.ArchiveStream, "finish")
    begins()
    state_dict_saver.save(state, storage_writer=memd_client.checkpoint.Writer(path))
    session.close()
    return 0


def save_while_training(path: Path, *, begins: Callable[[], None] = nobody) -> int:
    """All of the job at step 1, while it makes step 2."""
    session = connect()
    model = memd_client.offload(Model(3), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=0.0)
    state = everything(model, optimizer)
    begins()
    writer = memd_client.checkpoint.Writer(path)
    future = state_dict_saver.async_save(state, storage_writer=writer)
    assert isinstance(future, Future)
    make_step(model, optimizer)
    future.result()
    session.close()
    return 0


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Changes the moments and no value."""
    for parameter in model.parameters():
        parameter.float().sum().backward()
    optimizer.step()


def written_all(path: Path) -> int:
    """As `look`, of what plain torch reads there."""
    state: dict[str, Any] = {
        "model": Model(3).state_dict(),
        "optimizer": {"state": moments_of(3)},
    }
    state_dict_loader.load(state, checkpoint_id=path)
    return 10 * seed_of(state["model"]) + seed_of_moments(state["optimizer"]["state"])


def save_values(path: Path, *, begins: Callable[[], None] = nobody) -> int:
    """The values of the job, in several files."""
    session = connect()
    model = memd_client.offload(Model(3), session)
    begins()
    memd_client.save_safetensors(model, path, **options(path))
    session.close()
    return 0


def save(path: Path, at: int) -> int:
    model = Model(NEW)
    killing = Killing(at)
    for name in ("write", "fsync", "rename"):
        killing.around(os, name)
    killing.around(Path, "unlink")
    memd_client.save_safetensors(model, path, **options(path))
    return 0


def options(path: Path) -> dict[str, Any]:
    return {} if path.suffix else {"max_shard_bytes": 8192}


def written(path: Path) -> int:
    """The writer of the values that a reader finds; -1: nothing."""
    if path.suffix:
        files = [path] if path.exists() else []
    else:
        index = path / "model.safetensors.index.json"
        if not index.exists():
            return -1
        with CheckpointFiles(index) as checked:
            files = sorted({stored.file.path for stored in checked.tensors.values()})
    if not files:
        return -1
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= safetensors.torch.load_file(file)
    return seed_of(state)


def prepared(folder: Path, what: str) -> Path:
    """The file or folder that is loaded."""
    if what == "dcp-load":
        assert in_child(lambda: begin(NEW)) == 1
        assert in_child(lambda: save_all(folder / "new")) == 0
        return folder / "new"
    path = folder / "new.safetensors"
    memd_client.save_safetensors(Model(NEW), path)
    return path


def kill_loads(folder: Path, stride: int, what: str) -> Counter[str]:
    path = prepared(folder, what)
    seen: Counter[str] = Counter()
    assert in_child(lambda: begin(OLD)) == 1
    assert in_child(partial(load, what, path, count_in=folder / "count")) == 0
    count = int((folder / "count").read_text())
    assert in_child(lambda: begin(OLD)) == 1
    # The last moment, or one of the last, comes after the one from which the load counts.
    for at in sorted({*range(1, count, stride), *range(count - 3, count + 2)}):
        status = in_child(partial(load, what, path, at))
        # The next session may be killed too.
        again = in_child(partial(finish, 1 + at % 7))
        found = in_child(look)
        assert found in (ALL_OLD, ALL_NEW[what]), (at, found)
        assert again in (-signal.SIGKILL, found), (at, again, found)
        if status == 0:
            assert found == ALL_NEW[what], at
            return seen
        assert status == -signal.SIGKILL, (at, status)
        seen["old" if found == ALL_OLD else "new"] += 1
        seen["killed_again"] += again < 0
        if found != ALL_OLD:
            assert in_child(lambda: begin(OLD)) == 1
    raise AssertionError("no load was left alive")


def kill_saves_of_all(folder: Path, stride: int) -> Counter[str]:
    """Into the folder of an earlier checkpoint, which stays until the new one is there."""
    for seed in (OLD, NEW):
        assert in_child(partial(begin, seed)) == 1
        assert in_child(partial(save_all, folder / str(seed))) == 0
    seen: Counter[str] = Counter()
    path = folder / "both"
    for at in range(1, 1000, stride):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder / str(OLD), path)
        status = in_child(partial(save_all, path, at))
        found = written_all(path)
        assert found in (ALL_OLD, ALL_NEW["dcp-load"]), (at, found)
        if status == 0:
            assert found == ALL_NEW["dcp-load"], at
            assert len(list(path.iterdir())) == 2
            assert in_child(look) == ALL_NEW["dcp-load"]
            return seen
        assert status == -signal.SIGKILL, (at, status)
        seen["old" if found == ALL_OLD else "new"] += 1
        # The next save removes what this one has left.
        assert in_child(lambda: save_all(path)) == 0
        assert len(list(path.iterdir())) == 2
    raise AssertionError("no save was left alive")


def kill_saves(folder: Path, stride: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for path in (folder / "a.safetensors", folder / "shards"):
        for at in range(1, 1000, stride):
            memd_client.save_safetensors(Model(OLD), path, **options(path))
            status = in_child(partial(save, path, at))
            found = written(path)
            may_be_absent = not path.suffix
            assert found in (OLD, NEW) or (may_be_absent and found == -1), (path, at, found)
            if status == 0:
                assert found == NEW, (path, at)
                break
            assert status == -signal.SIGKILL, (path, at, status)
            seen[{OLD: "old", NEW: "new", -1: "absent"}[found]] += 1
        else:
            raise AssertionError("no save was left alive")
        memd_client.save_safetensors(Model(OLD), path, **options(path))
        folder_of = path.parent if path.suffix else path
        assert not [found for found in folder_of.iterdir() if found.suffix == ".partial"]
    return seen


def main(folder: Path, what: str, stride: int) -> None:
    if what == "save":
        seen = kill_saves(folder, stride)
    elif what == "dcp-save":
        seen = kill_saves_of_all(folder, stride)
    else:
        seen = kill_loads(folder, stride, what)
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in sorted(seen.items())) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    os.environ["MEMD_ADDRESS"] = sys.argv[1]
    main(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
