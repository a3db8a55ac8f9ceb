"""The state of an optimizer goes through safetensors files: an export's, or a file of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import memd_client
from tests.daemons import fresh
from tests.integration.full_disk import no_file_larger_than
from tests.integration.test_distributed_checkpoint import (
    Model,
    assert_same,
    assert_same_moments,
    memd_adamw,
    names_in,
    trained,
)
from tests.integration.test_snapshot_export import job_of
from tests.integration.test_snapshots import memd

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from memd_client import Session
    from tests.daemons import Daemon

NAME = "layers.1.weight"


def tiled(seed: int = 0) -> nn.Module:
    return memd_client.tile_linears(Model(seed), bytes_max="8KiB")


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_new_job_goes_on_from_an_export_with_the_same_bits(
    daemon: Daemon, tmp_path: Path, amsgrad: bool, is_tiled: bool
) -> None:
    path = tmp_path / "out"
    with job_of(daemon, f"states-{amsgrad}-{is_tiled}") as session:
        model = memd_client.offload(tiled() if is_tiled else Model(), session)
        optimizer = memd_adamw(model, amsgrad=amsgrad)
        trained(model, optimizer, range(3))
        session.snapshot("kept")
        memd(daemon, "snapshot", "export", session.job, "kept", str(path))
        memd_client.save_optimizer_safetensors(optimizer, tmp_path / "own.safetensors")
        memd_client.save_safetensors(model, tmp_path / "weights.safetensors")
        losses = trained(model, optimizer, range(3, 5))
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        own, exported = (
            load_file(each)
            for each in (tmp_path / "own.safetensors", path / "optimizer.safetensors")
        )
        assert own.keys() == exported.keys()
        assert all(torch.equal(own[name], value) for name, value in exported.items())
        for source in (path / "optimizer.safetensors", tmp_path / "own.safetensors"):
            with fresh(daemon, "states-loaded") as other:
                again = memd_client.offload(tiled(1) if is_tiled else Model(seed=1), other)
                updating = memd_adamw(again, amsgrad=amsgrad)
                memd_client.load_safetensors(again, tmp_path / "weights.safetensors", other)
                memd_client.load_optimizer_safetensors(updating, source)
                assert other.statistics().leases_held == 0
                assert trained(again, updating, range(3, 5)) == losses
                assert_same(dict(again.state_dict()), wanted)
                assert_same_moments(updating, optimizer)


def test_a_load_is_durable_and_replaces_moments_that_a_state_dict_shows(
    daemon: Daemon, tmp_path: Path
) -> None:
    with fresh(daemon, "states-durable") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(2))
        memd_client.save_optimizer_safetensors(optimizer, tmp_path / "a.safetensors")
        wanted = optimizer.state_dict()["state"][0]["exp_avg"].clone()
        trained(model, optimizer, range(2, 3))
        memd_client.load_optimizer_safetensors(optimizer, tmp_path / "a.safetensors")
        state = optimizer.state_dict()["state"][0]
        assert torch.equal(state["exp_avg"].value(), wanted)
        assert state["step"] == 2
        assert session.committed_step == 3


def saved(optimizer: torch.optim.Optimizer, path: Path) -> dict[str, torch.Tensor]:
    assert isinstance(optimizer, memd_client.AdamW)
    memd_client.save_optimizer_safetensors(optimizer, path)
    # The library's tensors show the file, which tests change.
    return {name: each.clone() for name, each in load_file(path).items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", f"missing there: '{NAME}'"),
        ("unexpected", "not in the optimizer: 'other'"),
        ("shape", rf"'{NAME}.exp_avg' is float32 \[3\] there and float32 \[64, 64\]"),
        ("dtype", rf"'{NAME}.exp_avg' is float16 \[64, 64\] there and float32"),
        ("half", f"'{NAME}' has no exp_avg_sq there"),
        ("word", f"'{NAME}.square_avg' is nothing that Adam has"),
        ("step", "counts no updates"),
        ("steps", f"'{NAME}.step' has 2 numbers"),
        ("maximum", f"'{NAME}' has maximum there, and its group has amsgrad=False"),
    ],
)
def test_what_does_not_fit_is_named_before_a_byte_changes(
    daemon: Daemon, tmp_path: Path, change: str, message: str
) -> None:
    path = tmp_path / "a.safetensors"
    with fresh(daemon, f"states-bad-{change}") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        found = saved(optimizer, path)
        trained(model, optimizer, range(1, 2))
        before = saved(optimizer, tmp_path / "before.safetensors")
        changes: dict[str, Any] = {
            "missing": dict.fromkeys(key for key in found if key.startswith(NAME)),
            "unexpected": {f"other.{each}": torch.zeros(()) for each in ("step", "exp_avg")},
            "shape": {f"{NAME}.exp_avg": torch.zeros(3)},
            "dtype": {f"{NAME}.exp_avg": found[f"{NAME}.exp_avg"].half()},
            "half": {f"{NAME}.exp_avg_sq": None},
            "word": {f"{NAME}.square_avg": torch.zeros(64, 64)},
            "step": {f"{NAME}.step": torch.tensor(0.5)},
            "steps": {f"{NAME}.step": torch.tensor([1, 2])},
            "maximum": {f"{NAME}.max_exp_avg_sq": torch.zeros(64, 64)},
        }
        changed = {**found, **changes[change]}
        save_file({name: each for name, each in changed.items() if each is not None}, path)
        with pytest.raises(memd_client.InvalidArgument, match=message):
            memd_client.load_optimizer_safetensors(optimizer, path)
        after = saved(optimizer, tmp_path / "after.safetensors")
        assert all(torch.equal(after[name], value) for name, value in before.items())
        if change in ("missing", "unexpected"):
            memd_client.load_optimizer_safetensors(optimizer, path, strict=False)
            after = saved(optimizer, tmp_path / "after.safetensors")
            assert torch.equal(after["layers.0.bias.exp_avg"], found["layers.0.bias.exp_avg"])
            kept = before if change == "missing" else found
            assert torch.equal(after[f"{NAME}.exp_avg"], kept[f"{NAME}.exp_avg"])


@pytest.mark.parametrize("damage", ["truncated", "header", "length"])
def test_a_damaged_file_is_one_clear_error_and_changes_nothing(
    daemon: Daemon, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "a.safetensors"
    with fresh(daemon, f"states-{damage}") as session:
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        before = saved(optimizer, path)
        data = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(data[:-4])
        elif damage == "header":
            path.write_bytes(data[:8] + b"[" + data[9:])
        else:
            path.write_bytes((1 << 40).to_bytes(8, "little") + data[8:])
        with pytest.raises(memd_client.InvalidArgument):
            memd_client.load_optimizer_safetensors(optimizer, path)
        after = saved(optimizer, tmp_path / "after.safetensors")
        assert all(torch.equal(after[name], value) for name, value in before.items())


def half_trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[int]
) -> None:
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        value = torch.randn(4, 64, generator=generator).bfloat16()
        for layer in model.children():
            value = layer(value)
        value.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def exported_states(daemon: Daemon, session: Session, path: Path) -> dict[str, torch.Tensor]:
    """Exports a snapshot of now and returns its optimizer states, masters among them."""
    session.snapshot(path.name)
    memd(daemon, "snapshot", "export", session.job, path.name, str(path))
    return load_file(path / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("amsgrad", "is_tiled", "tier", "is_own"),
    [
        pytest.param(False, False, "nvme", True, id="own"),
        pytest.param(True, True, "nvme", False, id="tiled-exported"),
        pytest.param(True, True, "nvme", True, id="tiled-own", marks=pytest.mark.more),
        pytest.param(True, False, "host", True, id="host-own"),
        pytest.param(True, False, "host", False, id="host-exported", marks=pytest.mark.more),
    ],
)
def test_a_job_in_bf16_goes_on_from_files_with_the_same_bits(
    daemon: Daemon, tmp_path: Path, amsgrad: bool, is_tiled: bool, tier: str, is_own: bool
) -> None:
    """The masters too, which decide about values only steps later."""
    weights, states = tmp_path / "own.safetensors", tmp_path / "own-states.safetensors"

    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        # One has more than a tile, and the others share a bucket.
        model = nn.Sequential(nn.Linear(64, 5000), nn.Linear(5000, 64), nn.Linear(64, 64))
        model = model.bfloat16()
        return memd_client.tile_linears(model, bytes_max="256KiB") if is_tiled else model

    def updating(model: nn.Module) -> memd_client.AdamW:
        return memd_client.AdamW(model.parameters(), 1e-3, amsgrad=amsgrad)

    with job_of(daemon, "bf16-a") as session:
        model = memd_client.offload(built(0), session, tier=tier)
        optimizer = updating(model)
        half_trained(model, optimizer, range(3))
        before = exported_states(daemon, session, tmp_path / "before")
        memd_client.save_safetensors(model, weights)
        memd_client.save_optimizer_safetensors(optimizer, states)
        assert_same(load_file(states), before)
        half_trained(model, optimizer, range(3, 6))
        wanted = exported_states(daemon, session, tmp_path / "after")
        values = {name: each.clone() for name, each in model.state_dict().items()}
    masters = {name: each for name, each in before.items() if name.endswith(".master")}
    assert len(masters) == 6
    assert all(bool((each != each.bfloat16().float()).any()) for each in masters.values())
    with job_of(daemon, "bf16-b") as session:
        model = memd_client.offload(built(1), session, tier=tier)
        optimizer = updating(model)
        # Remainders of its own, which may not stay.
        half_trained(model, optimizer, range(7, 9))
        exported = tmp_path / "before"
        memd_client.load_safetensors(model, weights if is_own else exported, session)
        memd_client.load_optimizer_safetensors(
            optimizer, states if is_own else exported / "optimizer.safetensors"
        )
        assert session.statistics().leases_held == 0
        half_trained(model, optimizer, range(3, 6))
        found = exported_states(daemon, session, tmp_path / "again")
        assert_same(dict(model.state_dict()), values)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_masters_are_left_out_on_request_and_not_read_while_a_value_is_written(
    daemon: Daemon, tmp_path: Path
) -> None:
    with job_of(daemon, "bf16-asked") as session:
        model = memd_client.offload(nn.Linear(64, 64).bfloat16(), session)
        optimizer = memd_client.AdamW(model.parameters(), 1e-3)
        half_trained(nn.Sequential(model), optimizer, range(2))
        memd_client.save_optimizer_safetensors(optimizer, tmp_path / "a", masters=False)
        assert not [name for name in load_file(tmp_path / "a") if name.endswith(".master")]
        with memd_client.gather(model.weight, write=True):
            model.weight.data[0] = 5.0
            with pytest.raises(memd_client.InvalidArgument, match="is still leased for writing"):
                memd_client.save_optimizer_safetensors(optimizer, tmp_path / "b")
        assert names_in(tmp_path) == ["a"]
        # An element that was written has exactly this value. The others keep theirs.
        memd_client.save_optimizer_safetensors(optimizer, tmp_path / "c")
        master = load_file(tmp_path / "c")["weight.master"]
        assert torch.equal(master[0], torch.full((64,), 5.0))
        assert bool((master[1:] != master[1:].bfloat16().float()).any())


def test_masters_of_other_values_or_of_float32_are_refused_and_may_be_left_out(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    with job_of(daemon, "states-bf16") as session:
        model = memd_client.offload(torch.nn.Linear(8, 8).bfloat16(), session)
        optimizer = memd_client.AdamW(model.parameters(), 1e-3)

        def train(steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        train(1)
        exported_states(daemon, session, path)
        file = path / "optimizer.safetensors"
        # So many steps of 1e-3 change the values.
        train(20)
        before = exported_states(daemon, session, tmp_path / "before")
        with pytest.raises(
            memd_client.InvalidArgument,
            match="'weight' has other bfloat16 values than training makes of its fp32 values",
        ):
            memd_client.load_optimizer_safetensors(optimizer, file)
        after = exported_states(daemon, session, tmp_path / "after")
        assert all(torch.equal(after[name], each) for name, each in before.items())
        train(1)
        memd_client.load_optimizer_safetensors(optimizer, file, masters=False)
        wanted = load_file(file)["weight.exp_avg"]
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"].value(), wanted)
    with job_of(daemon, "states-fp32") as session:
        whole = memd_client.offload(torch.nn.Linear(8, 8), session)
        other = memd_client.AdamW(whole.parameters(), 1e-3)
        with pytest.raises(
            memd_client.InvalidArgument, match=r"'weight\.master' has the fp32 values of a bfloat16"
        ):
            memd_client.load_optimizer_safetensors(other, file)
        memd_client.load_optimizer_safetensors(other, file, masters=False)


def test_between_step_and_commit_and_on_a_full_disk_nothing_changes(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    with fresh(daemon, "states-open") as session:
        session.track(rng=True)
        model = memd_client.offload(Model(), session)
        optimizer = memd_adamw(model)
        trained(model, optimizer, range(1))
        for call in (
            memd_client.save_optimizer_safetensors,
            memd_client.load_optimizer_safetensors,
        ):
            with pytest.raises(memd_client.InvalidArgument, match="commit"):
                call(optimizer, path)
        session.commit()
        with no_file_larger_than(8 << 10), pytest.raises(memd_client.CapacityError):
            memd_client.save_optimizer_safetensors(optimizer, path)
        assert names_in(tmp_path) == []
        memd_client.save_optimizer_safetensors(optimizer, path)
        memd_client.load_optimizer_safetensors(optimizer, path)


def test_a_parameter_that_is_not_in_memd_has_no_name(daemon: Daemon, tmp_path: Path) -> None:
    with fresh(daemon, "states-plain") as session:
        model = memd_client.offload(torch.nn.Linear(8, 8), session)
        own = torch.nn.Parameter(torch.ones(3))
        optimizer = memd_client.AdamW([*model.parameters(), own], session=session)
        with pytest.raises(memd_client.InvalidArgument, match="is not in memd, and has no name"):
            memd_client.save_optimizer_safetensors(optimizer, tmp_path / "a.safetensors")
