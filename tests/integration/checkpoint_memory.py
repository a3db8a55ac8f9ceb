"""Trains a model that is larger than the job's host memory, saves and loads all of it, and says
what memory that took, in bytes beyond those of an interpreter with torch imported, and its
distributed checkpoints, which take 44 MiB.

Run: python -m tests.integration.checkpoint_memory ADDRESS FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from tests.integration.safetensors_memory import BASE_BYTES, peak, rss_anon_bytes

LAYERS = 9
WIDTH = 2048  # 16 MiB a layer, 32 of moments
HOST = "48MiB"
NVME = "1600MiB"


def write_state(path: Path, groups: list[dict[str, Any]]) -> None:
    """Writes the state of a plain torch optimizer, which is whole in this process."""
    states = {
        index: {
            "step": torch.tensor(5.0),
            "exp_avg": torch.rand(WIDTH, WIDTH),
            "exp_avg_sq": torch.rand(WIDTH, WIDTH),
        }
        for index in range(LAYERS)
    }
    torch.save({"state": states, "param_groups": groups}, path)


def main(address: str, folder: Path) -> None:
    import memd_client
    from memd_client.base.freed_memory import return_freed_memory

    def everything() -> dict[str, Any]:
        return {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}

    sys.stdout.write(f"imports {rss_anon_bytes() - BASE_BYTES}\n")
    session = memd_client.connect(
        address, job="memory", fresh=True, host_bytes=HOST, nvme_bytes=NVME
    )
    with session:
        with peak("init"), memd_client.init(session):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters())
        with peak("train"):
            for _ in range(2):
                model(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.commit(wait=True)
        return_freed_memory()  # what training has left is no part of a save
        with peak("save_safetensors"):
            memd_client.save_safetensors(model, folder / "a.safetensors")
        with peak("load_safetensors"):
            memd_client.load_safetensors(model, folder / "a.safetensors", session)
        with peak("state_dict"):
            state = optimizer.state_dict()
        assert len(state["state"]) == LAYERS
        del state
        path = folder / "state.pt"
        subprocess.run(
            [sys.executable, "-m", "tests.integration.checkpoint_memory", str(path)], check=True
        )
        with peak("load_state_dict"):
            loaded = torch.load(path, mmap=True, weights_only=True)
            loaded["param_groups"] = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict(loaded)
        del loaded
        path.unlink()
        with peak("dcp.save"):
            save(everything(), storage_writer=memd_client.checkpoint.Writer(folder / "b"))
        with peak("dcp.async_save"):  # and training beside it
            writer = memd_client.checkpoint.Writer(folder / "b")
            future = async_save(everything(), storage_writer=writer)
            for _ in range(2):
                model(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert isinstance(future, Future)
            future.result()
        with peak("dcp.load"):
            state = everything()
            load(state, storage_reader=memd_client.checkpoint.Reader(folder / "b"))
            optimizer.load_state_dict(state["optimizer"])
        assert state["optimizer"]["state"][0]["step"] == 5
        del state  # it would keep its moments
        with peak("reset_state"):
            optimizer.reset_state()
    session = memd_client.connect(address, job="memory")
    session.drop_job()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    if len(sys.argv) == 2:
        write_state(Path(sys.argv[1]), [])
    else:
        main(sys.argv[1], Path(sys.argv[2]))
