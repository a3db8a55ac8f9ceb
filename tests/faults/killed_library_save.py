"""Saves a library's checkpoint over an earlier one, in one process after another. Each kills itself
at a later moment, and plain torch sees which checkpoint is there then.

Run: python -m tests.faults.killed_library_save ADDRESS FOLDER LIBRARY STRIDE   (by
test_checkpoint_killed.py), where LIBRARY is accelerate or lightning
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

import memd_client
from memd_client.checkpoints import torch_archive, whole_folder
from memd_client.core.leases import Leases
from memd_client.integrations.accelerate import CommittedAccelerator
from memd_client.integrations.lightning import StreamedCheckpointIO
from tests.faults.killed_checkpoint import (
    ALL_OLD,
    NEW,
    OLD,
    Killing,
    Model,
    connect,
    in_child,
    moments_of,
    seed_of,
    seed_of_moments,
)

if TYPE_CHECKING:
    from memd_client import Session

ALL_NEW = 22


def prepared(session: Session, seed: int) -> tuple[Any, Any, Any]:
    model = memd_client.offload(Model(seed), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=0.0)
    accelerator = CommittedAccelerator(session=session, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.resume()
    return accelerator, model, optimizer


def begin(seed: int) -> int:
    """A job that stands at one step, with these values and moments."""
    with connect(fresh=True) as session:
        accelerator, model, optimizer = prepared(session, seed)
        with accelerator.accumulate(model):
            for parameter in model.parameters():
                parameter.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments_of(seed)})
        return session.committed_step


def save(library: str, path: Path, at: int = 0) -> int:
    session = connect()
    accelerator, model, optimizer = prepared(session, 3)
    killing = Killing(at)
    for name in ("write", "fsync", "rename", "link"):
        killing.around(os, name)
    killing.around(whole_folder, "_exchange")
    killing.around(shutil, "rmtree")
    killing.around(Leases, "value")
    killing.around(torch_archive.ArchiveStream, "finish")
    if library == "accelerate":
        accelerator.save_state(path)
    else:
        state = {"state_dict": torch_archive.live_state(model)}
        state["optimizer_states"] = [optimizer.state_dict()]  # type: ignore[assignment] # its own
        StreamedCheckpointIO().save_checkpoint(state, path)
    session.close()
    return 0


def found_in(library: str, path: Path) -> int:
    """The writer of the values, and that of the moments."""
    if library == "accelerate":
        values = safetensors.torch.load_file(path / "model.safetensors")
        moments = torch.load(path / "optimizer.bin")["state"]
        assert (path / "notes.txt").read_text() == "somebody else's"
    else:
        state = torch.load(path)
        values, moments = state["state_dict"], state["optimizer_states"][0]["state"]
    return 10 * seed_of(values) + seed_of_moments(moments)


def main(folder: Path, library: str, stride: int) -> None:
    for seed in (OLD, NEW):
        assert in_child(partial(begin, seed)) == 1
        path = folder / str(seed)
        assert in_child(partial(save, library, path)) == 0
        if library == "accelerate":
            (path / "notes.txt").write_text("somebody else's")
    seen: Counter[str] = Counter()
    place = folder / "place"
    place.mkdir()
    path = place / "checkpoint"
    copy = shutil.copytree if library == "accelerate" else shutil.copy
    for at in range(1, 1000, stride):
        if path.is_dir():
            shutil.rmtree(path)
        copy(folder / str(OLD), path)
        status = in_child(partial(save, library, path, at))
        found = found_in(library, path)
        assert found in (ALL_OLD, ALL_NEW), (at, found)
        if status == 0:
            assert found == ALL_NEW, at
            # This save has removed what those that were killed have left.
            assert [each.name for each in place.iterdir()] == ["checkpoint"]
            break
        assert status == -signal.SIGKILL, (at, status)
        seen["old" if found == ALL_OLD else "new"] += 1
    else:
        raise AssertionError("no save was left alive")
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in sorted(seen.items())) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["MEMD_ADDRESS"] = sys.argv[1]
    main(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
