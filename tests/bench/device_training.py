"""A GPT trained on an accelerator through memd, beside plain PyTorch with everything on the device.

Contenders alternate, each in a process of its own. "forward + backward" drops the gradients and
updates nothing, so that all parameters stay on the device; a step also updates, on the device where
plain PyTorch does it and on the host with memd.

Run: python device_training.py [--params 125M] [--tokens 4096 16384] [--device-bytes 4GiB]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import memd_client
from machine import describe_machine
from memd.demo.model import GPTShape, build_model, shape_for
from memd.sizes import parse_size
from report import ratio, seconds, write_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from memd.bench.figures import Figure

CONTENDERS = ("plain", "memd")
SEQUENCE = 1024
VOCABULARY = 8192
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_COUNT = 3
# Parameters, moments, gradients in two sets, and copies being replaced.
HOST_FACTOR = 6
MARGIN_BYTES = 1 << 30


def shape_of(parameter_count: int) -> GPTShape:
    shape = shape_for(parameter_count, sequence=SEQUENCE)
    return GPTShape(width=shape.width, depth=shape.depth, sequence=SEQUENCE, vocabulary=VOCABULARY)


def medians(run: Callable[[], object], count: int) -> float:
    times = []
    for number in range(WARM_COUNT + count):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        run()
        torch.accelerator.synchronize()
        if number >= WARM_COUNT:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _train_once(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, does_step: bool
) -> None:
    model(inputs, inputs.roll(-1, 1)).backward()
    if does_step:
        optimizer.step()
    optimizer.zero_grad()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one contender, in its own process."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        sys.exit("torch finds no accelerator here")
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    shape = shape_of(arguments.parameter_count)
    dtype = DTYPES[arguments.dtype]
    with device:  # where it is made soonest
        model: torch.nn.Module = build_model(shape, dtype=dtype, seed=0)
    count = sum(each.numel() for each in model.parameters())
    optimizer: torch.optim.Optimizer
    session = None
    if arguments.child == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        model.cpu()
        host = count * HOST_FACTOR * dtype.itemsize + 12 * count + MARGIN_BYTES
        address = f"embedded:?host={host}B&nvme=64MiB"
        session = memd_client.connect(address, job="bench", fresh=True)
        memd_client.offload(
            model,
            session,
            tier="host",
            device=device,
            device_bytes=arguments.device_bytes or 2 * count * dtype.itemsize,
        )
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-4, session=session, tier="host")
    measured: dict[str, Any] = {"parameters": count, "device_bytes": 0}
    # Those without updates first: until a step changes them, parameters stay where they are.
    for name, does_step in (("forward + backward", False), ("step", True)):
        for token_count in arguments.tokens:
            inputs = torch.randint(VOCABULARY, (token_count // SEQUENCE, SEQUENCE), device=device)
            measured[f"{name}, {token_count} tokens"] = medians(
                partial(_train_once, model, optimizer, inputs, does_step), arguments.steps
            )
    measured["device_bytes"] = torch.accelerator.max_memory_allocated()
    if session is not None:
        measured["statistics"] = dataclasses.asdict(session.statistics())
        session.close()
    return measured


def child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, *sys.argv[1:]]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    told: dict[str, Any] = json.loads(output.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--params", default="125M", help="parameters, about")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="a step")
    parser.add_argument("--device-bytes", type=parse_size, help="for parameters; all, by default")
    parser.add_argument("--steps", type=int, default=5, help="timed, of each kind")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    factors = {"M": 1_000_000, "B": 1_000_000_000}
    arguments.parameter_count = int(float(arguments.params[:-1]) * factors[arguments.params[-1]])
    if arguments.child:
        print(json.dumps(train(arguments)))
        return
    machine = {**describe_machine(), "device": torch.get_device_module().get_device_name()}
    rounds = [
        {name: child(name, arguments) for name in CONTENDERS} for _ in range(arguments.rounds)
    ]
    figures: list[Figure] = []
    for token_count in arguments.tokens:
        for part in (f"forward + backward, {token_count} tokens", f"step, {token_count} tokens"):
            plain, memd = ([each[name][part] for each in rounds] for name in CONTENDERS)
            figures += [
                seconds(f"plain PyTorch: {part}", plain),
                seconds(f"memd: {part}", memd),
                ratio(f"memd / plain PyTorch: {part}", memd, plain, less_is_better=True),
            ]
    write_report(
        arguments.json,
        name="device_training",
        machine=machine,
        settings={
            "parameters": rounds[0]["plain"]["parameters"],
            "dtype": arguments.dtype,
            "sequence": SEQUENCE,
            "device_bytes": arguments.device_bytes or 0,
        },
        figures=figures,
        details={"rounds": rounds},
    )


if __name__ == "__main__":
    main()
