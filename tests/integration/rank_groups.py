"""Programs of four ranks whose jobs are those of a part of them: the data-parallel ones of a mesh.

    python -m tests.integration.rank_groups NAME ADDRESS FILE

See `rank_programs`.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memd_client
from tests.integration.rank_fsdp import Adapted, different, values
from tests.integration.rank_programs import (
    QUOTAS,
    STEPS,
    Tied,
    batch,
    error_of,
    main,
)

if TYPE_CHECKING:
    from collections.abc import Callable

RATE = 1e-2


def mesh_of_parts() -> DeviceMesh:
    """Two data-parallel ranks, each of which would have two parts of each tensor."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Averaged:
    """Plain torch that averages over a process group."""

    def __init__(self, model: nn.Module, group: distributed.ProcessGroup) -> None:
        self._wrapped = DistributedDataParallel(
            model, process_group=group, find_unused_parameters=True
        )
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(self, step: int) -> float:
        return _step(self._wrapped, self._optimizer, step)

    def values(self) -> dict[str, torch.Tensor]:
        return values(self._wrapped.module)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(batch(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def bits(address: str) -> dict[str, Any]:
    """Differences to torch of each kind of job, of which there are two at a time."""
    mesh = mesh_of_parts()
    kinds: dict[str, Callable[[nn.Module, memd_client.Session], tuple[nn.Module, Any]]] = {
        "offloaded": partial(_offloaded, group=mesh["dp"]),
        "resident": partial(_resident, group=mesh["dp"].get_group()),
        "shards": partial(_sharded, mesh=mesh["dp"]),
    }
    found: dict[str, Any] = {}
    for name, make in kinds.items():
        for made in (Tied, Adapted):
            torch.manual_seed(mesh.get_local_rank("tp"))
            model = made()
            reference = Averaged(copy.deepcopy(model), mesh.get_group("dp"))
            if name != "offloaded":
                for parameter in model.parameters():
                    distributed.broadcast(parameter.data, group=mesh.get_group("dp"), group_src=0)
            cell = f"{name} {made.__name__}"
            group: Any = mesh["dp"] if name != "resident" else mesh.get_group("dp")
            with connected(address, "bits", mesh, group) as session:
                trained, optimizer = make(model, session)
                differences = []
                for step in range(STEPS):
                    wanted, own = reference.step(step), _step(trained, optimizer, step)
                    if own != wanted:
                        differences.append(f"step {step}: {own}, not {wanted}")
                differences += different(values_of(trained), reference.values())
                if session.committed_step != STEPS:
                    differences.append(f"{session.committed_step} steps")
            found[cell] = differences
            distributed.barrier()
    return found


def connected(address: str, job: str, mesh: DeviceMesh, group: Any) -> memd_client.Session:
    """To a new job, which is another one for each part."""
    return memd_client.connect(
        address,
        job=f"{job}-{mesh.get_local_rank('tp')}",
        process_group=group,
        fresh=True,
        **QUOTAS,
    )


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in values(model).items()}


def _offloaded(
    model: nn.Module, session: memd_client.Session, group: DeviceMesh
) -> tuple[nn.Module, Any]:
    memd_client.offload(model, session, process_group=group)
    return model, memd_client.AdamW(model.parameters(), lr=RATE)


def _resident(
    model: nn.Module, session: memd_client.Session, group: distributed.ProcessGroup
) -> tuple[nn.Module, Any]:
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    named = wrapped.named_parameters()
    return wrapped, memd_client.AdamW(named, lr=RATE, session=session)


def _sharded(
    model: nn.Module, session: memd_client.Session, mesh: DeviceMesh
) -> tuple[nn.Module, Any]:
    fully_shard(model, mesh=mesh)
    return model, memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)


def whole(address: str) -> dict[str, Any]:
    """A mesh of all ranks is what the default process group is."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    torch.manual_seed(distributed.get_rank())
    model = nn.Linear(4, 4)
    with memd_client.connect(address, job="whole", process_group=mesh, **QUOTAS) as session:
        memd_client.offload(model, session, process_group=mesh)
        optimizer = memd_client.AdamW(model.parameters(), lr=RATE)
        model(torch.full((2, 4), 1.0 + distributed.get_rank())).sum().backward()
        gradient = model.weight.grad
        assert gradient is not None
        found = {"gradient": gradient.clone().tolist()}
        optimizer.step()
        return {**found, "step": session.committed_step}


def refused(address: str) -> dict[str, Any]:
    """Each rank passes values that `process_group` may not have."""
    mesh, rank = mesh_of_parts(), distributed.get_rank()
    first, other = (distributed.new_group(ranks) for ranks in ([0, 1], [2, 3]))
    found: dict[str, Any] = {}

    def connect(group: Any, **given: Any) -> memd_client.Session:
        return memd_client.connect(address, job="refused", process_group=group, **given)

    def refuse(name: str, call: Callable[[], Any]) -> None:
        found[name] = error_of(call)
        distributed.barrier()

    unnamed = DeviceMesh("cpu", [[0, 1], [2, 3]])
    part = DeviceMesh("cpu", [0, 1])
    refuse("two dimensions", lambda: connect(mesh))
    refuse("no names", lambda: connect(unnamed))
    refuse("kind", lambda: connect("dp"))
    if rank > 1:
        found["mesh of others"] = error_of(lambda: connect(part))
        found["group of others"] = error_of(lambda: connect(first))
    refuse("place", lambda: connect(other if rank > 1 else first, rank=rank % 2, world_size=4))
    with connected(address, "refused", mesh, mesh["dp"]) as session:
        model = nn.Linear(4, 4)
        offload = partial(memd_client.offload, model, session)
        refuse("of another", lambda: offload(process_group=mesh["tp"]))
        sharded: Any = fully_shard(nn.Linear(8, 16), mesh=mesh["tp"])
        make = partial(memd_client.AdamW, sharded.named_parameters(), session=session)
        refuse("sharded over another", make)
        offload(process_group=mesh["dp"])
        found["step"] = session.committed_step
        distributed.barrier()
    with memd_client.connect(address, job="all", **QUOTAS) as session:
        refuse("part", lambda: memd_client.offload(model, session, process_group=mesh["dp"]))
    return found


def twice(address: str) -> dict[str, Any]:
    """Two groups ask for one job, and one gets it."""
    group = mesh_of_parts()["dp"]
    made = []

    def connect() -> None:
        made.append(memd_client.connect(address, job="twice", process_group=group, **QUOTAS))

    found = {"error": error_of(connect)}
    distributed.barrier()
    for session in made:
        session.close()
    return found


if __name__ == "__main__":
    main({each.__name__: each for each in (bits, whole, refused, twice)})
