"""One contestant: a GPT-2 trained for some steps by plain PyTorch, DeepSpeed or memd.

Run: python train.py plain|deepspeed-cpu|deepspeed-nvme|memd --model 60m --dtype fp32 …, in the
environment of set_up.sh for DeepSpeed and in the project's for the others. All get the same model,
tokens and settings of AdamW, and none clips.

Prints JSON lines, and nothing else on stdout: {"event": "ready"} when setting up is over, {"event":
"step", "loss": …} after each step, {"event": "mark", "name": "begin" | "end"} around those that
count, and {"event": "done"}; `time` in each is time.monotonic().
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from memd.demo.model import GPTShape, build_model
from memd.sizes import parse_size
from peers.telling import Teller

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    # Trains on inputs and targets, and returns the loss before the update.
    Step = Callable[[Tensor, Tensor], Tensor]
    # Bytes read and written by devices so far, where the contestant knows them itself.
    Counters = Callable[[], dict[str, int]]

# The shapes of GPT-2 with a vocabulary of 8192, so that the embedding does not outweigh the blocks.
SHAPES = {
    "tiny": GPTShape(width=128, depth=2, sequence=512, vocabulary=8192),
    "60m": GPTShape(width=640, depth=11, sequence=512, vocabulary=8192),
    "311m": GPTShape(width=1024, depth=24, sequence=512, vocabulary=8192),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01
# DeepSpeed's: it updates so many elements at a time, and reads the next while it does.
SUB_GROUP_SIZE = 100_000_000
BATCHES = 4  # drawn once and repeated, so that the loss falls


def keep_to_processors(count: int) -> None:
    """Everything that this process starts: threads for transfers, and a private daemon, which would
    use all there are."""
    usable = sorted(os.sched_getaffinity(0))
    if count > len(usable):
        raise SystemExit(f"--threads {count}: there are {len(usable)} processors")
    os.sched_setaffinity(0, usable[:count])


def batches(shape: GPTShape, *, batch: int, sequence: int) -> list[tuple[Tensor, Tensor]]:
    drawn = []
    for seed in range(BATCHES):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(shape.vocabulary, (batch, sequence + 1), generator=generator)
        drawn.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return drawn


def no_counters() -> dict[str, int]:
    return {}


def plain(arguments: argparse.Namespace) -> Step:
    model = build_model(SHAPES[arguments.model], dtype=DTYPES[arguments.dtype], seed=0)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def memd(arguments: argparse.Namespace, cleanup: ExitStack) -> tuple[Step, Counters]:
    # Here, so that nobody else's memory holds it.
    import memd_client
    from memd.client import DaemonClient
    from memd.demo.run import private_daemon

    address = f"embedded:{quote(str(arguments.data))}?host={arguments.host}B&nvme={arguments.nvme}B"
    daemon = cleanup.enter_context(private_daemon(address))
    session = cleanup.enter_context(
        memd_client.connect(address, job="peers", durability=arguments.durability)
    )
    meter = cleanup.enter_context(DaemonClient(daemon.address.attach_socket))
    model = build_model(SHAPES[arguments.model], dtype=DTYPES[arguments.dtype], seed=0)
    memd_client.offload(model, session, tier="nvme")
    optimizer = memd_client.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        session=session,
        step_in_backward=arguments.step_in_backward,
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def counters() -> dict[str, int]:
        devices = meter.status().devices
        return {
            "read_bytes": sum(device.read_bytes for device in devices),
            "written_bytes": sum(device.written_bytes for device in devices),
        }

    return step, counters


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def deepspeed_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings that work on a CPU: stage 3, and states where the contestant's name says."""
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": arguments.sub_group,
        "reduce_bucket_size": 50_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_max_live_parameters": 100_000_000,
        "stage3_param_persistence_threshold": 10_000,
    }
    if arguments.contestant == "deepspeed-cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    else:
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": str(arguments.data),
            "pin_memory": True,
            "buffer_count": 12,
            "pipeline_read": True,
            "pipeline_write": True,
            "fast_init": False,
        }
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
            },
        },
        "bf16": {"enabled": arguments.dtype == "bf16"},
        "zero_optimization": zero,
        # The best of its own grid on a virtual disk; its default depth of 8 reads at 0.6 of this.
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def deepspeed(arguments: argparse.Namespace) -> Step:
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        GLOO_SOCKET_IFNAME="lo",
    )
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = build_model(SHAPES[arguments.model], dtype=torch.float32, seed=0)
    engine, *_ = deepspeed.initialize(
        model=model, config=deepspeed_config(arguments), model_parameters=model.parameters()
    )

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def run(arguments: argparse.Namespace, tell: Teller, cleanup: ExitStack) -> None:
    counters: Counters = no_counters
    if arguments.contestant == "plain":
        step = plain(arguments)
    elif arguments.contestant == "memd":
        step, counters = memd(arguments, cleanup)
    else:
        step = deepspeed(arguments)
    shape = SHAPES[arguments.model]
    drawn = batches(shape, batch=arguments.batch, sequence=arguments.sequence)
    tell("ready", parameter_count=shape.parameter_count, threads=torch.get_num_threads())
    end = arguments.warm + arguments.steps
    for number in range(end + arguments.after):
        if number in (arguments.warm, end):
            tell("mark", name="begin" if number == arguments.warm else "end", **counters())
        loss = step(*drawn[number % BATCHES])
        tell("step", step=number, loss=loss.item())
    tell("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contestant", choices=("plain", "deepspeed-cpu", "deepspeed-nvme", "memd"))
    parser.add_argument("--model", choices=tuple(SHAPES), default="60m")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=10, help="that count")
    parser.add_argument("--after", type=int, default=2, help="steps after those that count")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="and processors"
    )
    parser.add_argument("--data", type=Path, required=True, help="an empty folder on a disk")
    parser.add_argument("--host", type=parse_size, help="memd: the pool")
    parser.add_argument("--nvme", type=parse_size, help="memd: the volume")
    parser.add_argument("--durability", default="step", help="memd: as connect() takes it")
    parser.add_argument("--step-in-backward", action="store_true", help="memd")
    parser.add_argument("--sub-group", type=int, default=SUB_GROUP_SIZE, help="DeepSpeed: elements")
    arguments = parser.parse_args()
    if min(arguments.warm, arguments.steps, arguments.after) < 1:
        parser.error("--warm, --steps and --after are at least 1")
    if arguments.contestant == "memd" and None in (arguments.host, arguments.nvme):
        parser.error("memd needs --host and --nvme")
    keep_to_processors(arguments.threads)
    torch.set_num_threads(arguments.threads)
    tell = Teller()
    with ExitStack() as cleanup:
        run(arguments, tell, cleanup)
    if arguments.contestant.startswith("deepspeed"):
        # Its threads and process group do not always let the interpreter end.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
