"""One rank of a contestant of bench_ranks.py: a GPT that ranks of one node train together.

Run: python ranks_training.py CONTESTANT RANK WORLD MEETING ADDRESS --params 60M --dtype fp32 …
MEETING is a file where the ranks meet, ADDRESS a daemon's, or "-".

Rank 0 prints JSON lines: {"event": "steps", "seconds": …, "loss": …} of the steps that count, and
{"event": "done"}; every rank then waits for its stdin to end, so that its memory can be looked at.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from memd.demo.model import build_model, shape_for
from memd.demo.quantities import parse_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    # The model, its optimizer, and a wait for the end of a step.
    Trained = tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE = 1e-4
# The pool of a job that stays in memory: a value, its published copy, a gradient and a state of up
# to 12 bytes for each parameter.
RESIDENT_BYTES = 26
SPARE_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that bench_ranks.py passes on."""
    parser.add_argument("--params", type=parse_count, default=60_000_000)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=6, help="that count")


def pool_bytes(parameter_count: int) -> int:
    return RESIDENT_BYTES * parameter_count + SPARE_BYTES


def torch_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def at_once() -> None:
    """torch's step() returns when the step is over."""


def plain(model: nn.Module) -> Trained:
    return model, torch_optimizer(model), at_once


def ddp(model: nn.Module) -> Trained:
    return DistributedDataParallel(model), torch_optimizer(model), at_once


def fsdp(model: nn.Module) -> Trained:
    """A block at a time, with parameters, gradients and states in the memory of the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (distributed.get_world_size(),)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model, torch_optimizer(model), at_once


def memd(model: nn.Module, contestant: str, address: str, cleanup: ExitStack) -> Trained:
    # Here, so that nobody else's memory holds it.
    import memd_client

    host_bytes = pool_bytes(sum(parameter.numel() for parameter in model.parameters()))
    session = cleanup.enter_context(
        memd_client.connect(
            address, job="ranks", host_bytes=host_bytes, nvme_bytes=host_bytes, durability="none"
        )
    )

    def optimizer_of(each: nn.Module) -> torch.optim.Optimizer:
        return memd_client.AdamW(each.named_parameters(), lr=LEARNING_RATE, session=session)

    def finish() -> int:
        return session.committed_step

    if contestant == "memd":
        memd_client.offload(model, session)
        return model, optimizer_of(model), finish
    wrapped = DistributedDataParallel(model)
    if contestant == "memd-zero2":
        wrapped.register_comm_hook(None, memd_client.reduce_hook(session))
    return wrapped, optimizer_of(wrapped), finish


def built(contestant: str, model: nn.Module, address: str, cleanup: ExitStack) -> Trained:
    makers: dict[str, Callable[[nn.Module], Trained]] = {"plain": plain, "ddp": ddp, "fsdp": fsdp}
    if contestant in makers:
        return makers[contestant](model)
    return memd(model, contestant, address, cleanup)


def tell(event: str, **values: Any) -> None:
    if distributed.get_rank() == 0:
        print(json.dumps({"event": event, **values}), flush=True)


def train(arguments: argparse.Namespace, cleanup: ExitStack) -> None:
    shape = shape_for(arguments.params, sequence=arguments.sequence)
    model = build_model(shape, dtype=DTYPES[arguments.dtype], seed=0)
    wrapped, optimizer, finish = built(arguments.contestant, model, arguments.address, cleanup)
    generator = torch.Generator().manual_seed(arguments.rank)
    tokens = torch.randint(
        shape.vocabulary, (arguments.batch, arguments.sequence + 1), generator=generator
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    began = time.perf_counter()
    for number in range(arguments.warm + arguments.steps):
        if number == arguments.warm:
            distributed.barrier()
            began = time.perf_counter()
        loss = wrapped(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    finish()
    seconds = (time.perf_counter() - began) / arguments.steps
    tell("steps", seconds=seconds, loss=loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contestant")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("meeting")
    parser.add_argument("address")
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.meeting}",
        rank=arguments.rank,
        world_size=arguments.world,
    )
    with ExitStack() as cleanup:
        train(arguments, cleanup)
        tell("done")
        sys.stdin.read()
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
