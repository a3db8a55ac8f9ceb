"""A client of before put what it loaded beside the old values first, as blobs, and a plan last."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from memd_client.connection.shard import Shard, shard_spec
from memd_client.core.leases import MODE_OVERWRITE
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from tests.daemons import Daemon


class Model(nn.Module):
    scale: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large = nn.Linear(600, 1000, bias=False)  # of three tiles
        self.last = nn.Linear(1000, 4, bias=False)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.large(x)) * self.scale.sum()
        return output


def put_blob(session: memd_client.Session, name: str, data: torch.Tensor) -> None:
    """Under a name that `session.put` refuses."""
    job = session.transaction.job
    data = data.contiguous().view(-1).view(torch.uint8)
    spec = shard_spec(name, kind=types_pb2.SHARD_KIND_BLOB, dtype=torch.uint8, shape=[data.numel()])
    (declared,) = job.declare([spec])
    job.leases.value(Shard.of(declared), MODE_OVERWRITE).copy_(data)


def moments_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    return {name: torch.rand(600_000, generator=generator) for name in names}


def leave_load(daemon: Daemon, job: str, *, is_planned: bool) -> None:
    """A job at step 1, and what a trainer has left that was killed in a load of values and moments
    of seed 1."""
    with memd_client.connect(daemon.address, job=job, fresh=True) as session:
        model = memd_client.offload(Model(0), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
        model(torch.rand(2, 600)).sum().backward()
        optimizer.step()
        ids = {each.spec.name: each.shard_id for each in session.transaction.job.shards.list_all()}
        rows: list[Any] = []
        for name, value in Model(1).state_dict().items():
            staged = f"@load/{len(rows)}"
            put_blob(session, staged, value)
            rows.append([staged, value.nbytes, ids[name]])
        put_blob(session, "@load/alone", torch.ones(3))  # for a tensor of that process
        rows.append(["@load/alone", 12, None])
        moments = moments_of(1)
        for first in range(0, 600_000, 1 << 18):
            part = torch.cat([each[first : first + (1 << 18)] for each in moments.values()])
            staged = f"@load/{len(rows)}"
            put_blob(session, staged, part)
            count = part.numel() // 3
            rows.append([staged, part.nbytes, ids["large.weight"], 12, first, count, True])
        rows.append(["", 0, ids["last.weight"], 5, 0, 4000, True])
        put_blob(session, "@load/room.0", torch.ones(3))
        put_blob(session, "@load/turn", torch.ones(1))
        if is_planned:
            text = bytearray(json.dumps(rows).encode())
            put_blob(session, "@load/plan", torch.frombuffer(text, dtype=torch.uint8))
        session.transaction.job.mark_written()


def left_of(session: memd_client.Session) -> list[str]:
    names = [shard.spec.name for shard in session.transaction.job.shards.list_all()]
    return [name for name in names if name.startswith("@load/")]


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_load_with_a_plan_is_finished_and_another_one_forgotten(
    daemon: Daemon, *, is_planned: bool
) -> None:
    leave_load(daemon, "old-load", is_planned=is_planned)
    with memd_client.connect(daemon.address, job="old-load") as session:
        assert session.committed_step == 1
        model = memd_client.offload(Model(3), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
        assert left_of(session) == []
        loaded = Model(1).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(value, loaded[name]) == is_planned, name
        first, second = optimizer.state_dict()["state"].values()
        assert first["step"] == (12 if is_planned else 1)
        for name, moment in moments_of(1).items():
            assert torch.equal(first[name].clone().view(-1), moment) == is_planned, name
        assert second["step"] == (5 if is_planned else 1)
        assert bool(second["exp_avg"].any()) != is_planned
        session.drop_job()


def test_a_session_that_only_reads_sees_no_old_load_half_way(daemon: Daemon) -> None:
    leave_load(daemon, "old-read", is_planned=True)
    with memd_client.connect(daemon.address, job="old-read") as session:
        loaded = Model(1).state_dict()
        assert torch.equal(session.get("large.weight"), loaded["large.weight"])
        assert left_of(session) == []
        session.drop_job()


def test_an_old_load_is_settled_by_a_session_that_is_alone(daemon: Daemon) -> None:
    leave_load(daemon, "old-company", is_planned=True)
    with memd_client.connect(daemon.address, job="old-company") as session:
        with memd_client.connect(daemon.address, job="old-company") as other:
            for each in (session, other):
                with pytest.raises(memd_client.InvalidArgument, match="settles what one has left"):
                    memd_client.offload(Model(3), each)
        model = memd_client.offload(Model(3), session)
        assert torch.equal(
            model.state_dict()["large.weight"], Model(1).state_dict()["large.weight"]
        )
        session.drop_job()
