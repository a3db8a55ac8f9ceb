"""What ranks tell each other beside the daemon: two processes with a group of gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAMS = ["different", "first_fails", "second_fails", "sizes", "writer_fails"]
# Each has a group of its own, and all have the same two processes: torch is imported twice, not ten
# times.
PROGRAM = """
import json
import sys
import torch.distributed as distributed
from memd_client.core.ranks import Ranks

rank, path, programs = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)


def failing(rank_that_fails, error):
    def make():
        if rank == rank_that_fails:
            raise error

    return make


def different():
    ranks.exchange(None, ("clip gradients", "change gradients")[rank])


def first_fails():
    ranks.in_order(failing(0, OSError("no such file")), "offload")


def second_fails():
    ranks.in_order(failing(1, MemoryError()), "offload")


def writer_fails():
    ranks.by_one(1, failing(1, RuntimeError("no memory")), "change gradients")


def sizes():
    told = []
    collective = ranks._gather_pieces
    counts = [0]

    def counting(*arguments):
        counts[0] += 1
        return collective(*arguments)

    ranks._gather_pieces = counting
    # In one piece on both ranks; then rank 1 has more, and much more; then nothing.
    for size in (400, (400, 600)[rank], (400, 100_000)[rank], 0):
        found = ranks.exchange(bytes([rank + 1]) * size, "count")
        told.append(([len(each) for each in found], {each[:1] for each in found}, counts[0]))
        counts[0] = 0
    full = {b"\x01", b"\x02"}
    wanted = [
        ([400, 400], full, 1),
        ([400, 600], full, 2),
        ([400, 100_000], full, 2),
        ([0, 0], {b""}, 1),
    ]
    assert told == wanted, told


told = {}
for program in programs:
    ranks = Ranks(rank, 2, distributed.new_group(backend="gloo"))
    try:
        globals()[program]()
        said = "went on"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    told[program] = [said, ranks.exchange(rank, "go on")]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Mapping[str, tuple[str, list[int]]]]:
    """Runs all programs in two ranks. Returns for each rank what a program said and exchanged."""
    path = str(tmp_path_factory.mktemp("exchanges") / "ranks")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), path, *PROGRAMS],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [json.loads(each.communicate(timeout=120)[0]) for each in processes]


@pytest.mark.parametrize(
    ("program", "first", "second"),
    [
        (
            "different",
            "InvalidArgument: all ranks make the same calls in the same order: rank 0 came here to "
            "clip gradients, and rank 1 to change gradients",
            "InvalidArgument: all ranks make the same calls in the same order: rank 1 came here to "
            "change gradients, and rank 0 to clip gradients",
        ),
        (
            "first_fails",
            "OSError: no such file",
            "MemdError: rank 0 of 2 could not offload: OSError: no such file",
        ),
        (
            "second_fails",
            "MemdError: rank 1 of 2 could not offload: MemoryError",
            "MemoryError: ",
        ),
        ("sizes", "went on", "went on"),
        (
            "writer_fails",
            "MemdError: rank 1 of 2 could not change gradients: RuntimeError: no memory",
            "RuntimeError: no memory",
        ),
    ],
    ids=["different", "first fails", "second fails", "sizes", "writer fails"],
)
def test_an_error_or_another_call_of_a_rank_is_told_to_all_and_they_go_on(
    told: list[Mapping[str, tuple[str, list[int]]]], program: str, first: str, second: str
) -> None:
    said, went_on = zip(*(each[program] for each in told), strict=True)
    assert said == (first, second)
    assert went_on == ([0, 1], [0, 1])
