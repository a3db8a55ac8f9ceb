"""One rank of a contestant of bench_ranks.py: a GPT that ranks of one node train together.

Run: python ranks_training.py CONTESTANT RANK WORLD MEETING ADDRESS --params 60M --dtype fp32 …, in
the environment of peers/set_up.sh for DeepSpeed and in the project's for the others. MEETING is a
file where the ranks meet, ADDRESS a daemon's, or "-".

Rank 0 prints JSON lines: {"event": "steps", "seconds": …, "loss": …} of the steps that count, and
{"event": "done"}; every rank then waits for its stdin to end, so that its memory can be looked at.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from memd.demo.model import build_model, shape_for
from memd.demo.quantities import parse_count
from peers.telling import Teller

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    # Trains on inputs and targets, and returns the loss before the update.
    Step = Callable[[Tensor, Tensor], Tensor]
    Build = Callable[[], nn.Module]
    # A step, and a wait for its end.
    Trained = tuple[Step, Callable[[], object]]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE = 1e-4
# A job that stays in memory holds so many elements a parameter: the value, its published copy, a
# gradient, two moments, and room for what is cut in pieces.
RESIDENT_ELEMENTS = 6.5
SPARE_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that bench_ranks.py passes on."""
    parser.add_argument("--params", type=parse_count, default=60_000_000)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each rank")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=6, help="that count")


def pool_bytes(parameter_count: int, dtype: torch.dtype) -> int:
    return int(RESIDENT_ELEMENTS * dtype.itemsize * parameter_count) + SPARE_BYTES


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def by_torch(model: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return steps_of(model, optimizer), at_once


def at_once() -> None:
    """A step has ended when it returns."""


def ddp(model: nn.Module) -> Trained:
    return by_torch(DistributedDataParallel(model))


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
    return by_torch(model)


def memd(build: Build, arguments: argparse.Namespace, cleanup: ExitStack) -> Trained:
    # Here, so that nobody else's memory holds it.
    import memd_client

    host_bytes = pool_bytes(
        shape_for(arguments.params, sequence=arguments.sequence).parameter_count,
        DTYPES[arguments.dtype],
    )
    session = cleanup.enter_context(
        memd_client.connect(
            arguments.address,
            job="ranks",
            host_bytes=host_bytes,
            nvme_bytes=2 * host_bytes,  # init() has values twice until they have names
            durability="none",
        )
    )

    def optimizer_of(each: nn.Module) -> torch.optim.Optimizer:
        return memd_client.AdamW(each.named_parameters(), lr=LEARNING_RATE, session=session)

    def finish() -> int:
        return session.committed_step

    if arguments.contestant == "memd":
        # No rank ever has the whole model in memory of its own.
        with memd_client.init(session):
            model = build()
        return steps_of(model, optimizer_of(model)), finish
    wrapped = DistributedDataParallel(build())
    if arguments.contestant == "memd-zero2":
        wrapped.register_comm_hook(None, memd_client.reduce_hook(session))
    return steps_of(wrapped, optimizer_of(wrapped)), finish


def deepspeed(model: nn.Module, arguments: argparse.Namespace) -> Trained:
    """Without offload: parameters, gradients and states lie in the memory of the host anyway, each
    stage's share of them on each rank. With bf16, masters and moments are fp32."""
    import deepspeed

    # DeepSpeed asks for another rank's values before it joins the process group that is there.
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    # torch's fused kernel, as for the others: that of DeepSpeed for accelerators is compiled first.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": arguments.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "bf16": {"enabled": arguments.dtype == "bf16"},
            "zero_optimization": {"stage": int(arguments.contestant[-1])},
        },
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step, at_once


def built(build: Build, arguments: argparse.Namespace, cleanup: ExitStack) -> Trained:
    contestant = arguments.contestant
    makers: dict[str, Callable[[nn.Module], Trained]] = {
        "plain": by_torch,
        "ddp": ddp,
        "fsdp": fsdp,
    }
    if contestant in makers:
        return makers[contestant](build())
    if contestant.startswith("deepspeed"):
        return deepspeed(build(), arguments)
    return memd(build, arguments, cleanup)


def train(arguments: argparse.Namespace, tell: Teller, cleanup: ExitStack) -> None:
    shape = shape_for(arguments.params, sequence=arguments.sequence)
    # DeepSpeed makes its own bf16 of fp32 masters.
    is_fp32 = arguments.contestant.startswith("deepspeed")
    dtype = torch.float32 if is_fp32 else DTYPES[arguments.dtype]
    step, finish = built(partial(build_model, shape, dtype=dtype, seed=0), arguments, cleanup)
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
        loss = step(inputs, targets)
    finish()
    seconds = (time.perf_counter() - began) / arguments.steps
    if arguments.rank == 0:
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
    tell = Teller()
    torch.set_num_threads(1)
    # Those of torchrun, which DeepSpeed reads.
    os.environ.update(
        DS_ACCELERATOR="cpu",
        GLOO_SOCKET_IFNAME="lo",
        LOCAL_RANK=str(arguments.rank),
        LOCAL_SIZE=str(arguments.world),
        RANK=str(arguments.rank),
        WORLD_SIZE=str(arguments.world),
    )
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.meeting}",
        rank=arguments.rank,
        world_size=arguments.world,
    )
    with ExitStack() as cleanup:
        train(arguments, tell, cleanup)
        if arguments.rank == 0:
            tell("done")
        sys.stdin.read()
        distributed.barrier()
        if arguments.contestant.startswith("deepspeed"):
            # Its threads and process group do not always let the interpreter end.
            sys.stderr.flush()
            os._exit(0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
