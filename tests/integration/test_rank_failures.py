"""A call of one rank fails or comes late: the others are told, and all go on together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import running_daemon
from tests.integration.rank_runs import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Found = Callable[[str], list[dict[str, Any]]]


def found_by(folder: Path, programs: str) -> Found:
    """What each of two ranks has found in a program. All run in one start."""
    with running_daemon() as daemon:
        module = "tests.integration.rank_failures"
        of_ranks = run(daemon, folder, programs, world_size=2, programs=module)
    return lambda name: [each[name] for each in of_ranks]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by(tmp_path_factory.mktemp("ranks"), "all")


@pytest.fixture(scope="module")
def found_late(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """As `found`, where ranks wait until they give up."""
    return found_by(tmp_path_factory.mktemp("late"), "late")


def refuse_missing(found: dict[str, Any], words: dict[str, str]) -> None:
    """Each error has its words."""
    assert {name: found[name] for name in words if words[name] not in found[name]} == {}


def test_where_one_rank_raises_between_exchanges_all_raise_and_go_on(found: Found) -> None:
    first, second = found("one_raises")
    left = "the tensor that was assigned to the gradient of 'weight' has changed"
    void = "the gradients of this step are void, since ranks have begun to"
    could_not = "MemdError: rank 1 of 2 could not"
    refuse_missing(
        first,
        {
            "clip": f"{could_not} clip gradients: {left}",
            "unscale": f"{could_not} unscale gradients: {left}",
            "shape": "MemdError: p.grad = ... has changed the gradient of 'weight' on no rank",
            "norm": f"{could_not} clip gradients: no room",
            "scale": f"{could_not} clip gradients: no room",
            "divide": f"{could_not} unscale gradients: no room",
            "follow clip": f"{could_not} clip gradients: no room",
            "follow unscale": f"{could_not} unscale gradients: no room",
        },
    )
    refuse_missing(
        second,
        {
            "clip": f"InvalidArgument: {left}",
            "unscale": f"InvalidArgument: {left}",
            "shape": "InvalidArgument: the gradient of 'weight' has another shape",
            "norm": "CapacityError: no room",
            "scale": "CapacityError: no room",
            "divide": "CapacityError: no room",
            "follow clip": "CapacityError: no room",
            "follow unscale": "CapacityError: no room",
        },
    )
    for each in (first, second):
        assert each["unchanged"] == str([[[2.0] * 4] * 4, [2.0] * 4])
        refuse_missing(
            each,
            {
                "write": "no room",
                "read after scale": f"{void} clip gradients",
                "clip after scale": f"{void} clip gradients",
                "step after scale": f"{void} clip gradients",
                "backward after scale": f"{void} clip gradients",
                "step after divide": f"{void} unscale gradients",
                "step after write": f"{void} change gradients",
                "step after follow clip": f"{void} clip gradients",
                "step after follow unscale": f"{void} unscale gradients",
                "kept after write": "the gradient of 'bias' was no average of all ranks",
            },
        )
        assert each["step"] == 1


def test_where_one_rank_raises_over_tiles_all_raise_and_go_on(found: Found) -> None:
    first, second = found("one_raises_in_tiles")
    refuse_missing(
        first,
        {
            "shape": "on no rank: rank 1 of 2 could not: the gradient of 'weight' has another",
            "operation": "on no rank: rank 1 of 2 could not: RuntimeError: The size of tensor",
            "clip": "MemdError: rank 1 of 2 could not clip gradients: job 'failures': parameter",
        },
    )
    refuse_missing(
        second,
        {
            "shape": "InvalidArgument: the gradient of 'weight' has another shape",
            "operation": "RuntimeError: The size of tensor",
            "clip": "MemdError: job 'failures': parameter 'weight' is tiled",
        },
    )
    assert [each["unchanged"] for each in (first, second)] == ["True", "True"]
    assert [each["step"] for each in (first, second)] == [1, 1]


@pytest.mark.more
def test_a_drop_of_gradients_for_which_a_rank_is_late_is_made_when_it_comes(
    found_late: Found,
) -> None:
    first, second = found_late("late_drop")
    for name in ("late", "late again"):
        assert first[name].startswith("DeadlineExceeded: ")
        assert "rank 1 of 2 (process" in first[name]
        assert "not dropped its gradients in time" in first[name]
    assert first["again"] == "no error"
    assert (first["step"], second["step"]) == (1, 1)


@pytest.mark.more
def test_a_rank_that_drops_what_another_ends_late_is_told_and_all_begin_anew(
    found_late: Found,
) -> None:
    ranks = found_late("late_end")
    assert "not ended its gradients in time" in ranks[0]["late"]
    for each in ranks:
        assert "InvalidArgument: all ranks make the same calls in the same order" in each["apart"]
        assert each["zero_grad"] == "no error"
        assert each["step"] == 1


def test_after_ranks_differed_every_optimizer_has_dropped_all_gradients(found: Found) -> None:
    for each in found("two_optimizers"):
        for name in ("apart", "apart again"):
            assert "ranks accumulate the same number of backwards" in each[name]
        assert [each[name] for name in ("first", "second", "module")] == ["no error"] * 3
        assert each["step"] == 2


def test_a_scaler_divides_each_gradient_once_whose_ever_it_is(found: Found) -> None:
    for rank, each in enumerate(found("unscaled")):
        value = 2.0 * (1 + rank)  # of two rows
        assert each["own"] == [[[value] * 4] * 4, [value] * 4]
        assert each["assigned"] == [[[2.0] * 4] * 4, [2.0] * 4]
        assert each["left"] == "no error"
        assert each["step"] == 2  # one was skipped


def test_what_is_refused_before_gradients_change_leaves_them_to_all_ranks(found: Found) -> None:
    first, second = found("refused_unchanged")
    assert first["check"] == "MemdError: rank 1 of 2 could not unscale gradients: no room"
    assert second["check"] == "CapacityError: no room"
    for each in (first, second):
        refuse_missing(
            each,
            {
                "infinite": "RuntimeError: the norm of order 2.0 of the gradients is not finite",
                "apart": "all ranks clip gradients alike, and max_norm differs",
                "torch": "RuntimeError: The total norm of order 2.0 for gradients",
            },
        )
        assert (each["unchanged"], each["finite"]) == ("True", "no error")
        assert each["step"] == 1


def test_a_scaled_step_that_ranks_refuse_has_divided_no_gradient(found: Found) -> None:
    for each in found("unscaled_apart"):
        assert "the gradient of 'bias' is another one on rank" in each["apart"]
        assert each["gradients"] == [[[1.0] * 4] * 2, [1.0] * 2]
        assert each["step"] == 1


def test_a_second_backward_of_other_parameters_is_not_called_a_second_gradient(
    found: Found,
) -> None:
    for each in found("second_backward"):
        refuse_missing(
            each,
            {
                "other": "in this step comes after a backward has ended them",
                "assigned": "in this step comes after a use of them has ended them",
                "same": "a second gradient of",
            },
        )
        assert each["step"] == 1


def test_models_with_the_hook_and_offloaded_ones_average_what_comes_in_one_backward(
    found: Found,
) -> None:
    for each in found("hooked"):
        assert each["differences"] == []
        assert "reduce_hook() in session.no_sync(), which is for offloaded" in each["alone"]
        assert each["step"] == 3


def test_the_hook_of_a_static_graph_is_refused_where_it_would_wait_for_ever(found: Found) -> None:
    for each in found("static_graph"):
        assert "DistributedDataParallel(static_graph=True) gives those of its" in each["static"]
        assert each["step"] == 1


def test_one_rank_may_read_the_gradients_that_a_step_has_left(found: Found) -> None:
    first, second = found("logged")
    assert first["skipped"] == [[[float("inf")] * 4] * 4, [float("inf")] * 4]
    assert first["refused"] == [[[2.0] * 4] * 4, [2.0] * 4]
    for each in (first, second):
        assert (each["zero_grad"], each["clip"]) == ("no error", "no error")
        assert "values of lr differ" in each["rates"]
        assert each["step"] == 2  # one was skipped


def test_what_the_first_rank_alone_tracks_returns_without_a_warning(found: Found) -> None:
    first, second = found("tracked_by_one")
    assert (first["step"], second["step"]) == (1, 1)
    assert (first["count"], second["count"]) == (1, 0)
    assert first["warned"] == second["warned"] == []


def test_a_rank_whose_answer_was_lost_makes_the_step_again_alone(found: Found) -> None:
    first, second = found("repeated")
    assert first["lost"] == "no error"
    assert "it is not known whether it is committed" in second["lost"]
    assert second["again"] == "no error"
    assert (first["step"], second["step"]) == (2, 2)
    assert first["values"] == second["values"]


def test_what_one_rank_fails_in_before_its_step_is_sent_it_makes_again(found: Found) -> None:
    first, second = found("unsent")
    assert first["staged"].startswith("CapacityError: no room for ")
    assert second["refused"] == second["scaled"] == "InvalidArgument: refused here"
    assert second["staged"] == first["refused"] == first["scaled"] == "no error"
    for each in (first, second):
        assert int(each["kept"]) > 0  # gradients that it reads alone
        assert each["differences"] == "[]"
        assert each["step"] == 3


def test_what_one_rank_fails_in_after_ranks_have_compared_it_makes_again(found: Found) -> None:
    first, second = found("unsent_apart")
    assert second["refused"] == second["scaled"] == "InvalidArgument: refused here"
    for each in (first, second):
        assert each["values"] == each["wanted"]
        assert each["step"] == 2


def test_a_rank_that_cannot_keep_what_it_holds_makes_the_step_again(found: Found) -> None:
    first, second = found("held")
    assert first["gradient"] == "no error"
    assert second["gradient"] == "CapacityError: no room"
    assert second["still"]
    for each in (first, second):
        assert each["kept"]
        assert each["step"] == 1


def test_a_gradient_that_one_rank_cannot_drop_keeps_no_other_and_is_dropped_later(
    found: Found,
) -> None:
    first, second = found("undropped")
    assert second["held"] == "MemdError: still held"
    assert second["left"] == "1"
    assert (first["step"], second["step"]) == (1, 1)


def test_buffers_of_any_dtype_are_the_first_ranks_and_a_checkpoint_keeps_its_own(
    found: Found,
) -> None:
    for rank, each in enumerate(found("buffered")):
        assert each["int16"] == each["complex64"] == each["float8_e4m3fn"] == [0.0, 1.0, 2.0]
        assert each["bool"] == [0.0, 1.0, 1.0]
        assert each["transposed"] == [[0.0] * 3] * 2
        assert each["empty"] == []
        assert each["count"] == 1 + rank
        # Rank 0's was 1; then a forward, and another in backward.
        assert each["count after checkpoint"] == 1 + 2 * (1 + rank)
        assert each["step"] == 2


def test_all_ranks_load_a_state_of_the_optimizer_together_and_have_the_bits_of_torch(
    found: Found,
) -> None:
    first, second = found("loaded_states")
    for each in (first, second):
        assert each["differences"] == []
        assert each["held"]
        assert "all ranks load an optimizer's state alike, and the step of" in each["apart"]
        assert each["step"] == 7
    assert first["counts"] == second["counts"] == [2] * len(first["counts"])
    assert set(first["reset"]) == {0}


def test_a_sparse_gradient_of_ranks_is_refused_in_a_sentence(found: Found) -> None:
    for each in found("sparse"):
        assert "the gradient of 'weight' is sparse; memd takes dense gradients" in each["step"]


def test_a_connect_that_fails_on_one_rank_fails_on_all_and_leaves_no_group(found: Found) -> None:
    first, second = found("unconnected")
    refuse_missing(
        first, {"absent": "DaemonUnavailable: ", "one": "InvalidArgument: ", "job": "name"}
    )
    refuse_missing(
        second,
        {
            "absent": "MemdError: rank 0 of 2 could not connect: ",
            "one": "MemdError: rank 0 of 2 could not connect: ",
            "job": "MemdError: rank 0 of 2 could not connect: a job needs a name",
        },
    )
    assert [(each["groups"], each["step"]) for each in (first, second)] == [(0, 0)] * 2
