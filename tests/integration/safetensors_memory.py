"""Saves a model that is larger than the job's host memory and loads it, and says what memory that
took, in bytes beyond those of an interpreter with torch imported.

Run: python -m tests.integration.safetensors_memory ADDRESS FOLDER
"""

from __future__ import annotations

import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS = 12
# See docs/decisions/freed-memory.md.
SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
    "THP_MEM_ALLOC_ENABLE": "1",
}


def rss_anon_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


BASE_BYTES = rss_anon_bytes()


@contextmanager
def peak(what: str, base_bytes: int = BASE_BYTES) -> Iterator[None]:
    is_over = threading.Event()
    found = [rss_anon_bytes()]

    def sample() -> None:
        while not is_over.wait(0.001):
            found.append(rss_anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        is_over.set()
        sampler.join()
    sys.stdout.write(f"{what} {max(found) - base_bytes}\n")


def main(address: str, folder: Path) -> None:
    import memd_client

    torch.manual_seed(0)
    layer_bytes = 8 << 20
    with memd_client.connect(address, job="memory", fresh=True, nvme_bytes="300MiB") as session:
        # Layer by layer: a model that is built at once takes its own size.
        model = nn.ModuleDict()
        for number in range(LAYERS):
            layer = nn.ParameterDict({"weight": torch.rand(layer_bytes // 4)})
            model[str(number)] = memd_client.offload(
                nn.ModuleDict({str(number): layer}), session, strict=False
            )[str(number)]
            del layer
        sys.stdout.write(f"model {LAYERS * layer_bytes}\nlargest {layer_bytes}\n")
        with peak("save"):
            memd_client.save_safetensors(model, folder / "a.safetensors")
        with peak("load"):
            memd_client.load_safetensors(model, folder / "a.safetensors", session)
        with peak("folder"):
            memd_client.save_safetensors(model, folder / "b", max_shard_bytes="20MiB")
        session.drop_job()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
