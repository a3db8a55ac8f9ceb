"""`optimizer.load_state_dict()` and `dcp.load` replace all moments of a job, or none."""

from __future__ import annotations

import copy
import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import memd_client
from memd_client.core.old_state import OldState
from memd_client.core.tensor_streams import TensorStreams
from memd_client.transaction import loaded_moments
from memd_client.transaction.moments import ordinary_moments
from memd_client.updates import loaded_states
from tests.daemons import fresh
from tests.integration.noted_reads import NotedReads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from memd_client.core.tensor_streams import MomentPart
    from tests.daemons import Daemon

MAXIMUM = "max_exp_avg_sq"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model_of(seed: int) -> nn.Sequential:
    """Three parameters in a common bucket, and one of three tiles, of which one is not full."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 48), nn.Linear(48, 64, bias=False), nn.Linear(600, 1000, bias=False)
    )


def shapes() -> list[torch.Size]:
    return [parameter.shape for parameter in model_of(0).parameters()]


def state_with(groups: Any, *, seed: int = 1, amsgrad: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    names = ["exp_avg", "exp_avg_sq", *[MAXIMUM] * amsgrad]
    states = {
        index: {
            "step": torch.tensor(float(seed + 10)),
            **{name: torch.rand(shape, generator=generator) for name in names},
        }
        for index, shape in enumerate(shapes())
    }
    groups = copy.deepcopy(groups)
    groups[0]["lr"] = 0.25
    return {"state": states, "param_groups": groups}


def bits(state: dict[str, Any]) -> dict[int, dict[str, bytes]]:
    return {
        index: {name: value.clone().numpy().tobytes() for name, value in each.items()}
        for index, each in state["state"].items()
    }


def train(model: nn.Sequential, optimizer: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()


def trained(session: memd_client.Session, **settings: Any) -> tuple[nn.Sequential, Any]:
    model = memd_client.offload(model_of(0), session)
    optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, **settings)
    train(model, optimizer, 0)
    return model, optimizer


def staged(session: memd_client.Session) -> list[str]:
    names = [shard.spec.name for shard in session.transaction.job.shards.list_all()]
    return [name for name in names if name.startswith("@load/")]


def change_last(name: str, value: Callable[[torch.Tensor], Any]) -> Any:
    def harm(state: dict[str, Any]) -> None:
        last = state["state"][max(state["state"])]
        last[name] = value(last[name])

    return harm


HARM = {
    "shape": (change_last("exp_avg_sq", lambda value: value[:-1]), "exp_avg_sq .*another shape"),
    "int": (change_last("exp_avg_sq", lambda value: value.int()), "exp_avg_sq .*floating-point"),
    "sparse": (change_last("exp_avg_sq", lambda value: value.to_sparse()), "exp_avg_sq .*dense"),
    "list": (change_last("exp_avg", lambda value: value.tolist()), "exp_avg .*no tensor: list"),
    "half": (change_last("step", lambda _: torch.tensor(0.5)), "'step' .*counts no updates"),
    "nan": (change_last("step", lambda _: torch.tensor(torch.nan)), "'step' .*counts no updates"),
    "negative": (change_last("step", lambda _: -1), "'step' .*counts no updates"),
    "text": (change_last("step", lambda _: "many"), "'step' .*counts no updates"),
}


@pytest.mark.parametrize(("harm", "message"), HARM.values(), ids=HARM)
def test_what_the_last_parameter_cannot_have_changes_nothing(
    daemon: Daemon, harm: Callable[[dict[str, Any]], None], message: str
) -> None:
    with fresh(daemon, "state-harm") as session:
        model, optimizer = trained(session)
        before = bits(optimizer.state_dict())
        state = state_with(optimizer.state_dict()["param_groups"])
        harm(state)
        with pytest.raises(memd_client.InvalidArgument, match=message):
            optimizer.load_state_dict(state)
        assert bits(optimizer.state_dict()) == before
        assert optimizer.param_groups[0]["lr"] == 1e-3
        train(model, optimizer, 1)


def test_a_state_that_ends_while_it_is_read_changes_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of another session whose daemon is gone. What was read is in memd already."""
    read: list[Any] = []

    def failing(state: dict[str, Any]) -> Any:
        read.append(state)
        if len(read) == 4:
            raise memd_client.DaemonUnavailable("it is gone")
        return ordinary_moments(state)

    with fresh(daemon, "state-ends") as session:
        model, optimizer = trained(session)
        before = bits(optimizer.state_dict())
        monkeypatch.setattr(loaded_states, "ordinary_moments", failing)
        with pytest.raises(memd_client.DaemonUnavailable, match="it is gone"):
            optimizer.load_state_dict(state_with(optimizer.state_dict()["param_groups"]))
        assert len(read) == 4
        assert bits(optimizer.state_dict()) == before
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert not staged(session)
        assert session.statistics().leases_held == 0
        train(model, optimizer, 1)


