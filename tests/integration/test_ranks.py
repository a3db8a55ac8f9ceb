"""Several ranks of a job on one node: one copy of its state, and the sums of all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import daemons, running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

TIMEOUT_S = 240
PROGRAMS = "tests.integration.rank_programs"
# A start of torchrun's ranks meets in a store of its own: `memd_client/connection/launcher.py`.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """With room for four jobs."""
    with running_daemon(host="384MiB", nvme="768MiB") as running:
        yield running


def run(
    daemon: Daemon,
    tmp_path: Path,
    name: str,
    *,
    world_size: int,
    killed: int | None = None,
    **environ: str,
) -> list[Any]:
    """What each rank prints; None of the one that is killed."""
    meeting = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"
    meeting.touch()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", PROGRAMS, name, daemon.address, str(meeting)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        answers = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    errors = "".join(f"rank {rank}:\n{written}" for rank, (_, written) in enumerate(answers))
    for rank, process in enumerate(processes):
        assert process.returncode == (-9 if rank == killed else 0), errors
    return [
        json.loads(output.splitlines()[-1]) if rank != killed else None
        for rank, (output, _) in enumerate(answers)
    ]


def of_torchrun(daemon: Daemon, name: str, **environ: str) -> list[Any]:
    """What each of two ranks prints that torchrun starts, and starts again once."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "-m", PROGRAMS, name, daemon.address, "-"],
        env={**os.environ, OWN_STORE: "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    printed = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted((each for each in printed if "error" not in each), key=lambda each: each["rank"])


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.more)], ids=lambda size: f"{size} ranks"
)
def test_losses_norms_and_values_have_the_bits_of_the_rule(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "bits", world_size=world_size)):
        assert found.pop("rank") == rank
        assert len(found) == 4
        assert not any(found.values()), found


@pytest.mark.more
def test_every_rank_sees_the_average_in_bfloat16_and_all_may_drop_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "gradients", world_size=3)):
        assert found == {"rank": rank, "equal": [True] * 8, "dropped": True, "step": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two ranks print whom nobody kills."""
    with running_daemon() as running:
        return run(running, tmp_path_factory.mktemp("undisturbed"), "train", world_size=2)


@pytest.mark.more
def test_a_killed_rank_is_named_to_all_and_the_job_goes_on_where_it_was(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    with running_daemon() as daemon:
        found = run(daemon, tmp_path, "train", world_size=2, killed=1, MEMD_DIE="1.3")
        assert "rank 1 of 2 (process" in found[0]["error"]
        assert "has ended" in found[0]["error"]
        again = run(daemon, tmp_path, "train", world_size=2)
    # Each rank's own generator goes on where it was.
    assert undisturbed[0]["losses"] != undisturbed[1]["losses"]
    assert again == [{**each, "first": 3, "losses": each["losses"][3:]} for each in undisturbed]


@pytest.mark.more
def test_ranks_whose_daemon_is_killed_are_told_where_the_job_is_and_go_on_from_there(
    tmp_path: Path, undisturbed: list[Any]
) -> None:
    with daemons() as made, ThreadPoolExecutor() as threads:
        daemon = made.start()
        ranks = threads.submit(run, daemon, tmp_path, "train", world_size=2, MEMD_KILL="3")
        daemon.process.wait(TIMEOUT_S)
        daemon = made.start()
        for found in ranks.result(TIMEOUT_S):
            assert "SessionFenced" in found["error"]
            assert "the job stands at committed step" in found["error"]
        again = run(daemon, tmp_path, "train", world_size=2)
    first = again[0]["first"]
    assert first in (2, 3)
    wanted = [{**each, "first": first, "losses": each["losses"][first:]} for each in undisturbed]
    assert again == wanted


@pytest.mark.more
def test_torchrun_starts_the_ranks_of_a_killed_one_again_and_they_go_on(
    undisturbed: list[Any],
) -> None:
    with running_daemon() as daemon:
        found = of_torchrun(daemon, "train", MEMD_DIE="0.2")
    assert found == [{**each, "first": 2, "losses": each["losses"][2:]} for each in undisturbed]


@pytest.mark.more
def test_a_rank_that_is_late_is_named_and_the_step_is_made_when_it_comes(
    daemon: Daemon, tmp_path: Path
) -> None:
    found = run(daemon, tmp_path, "late", world_size=2)
    assert [each["step"] for each in found] == [1, 1]
    step, backward = found[1]["found"]
    assert step.startswith("DeadlineExceeded")
    assert "rank 0 of 2 (process" in step
    assert "not closed its step in time" in step
    assert backward.startswith("DeadlineExceeded")
    assert "rank 0 of 2 (process" in backward


@pytest.mark.more
def test_ranks_whose_layers_have_other_orders_share_buffers_by_name_and_step_no_wrong_numbers(
    daemon: Daemon, tmp_path: Path
) -> None:
    words = {
        "clip": "InvalidArgument: all ranks clip gradients alike, and gradient 0 differs: ",
        "step": "orders of parameters (place 0) differ: shard ",
        "arguments": "InvalidArgument: all ranks clip gradients alike, and max_norm differs: ",
    }
    for found in run(daemon, tmp_path, "orders", world_size=2):
        assert found["buffers"] == {"first": [1.0] * 4, "second": [2.0] * 4}
        assert {name: found[name] for name in words if words[name] not in found[name]} == {}
        # Of 16 elements each: 2 rows of ones, and five times that.
        assert found["norm"] == pytest.approx(4 * (2**2 + 10**2) ** 0.5)
        assert found["committed"] == 1


@pytest.mark.more
def test_what_ranks_may_not_do_is_one_sentence_on_each(daemon: Daemon, tmp_path: Path) -> None:
    words = {
        "embedded": "InvalidArgument: an embedded: daemon is private",
        "settings": "InvalidArgument: all ranks connect alike, and job differs",
        "world": "NotYet: in this version all ranks of the default process group",
        "models": "InvalidArgument: all ranks offload alike, and 'weight' differs",
        "init": "NotYet: init() with several ranks",
        "resident": "NotYet: job 'refused': parameters that are not offloaded",
        "wrapped": "InvalidArgument: Linear is offloaded by several ranks",
        "early": "NotYet: step_in_backward=True with several ranks",
        "second": "InvalidArgument: job 'refused': a second gradient of",
        "grad": "NotYet: an operation on p.grad changes the gradient of 'weight'",
        "assigned": "NotYet: p.grad = ... changes the gradient",
        "dropped": "NotYet: p.grad = None changes the gradient",
        "scaler": "NotYet: a GradScaler with several ranks",
        "rates": "values of lr differ: 0.1 on rank 0, 0.2 on rank 1 of 2",
        "step": "1",
        "store": f"{OWN_STORE}=1",
    }
    torchrun: dict[str, Any] = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "1",
    }
    for rank, found in enumerate(run(daemon, tmp_path, "refusals", world_size=2, **torchrun)):
        assert {name: found[name] for name in words if words[name] not in found[name]} == {}
        if rank:
            assert "rank 1 cannot write 'weight'" in found["write"]
