"""Jobs of a part of the ranks: those that a process group or a dimension of a mesh has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import running_daemon
from tests.integration.rank_runs import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

MODULE = "tests.integration.rank_groups"


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """With room for a few jobs."""
    with running_daemon(host="256MiB", nvme="512MiB") as running:
        yield running


def found_by(daemon: Daemon, folder: Path, name: str) -> list[Any]:
    """The findings of four ranks, by rank."""
    return run(daemon, folder, name, world_size=4, programs=MODULE)


@pytest.mark.more
def test_jobs_of_data_parallel_ranks_have_the_bits_of_torch(daemon: Daemon, tmp_path: Path) -> None:
    cells = [
        f"{kind} {model}"
        for kind in ("offloaded", "resident", "shards")
        for model in ("Tied", "Adapted")
    ]
    for rank, found in enumerate(found_by(daemon, tmp_path, "bits")):
        assert found == {"rank": rank, **{cell: [] for cell in cells}}


@pytest.mark.more
def test_a_mesh_of_all_ranks_is_as_the_default_process_group(
    daemon: Daemon, tmp_path: Path
) -> None:
    for rank, found in enumerate(found_by(daemon, tmp_path, "whole")):
        # The average of two rows each: 2 * (1 + 2 + 3 + 4) / 4.
        assert found == {"rank": rank, "gradient": [[5.0] * 4] * 4, "step": 1}


def test_what_no_process_group_of_a_job_can_be_is_one_sentence_on_each_rank(
    daemon: Daemon, tmp_path: Path
) -> None:
    words = {
        "two dimensions": 'pass that of the data-parallel ranks, such as mesh["dp"]',
        "no names": "process_group is a mesh of shape [2, 2], and gradients are averaged over one",
        "kind": "process_group is a group of torch.distributed, or a DeviceMesh of one dimension",
        "place": "in this version all ranks of a process group train a job",
        "of another": "and the session ranks [",
        "sharded over another": "the same one-dimensional mesh",
        "part": "and the session ranks [0, 1, 2, 3], which average gradients; pass it to connect()",
    }
    others = {
        "mesh of others": "process_group is a mesh of ranks [0, 1], and this is rank",
        "group of others": "process_group has other ranks than",
    }
    for rank, found in enumerate(found_by(daemon, tmp_path, "refused")):
        wanted = {**words, **others} if rank > 1 else words
        assert {name: found[name] for name in wanted if wanted[name] not in found[name]} == {}
        assert found["step"] == 0


@pytest.mark.more
def test_of_two_groups_that_ask_for_one_job_the_second_is_told_to_take_another_name(
    daemon: Daemon, tmp_path: Path
) -> None:
    errors = [found["error"] for found in found_by(daemon, tmp_path, "twice")]
    # The ranks of a group: 0 and 2, 1 and 3.
    assert errors[:2].count("no error") == errors[2:].count("no error") == 1
    assert (errors[0] == "no error") == (errors[2] == "no error")
    for error in errors:
        assert error == "no error" or "each process group trains a job of another name" in error