def test_a_state_passes_a_pool_that_does_not_hold_the_moments_of_one_parameter(
    daemon: Daemon,
) -> None:
    layers = nn.Sequential(nn.Linear(1500, 1500, bias=False))  # 9 MB, and 27 of moments
    with fresh(daemon, "state-pool", host_bytes="24MiB") as session:
        model = memd_client.offload(layers, session)
        optimizer = memd_client.AdamW(model.parameters(), amsgrad=True)
        wanted = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(1500, 1500),
            "exp_avg_sq": torch.rand(1500, 1500).t(),  # its elements lie in another order
            MAXIMUM: torch.rand(1500, 1500),
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: wanted}})
        found = optimizer.state_dict()["state"][0]
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
        assert not staged(session)


def test_moments_are_read_into_their_own_bytes_alone(daemon: Daemon) -> None:
    with fresh(daemon, "state-read") as session:
        model = memd_client.offload(nn.Linear(1500, 1500, bias=False), session)
        optimizer = memd_client.AdamW(model.parameters())
        moment = optimizer.state_dict()["state"][0]["exp_avg"]
        tracemalloc.start()
        try:
            assert not moment.any()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    one_bytes = 4 * 1500**2
    assert 2 * one_bytes <= peak_bytes < 2.9 * one_bytes


def test_moments_of_other_dtypes_are_converted(daemon: Daemon) -> None:
    with fresh(daemon, "state-dtypes") as session:
        _, optimizer = trained(session)
        state = state_with(optimizer.state_dict()["param_groups"])
        for each in state["state"].values():
            each["exp_avg"] = each["exp_avg"].bfloat16()
            each["exp_avg_sq"] = each["exp_avg_sq"].double()
        optimizer.load_state_dict(state)
        found = optimizer.state_dict()["state"]
        for index, each in state["state"].items():
            for name, value in each.items():
                assert torch.equal(found[index][name], value.float()), (index, name)


@pytest.mark.parametrize("is_changed", [False, True])
def test_moments_of_a_mapped_file_are_read_from_it_unless_memory_has_others(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_changed: bool
) -> None:
    torch.save(state_with([{"lr": 0.0}])["state"], tmp_path / "state.pt")
    states = torch.load(tmp_path / "state.pt", mmap=True)
    noted = NotedReads(monkeypatch)
    with fresh(daemon, f"state-mapped-{is_changed}") as session:
        _, optimizer = trained(session)
        if is_changed:
            states[3]["exp_avg"][500, 0] = 7.0  # no other tensor has bytes in that page
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        moments = 2 * sum(4 * shape.numel() for shape in shapes())
        only_here = 4 * shapes()[3].numel() if is_changed else 0
        assert sum(noted.sizes) == moments - only_here
        noted.assert_fetched()
        found = optimizer.state_dict()["state"]
        for index, each in states.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[index][name], each[name]), (index, name)


