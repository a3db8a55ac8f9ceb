"""Ranks whose model `fully_shard` has cut: one state in memd, under full names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import running_daemon
from tests.integration.rank_fsdp import CELLS, DYING, PAIRINGS, cells
from tests.integration.rank_programs import STEPS
from tests.integration.rank_runs import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Found = Callable[[str], list[dict[str, Any]]]

MODULE = "tests.integration.rank_fsdp"
_SHORT = ("in backward", "in exchange", "in commit")
pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Findings of each of two ranks in a program, and of one that goes on with their job. All run
    in one start."""
    folder = tmp_path_factory.mktemp("shards")
    environ: dict[str, Any] = {"MEMD_FOLDER": str(folder)}
    with running_daemon(host="384MiB", nvme="768MiB") as daemon:
        of_ranks = run(daemon, folder, "all", world_size=2, programs=MODULE, **environ)
        (alone,) = run(daemon, folder, "elastic", world_size=1, programs=MODULE, **environ)
    return lambda name: [alone] if name == "elastic" else [each[name] for each in of_ranks]


def test_losses_norms_and_values_have_the_bits_of_torch(found: Found) -> None:
    for each in found("bits"):
        assert each == {name: [] for name in CELLS}


@pytest.mark.soak
def test_four_ranks_have_the_bits_of_torch_too(tmp_path: Path) -> None:
    with running_daemon(host="384MiB", nvme="768MiB") as daemon:
        for each in run(daemon, tmp_path, "bits", world_size=4, programs=MODULE):
            del each["rank"]
            assert each == {name: [] for name in cells(4)}


def test_files_and_states_have_whole_parameters_and_any_number_of_ranks_goes_on(
    found: Found,
) -> None:
    (alone,) = found("elastic")
    for each in found("saved"):
        assert (each["file"], each["state"], each["first"], each["last"]) == ([], [], [], [])
        assert alone["sum"] == each["sum"]
    assert (alone["step"], alone["counts"], alone["after"]) == (STEPS, [STEPS], STEPS + 1)


def test_between_a_step_and_its_commit_no_module_gathers_old_values(found: Found) -> None:
    for each in found("committed"):
        assert "its use has to wait for its update: call session.commit()" in each["forward"]
        assert "its use has to wait for its update: call session.commit()" in each["read"]
        assert [each[f"step {step}"] for step in range(3)] == [True] * 3
        assert (each["values"], each["step"]) == ([], 3)


def test_ignored_parameters_are_right_if_the_program_averages_them(found: Found) -> None:
    for each in found("ignored"):
        assert each["values"] == []
        assert "torch has no norm of gradients of which some are shards" in each["clip"]
        assert "is another one on rank" in each["apart"]
        assert each["step"] == STEPS


def test_layers_of_several_dtypes_have_the_bits_of_torch(found: Found) -> None:
    for each in found("dtypes"):
        assert each["differences"] == []
        assert "memd updates dense parameters of float32 and bfloat16" in each["frozen"]
        assert each["together"].startswith("AssertionError: FSDP expects uniform original")
        assert each["step"] == STEPS


def test_offloaded_modules_beside_sharded_ones_have_the_bits_of_torch(found: Found) -> None:
    for each in found("beside"):
        assert each == {name: [] for name in PAIRINGS}


def test_modules_offloaded_and_sharded_at_once_are_refused_in_a_sentence(found: Found) -> None:
    words = {
        "sharded": "is a DTensor, as fully_shard() makes them, and offload() takes whole",
        "in part": "is a DTensor, as fully_shard() makes them, and offload() takes whole",
        "offloaded": "A module is offloaded or sharded, not both",
        "clip": "give them to two optimizers, and clip each",
    }
    for each in found("mixed_up"):
        assert {name: each[name] for name in words if words[name] not in each[name]} == {}
        assert each["step"] == 1


def test_what_memd_does_not_take_is_one_sentence_on_each_rank(found: Found) -> None:
    words = {
        "offloaded": "NotYet: memd updates plain tensors and the shards of fully_shard() in this",
        "uneven": "InvalidArgument: fully_shard() cuts parameter 'bias' of shape [10] after 5",
        "columns": "its shards are no ranges of it",
        "replicated": "is sharded over a mesh of ranks [[0, 1]]",
        "by hand": "a DTensor that fully_shard() has not made",
        "whole": "a DTensor that fully_shard() has not made",
        "unknown": "no optimizer of memd has it whole",
        "changed": "'first.weight' was changed after the last step, and memd has the value that",
        "moments": "is a DTensor, of which this process may have a part",
        "checkpoint": "has a shard of 'first.weight', and a checkpoint of one process would have",
        "load": "is in shards of fully_shard(), which a load does not reach in this version",
    }
    for each in found("refused"):
        assert {name: each[name] for name in words if words[name] not in each[name]} == {}
        assert each["step"] == 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The output of three ranks that nobody kills."""
    with running_daemon() as daemon:
        folder = tmp_path_factory.mktemp("undisturbed")
        return run(daemon, folder, "killed", world_size=3, programs=MODULE)


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=() if place in _SHORT else pytest.mark.soak) for place in DYING],
)
def test_a_killed_rank_is_named_to_all_and_the_job_goes_on_with_the_same_bits(
    tmp_path: Path, undisturbed: list[Any], place: str
) -> None:
    with running_daemon() as daemon:
        killing: dict[str, Any] = {"MEMD_DIE": "1.3", "MEMD_PLACE": place}
        found = run(daemon, tmp_path, "killed", world_size=3, killed=1, programs=MODULE, **killing)
        for rank in (0, 2):
            assert found[rank]["error"].startswith("SessionFenced: ")
            assert "rank 1 of 3 (process" in found[rank]["error"]
            assert "has ended" in found[rank]["error"]
        again = run(daemon, tmp_path, "killed", world_size=3, programs=MODULE)
    # The daemon may have had all three steps before it saw that the rank was gone.
    steps = {4} if place == "in commit" else {3}
    first = again[0]["first"]
    assert first in steps | {3}
    wanted = [{**each, "first": first, "losses": each["losses"][first:]} for each in undisturbed]
    assert again == wanted
