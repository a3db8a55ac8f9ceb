"""Adam's update beside those of torch and DeepSpeed, on one machine in alternating rounds.

fp32 against torch's fused AdamW and DeepSpeedCPUAdam; bf16 with fp32 moments against
DeepSpeedCPUAdam, which keeps no remainder: it moves 22 bytes an element where memd moves 26. memd's
own rate stands against a loop with the same reads and writes and no arithmetic. A ratio of times is
that of neighbours, with whichever peer is faster by its median.

Each peer is a process of its own, DeepSpeed's in the environment of peers/set_up.sh, and updates
once when it is told to. The largest case holds 16 bytes an element in every one of them.

Run: peers/set_up.sh, then python tests/bench/bench_adam.py [--elements 100M] [--threads 1 2]
     [--tensors 1 400] [--dtype fp32 bf16] [--rounds 5] [--peers torch deepspeed] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from memd.demo.quantities import parse_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from memd.bench.figures import Figure

PEERS = Path(__file__).parents[2] / "build" / "peers"
PEERS_PYTHON = PEERS / "venv" / "bin" / "python"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# torch's fused AdamW keeps moments in the parameter's dtype: in bf16 it is another algorithm.
PEERS_OF = {"fp32": ("torch", "deepspeed"), "bf16": ("deepspeed",)}
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
WARM_PASSES = 2  # moments are made in the first one
LAST_LINES = 20


class PeerFailed(Exception):
    """The message holds what it said last."""


# ---- A peer's process ----------------------------------------------------------------------------


def torch_adam(parameters: list[torch.nn.Parameter]) -> Callable[[], object]:
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    ).step


def deepspeed_adam(parameters: list[torch.nn.Parameter]) -> Callable[[], object]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(
        parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True
    )
    step: Callable[[], object] = optimizer.step
    return step


PEERS_ADAM = {"torch": torch_adam, "deepspeed": deepspeed_adam}


def serve_passes(peer: str, dtype: str, elements: int, tensors: int, threads: int) -> None:
    """A line of seconds for each line that comes; ends with the input."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # DeepSpeed prints
    torch.set_num_threads(threads)
    # Numbers of training, as memd's measurement has them: no zeros, no denormals.
    whole = torch.full((elements,), 0.01, dtype=DTYPES[dtype])
    gradient = torch.full((elements,), 0.01, dtype=DTYPES[dtype])
    parameters = []
    for number in range(tensors):
        begin, end = elements * number // tensors, elements * (number + 1) // tensors
        parameter = torch.nn.Parameter(whole[begin:end])
        parameter.grad = gradient[begin:end]
        parameters.append(parameter)
    update = PEERS_ADAM[peer](parameters)
    for _ in range(WARM_PASSES):
        update()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        began = perf_counter()
        update()
        print(perf_counter() - began, file=answers, flush=True)
    sys.stderr.flush()
    os._exit(0)  # DeepSpeed's threads do not always let the interpreter end