def test_a_job_with_other_sessions_takes_no_state(daemon: Daemon) -> None:
    with fresh(daemon, "state-others") as session:
        _, optimizer = trained(session)
        before = bits(optimizer.state_dict())
        with (
            memd_client.connect(daemon.address, job="state-others"),
            pytest.raises(memd_client.InvalidArgument, match=r"1 other sessions.*close them"),
        ):
            optimizer.load_state_dict(state_with(optimizer.state_dict()["param_groups"]))
        assert bits(optimizer.state_dict()) == before
        assert optimizer.param_groups[0]["lr"] == 1e-3
        optimizer.load_state_dict(state_with(optimizer.state_dict()["param_groups"]))


def test_a_quota_without_room_for_a_load_says_what_it_takes(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for the snapshot, then for moments on their way; and nothing has changed."""
    monkeypatch.delattr(OldState, "put_back")
    state_bytes = 24 * sum(shape.numel() for shape in shapes())
    terms = ("a load keeps what the job has", r"MiB of nvme_bytes more .* \(moments on their way\)")
    outcomes = []
    for room_bytes in range(1 << 20, 48 << 20, 2 << 20):
        with fresh(daemon, "state-quota", nvme_bytes=state_bytes + room_bytes) as session:
            model, optimizer = trained(session)
            before = bits(optimizer.state_dict())
            wanted = state_with(optimizer.state_dict()["param_groups"])
            try:
                optimizer.load_state_dict(wanted)
            except memd_client.CapacityError as error:
                (found,) = [n for n, term in enumerate(terms) if re.search(term, str(error))]
                assert bits(optimizer.state_dict()) == before
                assert optimizer.param_groups[0]["lr"] == 1e-3
                train(model, optimizer, 1)
                outcomes.append(found)
            else:
                assert bits(optimizer.state_dict()) == bits(wanted)
                outcomes.append(len(terms))
                break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0, 1, 2}


@pytest.mark.parametrize("durability", ["step", "every:3", "none"])
def test_maxima_that_a_job_has_not_are_refused_or_find_their_room(
    daemon: Daemon, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the quota: no load begins and is refused then."""
    monkeypatch.delattr(OldState, "put_back")
    element_count = sum(shape.numel() for shape in shapes())
    outcomes = []
    for each in range(24, 96, 6):
        with fresh(
            daemon, "state-maxima", nvme_bytes=each * element_count, durability=durability
        ) as session:
            try:
                model, optimizer = trained(session)
            except memd_client.CapacityError:
                continue  # it does not hold the job
            before = bits(optimizer.state_dict())
            wanted = state_with(optimizer.state_dict()["param_groups"], amsgrad=True)
            try:
                optimizer.load_state_dict(wanted)
            except memd_client.CapacityError:
                assert bits(optimizer.state_dict()) == before
                train(model, optimizer, 1)
                outcomes.append(False)
            else:
                assert bits(optimizer.state_dict()) == bits(wanted)
                outcomes.append(True)
    assert False in outcomes
    assert True in outcomes
    assert outcomes == sorted(outcomes)


# Distributed checkpoints


def saved(path: Path) -> dict[str, Any]:
    """By plain torch."""
    plain = model_of(5)
    torchs = torch.optim.AdamW(plain.parameters(), fused=True)
    train(plain, torchs, 7)
    state = {"model": plain.state_dict(), "optimizer": torchs.state_dict()}
    save(state, checkpoint_id=path)
    return state


def read_into(state: dict[str, Any], path: Path) -> None:
    load(state, storage_reader=memd_client.checkpoint.Reader(path))


def test_a_distributed_load_is_one_transaction_and_the_optimizer_then_moves_nothing(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = saved(tmp_path)
    begin = TensorStreams.begin_put_moments
    calls: list[int] = []

    def count(streams: TensorStreams, parts: Sequence[MomentPart]) -> Any:
        calls.append(len(parts))
        return begin(streams, parts)

    monkeypatch.setattr(TensorStreams, "begin_put_moments", count)
    with fresh(daemon, "state-dcp") as session:
        model, optimizer = trained(session)
        kept = optimizer.state_dict()
        before = bits(optimizer.state_dict())
        state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
        read_into(state, tmp_path)
        assert sum(calls) == 6  # pieces of all parameters
        assert bits(optimizer.state_dict()) == bits(wanted["optimizer"])
        assert bits(state["optimizer"]) == bits(wanted["optimizer"])
        assert bits(kept) == before  # somebody else's, of its time
        optimizer.load_state_dict(optimizer.state_dict())
        assert sum(calls) == 6
        for name, value in wanted["model"].items():
            assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("with_model", [False, True])
def test_a_distributed_load_that_breaks_off_leaves_parameters_and_moments(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, with_model: bool
) -> None:
    """At the last moment that is read."""
    saved(tmp_path)
    fill = loaded_moments.MomentPieces.fill

    def failing(pieces: Any, number: int, into: torch.Tensor) -> None:
        if number == 5:
            raise OSError(5, "the file is gone")
        fill(pieces, number, into)

    monkeypatch.setattr(loaded_moments.MomentPieces, "fill", failing)
    with fresh(daemon, "state-dcp-break") as session:
        model, optimizer = trained(session)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        before = bits(optimizer.state_dict())
        state = {"optimizer": optimizer.state_dict()}
        if with_model:
            state["model"] = model.state_dict(keep_vars=True)
        with pytest.raises(CheckpointException, match="the file is gone"):
            read_into(state, tmp_path)
        assert bits(optimizer.state_dict()) == before
        for name, value in values.items():
            assert torch.equal(model.state_dict()[name], value), name
        assert not staged(session)
        monkeypatch.undo()
        read_into(state, tmp_path)
        assert bits(optimizer.state_dict()) != before
        train(model, optimizer, 1)


def test_moments_without_their_number_of_updates_are_refused(
    daemon: Daemon, tmp_path: Path
) -> None:
    saved(tmp_path)
    with fresh(daemon, "state-dcp-step") as session:
        _, optimizer = trained(session)
        before = bits(optimizer.state_dict())
        state = {"optimizer": optimizer.state_dict()}
        del state["optimizer"]["state"][2]["step"]
        with pytest.raises(CheckpointException, match="no tensor 'step' beside them"):
            read_into(state, tmp_path)
        assert bits(optimizer.state_dict()) == before


def test_a_state_of_a_session_that_is_over_takes_its_moments_from_the_files(
    daemon: Daemon, tmp_path: Path
) -> None:
    wanted = saved(tmp_path)
    with fresh(daemon, "state-dcp-over") as session:
        _, optimizer = trained(session)
        state = {"optimizer": optimizer.state_dict()}
    read_into(state, tmp_path)
    with fresh(daemon, "state-dcp-next") as session:
        _, optimizer = trained(session)
        optimizer.load_state_dict(state["optimizer"])
        assert bits(optimizer.state_dict()) == bits(wanted["optimizer"])


def test_moments_of_a_session_that_is_over_that_cannot_be_read_change_nothing(
    daemon: Daemon, tmp_path: Path
) -> None:
    saved(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-200] + bytes(200))  # the archive of the last moment has no end
    with fresh(daemon, "state-dcp-damaged") as session:
        _, optimizer = trained(session)
        state = {"optimizer": optimizer.state_dict()}
        before = bits(state["optimizer"])  # which reads them
    steps = [each["step"].clone() for each in state["optimizer"]["state"].values()]
    state["model"] = model_of(0).state_dict()
    with pytest.raises(CheckpointException, match="is damaged or hostile"):
        read_into(state, tmp_path)
    assert bits(state["optimizer"]) == before
    assert [each["step"] for each in state["optimizer"]["state"].values()] == steps
    for name, value in model_of(0).state_dict().items():
        assert torch.equal(state["model"][name], value), name


def test_a_state_of_two_jobs_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    saved(tmp_path)
    with fresh(daemon, "state-dcp-one") as one, fresh(daemon, "state-dcp-two") as two:
        model, _ = trained(one)
        _, optimizer = trained(two)
        before = bits(optimizer.state_dict())
        state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
        with pytest.raises(CheckpointException, match=r"several sessions.*load into one at a time"):
            read_into(state, tmp_path)
        assert bits(optimizer.state_dict()) == before
