"""Several ranks of a job on one node: one copy of its state, and the sums of all of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.daemons import daemons, running_daemon
from tests.integration.rank_runs import PROGRAMS, TIMEOUT_S, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

# A start of torchrun's ranks meets in a store of its own: `memd_client/connection/launcher.py`.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """With room for four jobs."""
    with running_daemon(host="384MiB", nvme="768MiB") as running:
        yield running


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
        assert len(found) == 6
        assert not any(found.values()), found


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.soak)], ids=lambda size: f"{size} ranks"
)
def test_accumulated_gradients_have_the_bits_of_the_rule(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "accumulation", world_size=world_size)):
        assert found.pop("rank") == rank
        assert len(found) == 6
        assert not any(found.values()), found


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.soak)], ids=lambda size: f"{size} ranks"
)
def test_gradients_that_the_program_changes_on_all_ranks_have_the_bits_of_the_rule(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "changes", world_size=world_size)):
        assert found.pop("rank") == rank
        assert len(found) == 4
        assert not any(found.values()), found


@pytest.mark.more
@pytest.mark.parametrize("world_size", [2, 4], ids=lambda size: f"{size} ranks")
def test_models_that_stay_with_their_ranks_have_the_bits_of_torch_with_one_state(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "resident", world_size=world_size)):
        assert found.pop("rank") == rank
        assert len(found) == 6
        assert not any(found.values()), found


@pytest.mark.more
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.soak)], ids=lambda size: f"{size} ranks"
)
def test_gradients_that_the_communication_hook_sums_in_memd_have_the_bits_of_the_rule(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "reduced", world_size=world_size)):
        assert found.pop("rank") == rank
        assert len(found) == 6
        assert not any(found.values()), found


@pytest.mark.more
def test_ranks_whose_own_models_differ_are_told_and_can_go_on(
    daemon: Daemon, tmp_path: Path
) -> None:
    ranks = run(daemon, tmp_path, "apart", world_size=2)
    for found in ranks:
        assert "all ranks make an optimizer alike, and weight differs" in found["shapes"]
        assert "the gradient of 'weight' is another one on rank" in found["gradients"]
        assert "wrap their model in DistributedDataParallel" in found["gradients"]
        assert "the value of 'weight' is another one on rank" in found["values"]
        assert "steps with gradients of other parameters" in found["others"]
        assert "steps with gradients of other parameters" in found["none"]
        assert "reduce_hook() has a gradient of shape [3, 4] of a" in found["unknown"]
        assert found["step"] == 1
        assert found["first"] == ranks[0]["first"]
        assert found["values after"] == ranks[0]["values after"]


@pytest.mark.more
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.soak)], ids=lambda size: f"{size} ranks"
)
def test_models_that_ranks_build_in_memd_begin_with_the_first_ones_values(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "built", world_size=world_size)):
        assert found.pop("rank") == rank
        names = ("Tied", "Tied again", "Branching", "Branching again")
        assert found == {name: [] for name in names}


@pytest.mark.more
def test_a_rank_that_builds_something_else_is_named_to_all_and_they_can_build_again(
    daemon: Daemon, tmp_path: Path
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "broken", world_size=2)):
        assert found["step"] == 1
        assert found["left"] == []
        failed = "RuntimeError" if rank else "rank 1 of 2 has left init() by an exception"
        assert failed in found["failed"]
        assert "all ranks leave init() alike, and the number of models differs" in found["others"]
        assert "all ranks offload alike, and 'weight' differs" in found["shapes"]


@pytest.mark.more
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.soak)], ids=lambda size: f"{size} ranks"
)
def test_a_scaler_skips_on_all_ranks_what_one_has_found_infinite_and_has_the_bits_of_torch(
    daemon: Daemon, tmp_path: Path, world_size: int
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "scaler", world_size=world_size)):
        assert found == {"rank": rank, "None": [], "0.05": []}


@pytest.mark.more
def test_what_ranks_accumulate_is_spilled_where_the_quota_of_memory_does_not_hold_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    for rank, found in enumerate(run(daemon, tmp_path, "spilled", world_size=2)):
        assert found == {"rank": rank, "equal": [True] * 3, "step": 2}
        text = daemon.get("/metrics")
    spilled = re.search(r'memd_spilled_bytes_total\{[^}]*job="spilled"[^}]*\} (\S+)', text)
    assert spilled, text
    # More than the gradients of one rank.
    assert float(spilled[1]) > 16 << 20


@pytest.mark.more
def test_ranks_that_accumulate_differently_are_all_told_and_can_go_on(
    daemon: Daemon, tmp_path: Path
) -> None:
    # A backward adds 2 * (1 + rank) to each element, and two are accumulated.
    for rank, found in enumerate(run(daemon, tmp_path, "counts", world_size=2)):
        assert found["own"] == [[4.0 * (1 + rank)] * 4] * 4
        assert found["kept"]
        assert "somebody holds the tensor that was assigned" in found["held"]
        # Rank 0 doubled its sum, rank 1 tripled it, and a backward followed: (8 + 2 + 24 + 4) / 2.
        assert found["averaged"] == [[19.0] * 4] * 4
        assert "a second gradient of" in found["again"]
        assert "in no_sync(), and rank 1 of 2 (process" in found["other count"]
        assert "has made 1 in no_sync()" in found["other count"]
        assert "every backward since the last step ran in no_sync()" in found["never averaged"]
        assert "in no_sync(), and rank 1 of 2 (process" in found["one never averages"]
        assert "a backward ran in session.no_sync(), and its forward" in found["forward outside"]
        assert "a forward ran in session.no_sync(), and its backward" in found["backward outside"]
        # (2 * 2 + 4) / 2, and 2 and 1 rows for the bias: (2 * 2 + 2) / 2.
        assert found["norm"] == pytest.approx((16 * 4.0**2 + 4 * 3.0**2) ** 0.5)
        assert found["step"] == 2


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


ACCUMULATING: dict[str, Any] = {"MEMD_MICRO": "3"}


@pytest.fixture(scope="module")
def undisturbed_accumulating(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with running_daemon() as running:
        folder = tmp_path_factory.mktemp("accumulating")
        return run(running, folder, "train", world_size=2, **ACCUMULATING)


def stored_by(names: list[str]) -> set[int]:
    """The ranks of which the job stores tracked objects."""
    return {
        int(found[1]) if (found := re.match(r"memd\.tracked\.rank(\d+)\.", name)) else 0
        for name in names
    }


@pytest.mark.more
def test_other_numbers_of_ranks_go_on_with_all_that_is_not_each_ranks_own(
    daemon: Daemon, tmp_path: Path
) -> None:
    before: list[Any] = []
    for starts, world_size in enumerate((1, 2, 3, 1)):
        ranks = run(daemon, tmp_path, "elastic", world_size=world_size)
        for rank, found in enumerate(ranks):
            assert found["first"] == 2 * starts
            # The rate after each commit: what the scheduler says, and what the optimizer has.
            assert found["rates"] == pytest.approx([1e-2 * 0.1 ** (2 * starts)] * 2)
            assert {each["left"] for each in ranks} == {found["left"]}
            # Ranks that are gone take nothing of the job's quotas.
            assert stored_by(found["stored"]) == set(range(world_size))
            if not before:
                assert found["seen"] == [100, 0, True]
                continue
            # If one rank made the commit, nobody knows what is a rank's own. Of several, the first
            # has the log for all.
            own = "'epoch', 'samples'" if len(before) == 1 else "'samples'"
            if not rank and len(before) == 1:
                own = "'epoch', 'log', 'samples'"
            (warned,) = found["warned"]
            if rank < len(before):
                assert found["sum"] == before[0]["left"]
                assert found["seen"][0] == before[rank]["seen"][0] + 2
                assert found["drawn"] == before[rank]["next"]
                assert f"rank {rank} restores {own} as one of {len(before)}; set" in warned
            else:
                assert found["sum"] == before[0]["left"]
                epoch = 0 if len(before) == 1 else 2 * starts
                assert found["seen"] == [100 * (rank + 1), epoch, True]
                assert f"rank {rank} of {world_size} has no state there of {own}, ran" in warned
        before = ranks


@pytest.mark.more
@pytest.mark.parametrize("place", ["first", "backward", "sum"])
def test_a_rank_killed_while_it_accumulates_is_named_and_the_job_goes_on_where_it_was(
    tmp_path: Path, undisturbed_accumulating: list[Any], place: str
) -> None:
    with running_daemon() as daemon:
        dying: dict[str, Any] = {"MEMD_DIE": "1.3", "MEMD_PLACE": place, **ACCUMULATING}
        found = run(daemon, tmp_path, "train", world_size=2, killed=1, **dying)
        assert "rank 1 of 2 (process" in found[0]["error"]
        assert "has ended" in found[0]["error"]
        again = run(daemon, tmp_path, "train", world_size=2, **ACCUMULATING)
    wanted = [
        {**each, "first": 3, "losses": each["losses"][3:]} for each in undisturbed_accumulating
    ]
    assert again == wanted


@pytest.mark.more
@pytest.mark.parametrize("micro", ["1", "3"])
def test_ranks_whose_daemon_is_killed_are_told_where_the_job_is_and_go_on_from_there(
    tmp_path: Path, request: pytest.FixtureRequest, micro: str
) -> None:
    undisturbed: list[Any] = request.getfixturevalue(
        "undisturbed" if micro == "1" else "undisturbed_accumulating"
    )
    with daemons() as made, ThreadPoolExecutor() as threads:
        daemon = made.start()
        killing: dict[str, Any] = {"MEMD_KILL": "3", "MEMD_MICRO": micro}
        ranks = threads.submit(run, daemon, tmp_path, "train", world_size=2, **killing)
        daemon.process.wait(TIMEOUT_S)
        daemon = made.start()
        for found in ranks.result(TIMEOUT_S):
            assert "SessionFenced" in found["error"]
            assert "the job stands at committed step" in found["error"]
        again = run(daemon, tmp_path, "train", world_size=2, MEMD_MICRO=micro)
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


def test_the_first_rank_loads_while_the_others_wait(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    values = torch.arange(16.0).view(4, 4)
    save_file({"weight": values, "shift": torch.zeros(4)}, file)
    first, second = run(daemon, tmp_path, "loads", world_size=2, MEMD_FILE=str(file))
    assert first["loaded"] == second["loaded"] == values.flatten().tolist()
    assert first["steps"] == second["steps"] == [1, 2]
    assert first["values"] == second["values"]
    assert first["values"] != first["loaded"]


@pytest.mark.more
def test_what_ranks_may_not_do_is_one_sentence_on_each(daemon: Daemon, tmp_path: Path) -> None:
    words = {
        "embedded": "InvalidArgument: an embedded: daemon is private",
        "settings": "InvalidArgument: all ranks connect alike, and job differs",
        "world": "NotYet: in this version all ranks of a process group train a job",
        "models": "InvalidArgument: all ranks offload alike, and 'weight' differs",
        "wrapped": "InvalidArgument: Linear is offloaded by several ranks",
        "early": "NotYet: step_in_backward=True with several ranks",
        "second": "InvalidArgument: job 'refused': a second gradient of",
        "grad": "InvalidArgument: an operation on p.grad makes another gradient of 'weight'",
        "assigned": "InvalidArgument: p.grad = ... makes another gradient of 'weight' on rank",
        "dropped": "InvalidArgument: all ranks change gradients alike and in the same order",
        "other": "changes that of",
        "memory": "NotYet: the memory of p.grad itself may change the gradient of 'weight'",
        "shared": "NotYet: another gradient in memd that is assigned may change the gradient",
        "zeros": "NotYet: zero_grad(set_to_none=False) may change the gradient of",
        "same": "True",
        "left": "InvalidArgument: the tensor that was assigned to the gradient of 'weight' has",
        "scaler": "InvalidArgument: all ranks unscale gradients alike, and the scale differs",
        "scaled step": "InvalidArgument: all ranks step under a GradScaler alike, and the scale",
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
            assert "'weight' on no rank: rank 0 of 2 could not: Runt" in found["failed"]
        else:
            assert "RuntimeError: The size of tensor" in found["failed"]