class Peer:
    """`with Peer(…) as peer`: its process, which idles between passes."""

    def __init__(self, name: str, *, dtype: str, elements: int, tensors: int, threads: int) -> None:
        self.name = name
        python = PEERS_PYTHON if name == "deepspeed" else Path(sys.executable)
        self._command = [str(python), __file__, "--serve", name, "--dtype", dtype]
        self._command += ["--elements", str(elements), "--tensors", str(tensors)]
        self._command += ["--threads", str(threads)]
        self._environ = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(PEERS / "operators"),
            "PATH": f"{PEERS_PYTHON.parent}{os.pathsep}{os.environ['PATH']}",  # ninja
        }

    def __enter__(self) -> Peer:
        self._said = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=self._environ,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def wait_until_ready(self) -> None:
        self._answer()

    def pass_seconds(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("pass\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            self._said.seek(0)
            last_words = "\n".join(self._said.read().splitlines()[-LAST_LINES:])
            raise PeerFailed(f"{self.name} ended with {status}:\n{last_words}")
        return answer


# ---- The comparison ------------------------------------------------------------------------------


def figures_of_case(
    case: str,
    *,
    gigabytes: float,
    updates: Sequence[float],
    traffic: Sequence[float],
    passes: dict[str, list[float]],
) -> Iterator[Figure]:
    """All are seconds of one pass, round by round."""
    from memd.bench.figures import Figure
    from report import ratio, seconds

    yield Figure(
        name=f"{case}: memd",
        unit="GB/s",
        runs=[gigabytes / each for each in updates],
        limit_name="memory traffic",
        limit_runs=[gigabytes / each for each in traffic],
    )
    yield seconds(f"{case}: memd, a pass", updates)
    for name, times in passes.items():
        yield seconds(f"{case}: {name}, a pass", times)
    if passes:
        best = min(passes, key=lambda name: statistics.median(passes[name]))
        yield ratio(f"{case}: memd / the best of {', '.join(passes)}", passes[best], updates)


def measure_case(
    arguments: argparse.Namespace, dtype: str, tensors: int, threads: int
) -> Iterator[Figure]:
    from memd_native import measure_adam
    from memd_proto.v1 import types_pb2

    dtypes = {"fp32": types_pb2.D_TYPE_FLOAT32, "bf16": types_pb2.D_TYPE_BFLOAT16}
    names = [name for name in PEERS_OF[dtype] if name in arguments.peers]
    counted = [
        f"{count} {noun}{'s' * (count != 1)}"
        for count, noun in ((tensors, "tensor"), (threads, "thread"))
    ]
    case = ", ".join([dtype, *counted])
    updates: list[float] = []
    traffic: list[float] = []
    passes: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        peers = [
            stack.enter_context(
                Peer(
                    name,
                    dtype=dtype,
                    elements=arguments.elements,
                    tensors=tensors,
                    threads=threads,
                )
            )
            for name in names
        ]
        for peer in peers:
            peer.wait_until_ready()
        for number in range(arguments.rounds):
            print(f"{case}: round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            rate = measure_adam(
                dtype=dtypes[dtype],
                element_count=arguments.elements,
                tensor_count=tensors,
                thread_count=threads,
                round_count=1,
            )
            updates += rate.update_seconds
            traffic += rate.traffic_seconds
            for peer in peers:
                passes[peer.name].append(peer.pass_seconds())
    yield from figures_of_case(
        case,
        gigabytes=rate.element_count * rate.bytes_per_element / 1e9,
        updates=updates,
        traffic=traffic,
        passes=passes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=parse_count, default=100_000_000, help="in all")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 400], help="of equal sizes")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=tuple(PEERS_ADAM),
        default=list(PEERS_ADAM),
        help="whom to compare with; none: only the memory traffic",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=tuple(PEERS_ADAM), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(*arguments.threads, *arguments.tensors, arguments.rounds) < 1:
        parser.error("--threads, --tensors and --rounds are at least 1")
    if max(arguments.tensors) > arguments.elements:
        parser.error(f"{arguments.elements} elements make no {max(arguments.tensors)} tensors")
    if arguments.serve:
        (tensors,), (threads,), (dtype,) = arguments.tensors, arguments.threads, arguments.dtype
        serve_passes(arguments.serve, dtype, arguments.elements, tensors, threads)
    if "deepspeed" in arguments.peers and not PEERS_PYTHON.exists():
        parser.error(
            f"{PEERS_PYTHON} is missing: run tests/bench/peers/set_up.sh first, or compare with "
            "--peers torch alone"
        )
    # Not in a peer's environment.
    from machine import describe_machine
    from report import write_report

    machine = describe_machine()
    figures: list[Any] = []
    try:
        for dtype in arguments.dtype:
            for threads in arguments.threads:
                for tensors in arguments.tensors:
                    figures += measure_case(arguments, dtype, tensors, threads)
    except PeerFailed as failure:
        raise SystemExit(str(failure)) from failure
    write_report(
        arguments.json,
        name="bench_adam",
        machine=machine,
        settings={
            name: getattr(arguments, name)
            for name in ("elements", "threads", "tensors", "dtype", "rounds", "peers")
        },
        figures=figures,
    )


if __name__ == "__main__":
    main()
