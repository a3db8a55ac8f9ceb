"""One load of a Hugging Face checkpoint, plain or inside `init`: one line of JSON with its seconds,
memory and a digest of each parameter. A child process of bench_pretrained.py.

Run: python pretrained_loader.py FOLDER [--address ADDRESS --host-bytes N --nvme-bytes N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

import memd_client
from memd.demo.memory import PeakMemory, anonymous_bytes

JOB = "pretrained"
PAGE_BYTES = 4096


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def digest(value: torch.Tensor) -> str:
    return hashlib.blake2b(value.detach().view(-1).view(torch.uint8).numpy().data).hexdigest()


def load_plainly(folder: Path) -> tuple[float, dict[str, str]]:
    began = time.perf_counter()
    model = load(folder)
    # transformers maps the files: until somebody reads a value, it is on the disk alone.
    for value in model.parameters():
        value.detach().view(-1)[:: PAGE_BYTES // value.element_size()].sum()
    seconds = time.perf_counter() - began
    return seconds, {name: digest(value) for name, value in model.named_parameters()}


def load_into_memd(
    folder: Path, address: str, host_bytes: int, nvme_bytes: int
) -> tuple[float, dict[str, str]]:
    with memd_client.connect(
        address, job=JOB, fresh=True, host_bytes=host_bytes, nvme_bytes=nvme_bytes
    ) as session:
        began = time.perf_counter()
        with memd_client.init(session):
            model = load(folder)
        memd_client.offload(model, session)
        seconds = time.perf_counter() - began
        return seconds, {name: digest(session.get(name)) for name, _ in model.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address")
    parser.add_argument("--host-bytes", type=int)
    parser.add_argument("--nvme-bytes", type=int)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    # A process imports modules when it builds its first model. A load is measured without that.
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    before_bytes = anonymous_bytes(os.getpid())
    with PeakMemory(interval_s=0.002) as memory:
        if arguments.address is None:
            seconds, digests = load_plainly(arguments.folder)
        else:
            seconds, digests = load_into_memd(
                arguments.folder, arguments.address, arguments.host_bytes, arguments.nvme_bytes
            )
    peak_bytes = memory.peak_bytes[os.getpid()] - before_bytes
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes, "digests": digests}))


if __name__ == "__main__":
    main()
