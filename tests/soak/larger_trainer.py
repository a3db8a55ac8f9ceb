"""The trainer of `larger_than_memory`: in a first job it builds, trains, keeps a snapshot and
trains on; in a second one it loads what was exported, trains on and saves. It says the peak of each
in bytes beyond those of an interpreter with torch imported, and digests of the state.

Run: python -m tests.soak.larger_trainer first|second ADDRESS MILLIONS FOLDER
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from memd.demo.model import GPT, GPTShape, parameter_groups, shape_for
from tests.integration.safetensors_memory import peak as peak_above
from tests.integration.safetensors_memory import rss_anon_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import memd_client

# The first optimizer imports a part of torch of 25 MiB.
torch.optim.AdamW([torch.zeros(1)])
BASE_BYTES = rss_anon_bytes()
SEQUENCE = 64
STEPS = range(3)  # before the snapshot
LATER = range(3, 5)
COPIES = 2  # of the state: the job's, and that of a snapshot or a load


def shape_of(millions: int) -> GPTShape:
    return shape_for(millions * 10**6, sequence=SEQUENCE)


def state_bytes(shape: GPTShape) -> int:
    """Of values and moments."""
    return 12 * shape.parameter_count


def nvme_bytes(shape: GPTShape) -> int:
    """A job of durability "none", gradients that the host has no room for, and a margin."""
    return COPIES * state_bytes(shape) + 4 * shape.parameter_count + (256 << 20)


def host_bytes(shape: GPTShape) -> int:
    return max(8 * 4 * shape.module_elements_max, 64 << 20)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def peak(phase: str) -> AbstractContextManager[None]:
    return peak_above(phase, BASE_BYTES)


class Trainer:
    """One job's session, its model and optimizer."""

    def __init__(self, session: memd_client.Session, shape: GPTShape, *, seed: int) -> None:
        import memd_client

        torch.manual_seed(seed)
        with memd_client.init(session):
            model = GPT(shape)
        self._model = memd_client.offload(model, session)
        groups = parameter_groups(self._model, weight_decay=0.1)
        self._optimizer = memd_client.AdamW(groups, 1e-3, session=session)

    def train(self, steps: range, *, says: bool = False) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(0, 256, (1, SEQUENCE + 1), generator=generator)
            self._model(text[:, :-1], text[:, 1:]).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            if says:
                say("step", step)

    def state(self) -> dict[str, Any]:
        """Without the output layer's weight, which is the embedding's: an export has a tied
        parameter once."""
        values = self._model.state_dict(keep_vars=True)
        del values["head.weight"]
        moments = get_optimizer_state_dict(self._model, self._optimizer)["state"]
        return {"model": values, "optimizer": {"state": moments}}

    def digest(self) -> str:
        """The bits of all values and moments."""
        found = hashlib.blake2b(digest_size=16)
        for name, parameter in self._model.named_parameters():
            found.update(name.encode())
            found.update(parameter.detach().numpy().data)
        states = self._optimizer.state_dict()["state"]
        for number in sorted(states):
            for each in states.pop(number).values():  # read ones are not kept
                found.update(torch.as_tensor(each).numpy().data)
        return found.hexdigest()


def first(session: memd_client.Session, shape: GPTShape) -> None:
    with peak("build"):
        trainer = Trainer(session, shape, seed=0)
    with peak("train"):
        trainer.train(STEPS)
        session.commit(wait=True)
    session.snapshot("kept")
    say("kept", session.committed_step)
    sys.stdin.readline()  # the export has begun
    with peak("train-beside-export"):
        trainer.train(LATER, says=True)
        session.commit(wait=True)
    say("digest", trainer.digest())
    sys.stdin.readline()  # the export has ended, and its snapshot is dropped


def second(session: memd_client.Session, shape: GPTShape, folder: Path) -> None:
    import memd_client
    from memd_client.base.freed_memory import return_freed_memory

    trainer = Trainer(session, shape, seed=1)
    with peak("load"):
        load(trainer.state(), storage_reader=memd_client.checkpoint.Reader(folder / "exported"))
    trainer.train(LATER)
    say("digest", trainer.digest())
    for each in (folder / "exported").iterdir():
        each.unlink()  # the disk need not hold both
    return_freed_memory()  # what the digest has left is no part of a save
    with peak("save"):
        writer = memd_client.checkpoint.Writer(folder / "saved")
        future = async_save(trainer.state(), storage_writer=writer)
        trainer.train(range(5, 6))
        assert isinstance(future, Future)
        future.result()
    files = list((folder / "saved").iterdir())
    say("saved", sum(each.stat().st_size for each in files))


def main(role: str, address: str, millions: int, folder: Path) -> None:
    import memd_client

    shape = shape_of(millions)
    say("base", BASE_BYTES)
    session = memd_client.connect(
        address,
        job=role,
        fresh=True,
        host_bytes=host_bytes(shape),
        nvme_bytes=nvme_bytes(shape),
        durability="none",
    )
    if role == "first":
        first(session, shape)
    else:
        second(session, shape, folder)
    session.drop_job()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
