"""Loads or saves a checkpoint in one process after another. Each kills itself at a later moment,
and the next sees what is there then.

Run: python -m tests.faults.killed_checkpoint ADDRESS FOLDER load|save STRIDE   (by
test_checkpoint_killed.py)
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

import memd_client
from memd_client import staged_values
from memd_client.checkpoint_files import CheckpointFile, CheckpointFiles
from memd_client.job_store import JobStore
from memd_client.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Callable

JOB = "killed-checkpoint"
OLD, NEW = 1, 2


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


def in_child(work: Callable[[], int]) -> int:
    """The status of a forked process, negative if it was killed. It attaches for itself."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Killing:
    """Counts moments, and kills the process at one of them."""

    def __init__(self, at: int) -> None:
        self._left = at

    def note(self) -> None:
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
    return memd_client.connect(
        sys.argv[1], job=JOB, host_bytes="16MiB", nvme_bytes="64MiB", **changes
    )


def begin(seed: int) -> int:
    """A job that stands at one step, with these values."""
    with connect(fresh=True) as session:
        model = memd_client.offload(Model(seed), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=0.0)
        for parameter in model.parameters():
            parameter.float().sum().backward()
        optimizer.step()
        return session.committed_step


def look() -> int:
    with connect() as session:
        if session.committed_step != 1:
            return 50
        model = memd_client.offload(Model(3), session)
        listed = session.transaction.job.shards.list_all()
        if any(shard.spec.name.startswith("@load/") for shard in listed):
            return 51
        return seed_of(model.state_dict())


def load(path: Path, at: int) -> int:
    session = connect()
    model = memd_client.offload(Model(3), session)
    killing = Killing(at)
    killing.around(CheckpointFile, "read")
    killing.around(Leases, "value")
    killing.around(JobStore, "delete")
    killing.around(staged_values.StagedValues, "_sync")
    memd_client.load_safetensors(model, path, session)
    session.close()
    return 0


def finish(at: int) -> int:
    """A session that finishes what a killed one has begun, and is killed at that."""
    killing = Killing(at)
    killing.around(Leases, "value")
    killing.around(JobStore, "delete")
    killing.around(staged_values.StagedValues, "_sync")
    return look()


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


def kill_loads(folder: Path, stride: int) -> Counter[str]:
    path = folder / "new.safetensors"
    memd_client.save_safetensors(Model(NEW), path)
    seen: Counter[str] = Counter()
    assert in_child(lambda: begin(OLD)) == 1
    for at in range(1, 1000, stride):
        status = in_child(lambda at=at: load(path, at))  # type: ignore[misc]
        # The next session may be killed too, at what it finishes.
        again = in_child(lambda at=at: finish(1 + at % 7))  # type: ignore[misc]
        found = in_child(look)
        assert found in (OLD, NEW), (at, found)
        assert again in (-signal.SIGKILL, found), (at, again, found)
        if status == 0:
            assert found == NEW, at
            return seen
        assert status == -signal.SIGKILL, (at, status)
        seen["old" if found == OLD else "new"] += 1
        seen["killed_again"] += again < 0
        if found == NEW:
            assert in_child(lambda: begin(OLD)) == 1
    raise AssertionError("no load was left alive")


def kill_saves(folder: Path, stride: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for path in (folder / "a.safetensors", folder / "shards"):
        for at in range(1, 1000, stride):
            memd_client.save_safetensors(Model(OLD), path, **options(path))
            status = in_child(lambda path=path, at=at: save(path, at))  # type: ignore[misc]
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
    seen = {"load": kill_loads, "save": kill_saves}[what](folder, stride)
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in sorted(seen.items())) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
