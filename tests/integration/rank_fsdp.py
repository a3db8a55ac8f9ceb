"""Programs in which `fully_shard` cuts a model over ranks, and memd has the optimizer's state.

    python -m tests.integration.rank_fsdp NAME ADDRESS FILE

See `rank_programs`. "all" runs several of them, one after the other.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import signal
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import memd_client
from tests.integration.rank_programs import (
    HANG_S,
    QUOTAS,
    STEPS,
    Branching,
    Tied,
    average,
    batch,
    batches,
    error_of,
    from_first_rank,
    main,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client.connection.calls import StepCall
    from memd_proto.v1 import session_pb2

RATE = 1e-2


class Chosen(Branching):
    """All ranks use the same expert: another one in each step, and one in none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def expert_of(self, tokens: torch.Tensor) -> int:
        del tokens
        self.count += 1
        return self.count % (len(self.experts) - 1)


class Adapted(nn.Module):
    """A frozen model with trained low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64)
        self.requires_grad_(False)
        self.down = nn.Linear(16, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embedding(tokens[:, :-1])
        found = self.head(found) + self.up(self.down(found))
        return nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


class Small(nn.Module):
    """The first rank has all of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.last(self.first(tokens[:, :4].float() / 50).tanh())
        loss: torch.Tensor = found.square().mean()
        return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One kind of training."""

    model: Callable[[], nn.Module]
    clip: float | None = None
    micro_count: int = 1
    scale: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of fully_shard
    is_written: bool = False  # between steps, on all ranks and on one


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CELLS = {
    "plain": Cell(model=Tied),
    "clipped": Cell(model=Tied, clip=0.05),
    "accumulated": Cell(model=Tied, micro_count=3, clip=0.05),
    "batch norm": Cell(model=Chosen),
    "experts, clipped": Cell(model=Chosen, clip=0.05, micro_count=2),
    "adapters": Cell(model=Adapted),
    "adapters, clipped": Cell(model=Adapted, clip=0.05),
    "small": Cell(model=Small, is_written=True),
    "scaled": Cell(model=Small, scale=1024.0),
    "scaled, clipped": Cell(model=Small, scale=1024.0, clip=0.05),
    "reduced in float32": Cell(model=Tied, settings={"mp_policy": MIXED}),
    "kept": Cell(model=Small, settings={"reshard_after_forward": False}),
}


def cells(world_size: int) -> dict[str, Cell]:
    """Those whose parameters so many ranks can share."""
    return {
        name: cell for name, cell in CELLS.items() if world_size == 2 or cell.model is not Chosen
    }


def sharded(model: nn.Module, **settings: Any) -> nn.Module:
    """`model`, whose layers and the rest are gathered one after the other."""
    kind = nn.TransformerEncoderLayer if isinstance(model, Tied) else nn.Linear
    for layer in list(model.modules()):
        if isinstance(layer, kind):
            fully_shard(layer, **settings)
    fully_shard(model, **settings)
    return model


class Trained:
    """A sharded model and an optimizer, of torch or of memd."""

    def __init__(self, model: nn.Module, optimizer: Any, cell: Cell) -> None:
        self.model = model
        self.optimizer = optimizer
        self._cell = cell
        self._scaler = torch.amp.GradScaler("cpu", init_scale=cell.scale or 1.0, growth_interval=2)

    def _clip(self, bound: float) -> float:
        if isinstance(self.optimizer, memd_client.AdamW):
            return float(self.optimizer.clip_grad_norm_(bound))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), bound)
        assert isinstance(norm, DTensor)
        return float(norm.full_tensor())

    def step(self, step: int) -> list[float]:
        """Losses, and the norm if gradients are clipped."""
        cell, model, found = self._cell, self.model, []
        is_scaled = cell.scale is not None
        for micro, tokens in enumerate(batches(step, cell.micro_count)):
            self._sync(is_last=micro == cell.micro_count - 1)
            loss = model(tokens)
            if is_scaled and step == 2 and distributed.get_rank():
                loss = loss * float("inf")
            (self._scaler.scale(loss) if is_scaled else loss).backward()
            found.append(float(loss.detach()))
        if is_scaled and cell.clip is not None:
            self._scaler.unscale_(self.optimizer)
        if cell.clip is not None:
            found.append(self._clip(cell.clip))
        if is_scaled:
            self._scaler.step(self.optimizer)
            self._scaler.update()
            found.append(self._scaler.get_scale())
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if cell.is_written:
            self._write(step)
        return found

    def _sync(self, *, is_last: bool) -> None:
        set_sync: Any = self.model
        set_sync.set_requires_gradient_sync(is_last)

    @torch.no_grad()
    def _write(self, step: int) -> None:
        """On all ranks, or on the last one."""
        for parameter in self.model.parameters():
            if step == 1 or (step == 3 and distributed.get_rank()):
                local(parameter).mul_(0.5)


def local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    found: torch.Tensor = parameter.to_local()
    return found


@torch.no_grad()
def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters. All ranks call it."""
    found = {}
    for name, parameter in model.named_parameters():
        held: Any = parameter
        found[name] = held.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    return found


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def pair(made: nn.Module, cell: Cell, session: memd_client.Session) -> tuple[Trained, Trained]:
    """Torch's, and memd's."""
    reference, model = (sharded(each, **cell.settings) for each in (copy.deepcopy(made), made))
    plain = torch.optim.AdamW(reference.parameters(), lr=RATE, fused=True)
    optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
    return Trained(reference, plain, cell), Trained(model, optimizer, cell)


def bits(address: str) -> dict[str, Any]:
    """Differences to torch of each cell, also of what is saved."""
    found = {}
    for name, cell in cells(distributed.get_world_size()).items():
        torch.manual_seed(0)
        made = cell.model()
        with memd_client.connect(address, job="bits", fresh=True, **QUOTAS) as session:
            reference, trained = pair(made, cell, session)
            differences = []
            for step in range(STEPS):
                wanted = reference.step(step)
                if repr(trained.step(step)) != repr(wanted):
                    differences.append(f"step {step}: {wanted}")
            differences += different(values(trained.model), values(reference.model))
            distributed.barrier()
        found[name] = differences
    return found


def saved(address: str) -> dict[str, Any]:
    """Files and states of the whole, and a job that the same ranks go on with."""
    folder, rank = os.environ["MEMD_FOLDER"], distributed.get_rank()
    cell = Cell(model=Tied)
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    made = cell.model()
    with memd_client.connect(address, job="saved", **QUOTAS) as session:
        reference, trained = pair(made, cell, session)
        for step in range(3):
            reference.step(step)
            trained.step(step)
        wanted = values(reference.model)
        file = f"{folder}/{rank}.safetensors"
        memd_client.save_safetensors(trained.model, file)
        found["file"] = different(load_file(file), wanted)
        found["state"] = different(moments(trained), moments(reference))
        distributed.barrier()
    torch.manual_seed(1)
    model = sharded(cell.model())
    with memd_client.connect(address, job="saved", **QUOTAS) as session:
        optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
        found["first"] = different(values(model), wanted)
        trained = Trained(model, optimizer, cell)
        for step in range(3, STEPS):
            if trained.step(step) != reference.step(step):
                found["first"].append(f"loss of step {step}")
        found["last"] = different(values(model), values(reference.model))
        distributed.barrier()
        found["sum"] = total(values(model))
    return found


def moments(trained: Trained) -> dict[str, torch.Tensor]:
    """The whole ones."""
    found = {}
    for index, state in trained.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value.clone()
            found[f"{index}.{name}"] = whole
    return found


def total(of: dict[str, torch.Tensor]) -> float:
    return sum(float(value.double().sum()) for value in of.values())


def elastic(address: str) -> dict[str, Any]:
    """Another number of ranks goes on with the job that `saved` has left."""
    model = sharded(Tied())
    with memd_client.connect(address, job="saved", **QUOTAS) as session:
        optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
        found: dict[str, Any] = {"sum": total(values(model)), "step": session.committed_step}
        counts = {int(each["step"]) for each in optimizer.state_dict()["state"].values()}
        found["counts"] = sorted(counts)
        Trained(model, optimizer, Cell(model=Tied)).step(STEPS)
        found["after"] = session.committed_step
        distributed.barrier()
    return found


def committed(address: str) -> dict[str, Any]:
    """Steps that `commit()` closes: nobody gathers an old value meanwhile."""
    cell = Cell(model=Small)
    torch.manual_seed(0)
    with memd_client.connect(address, job="committed", fresh=True, **QUOTAS) as session:
        reference, trained = pair(Small(), cell, session)
        session.track(rng=True)
        session.resume()
        found: dict[str, Any] = {}
        for step in range(3):
            wanted, losses = reference.step(step), trained.step(step)
            (tokens,) = batches(step, 1)
            found["forward"] = error_of(partial(trained.model, tokens))
            found["read"] = error_of(trained.model.state_dict)
            session.commit()
            found[f"step {step}"] = losses == wanted
        found["values"] = different(values(trained.model), values(reference.model))
        found["step"] = session.committed_step
        distributed.barrier()
    return found


def ignored(address: str) -> dict[str, Any]:
    """Parameters that fully_shard leaves to the program: it averages their gradients, or not."""
    torch.manual_seed(0)
    made = Small()
    with memd_client.connect(address, job="ignored", fresh=True, **QUOTAS) as session:
        models = (copy.deepcopy(made), made)
        for each in models:
            fully_shard(each, ignored_params=set(each.last.parameters()))
        # torch's kernel takes no group of both kinds.
        groups = [{"params": list(each.parameters())} for each in models[0].children()]
        plain = torch.optim.AdamW(groups, lr=RATE, fused=True)
        optimizer = memd_client.AdamW(models[1].named_parameters(), lr=RATE, session=session)
        found: dict[str, Any] = {}

        def backward(*, averages: bool) -> None:
            for model in models:
                model.zero_grad()
                model(*batches(0, 1)).backward()
                for parameter in model.last.parameters() if averages else ():
                    assert parameter.grad is not None
                    distributed.all_reduce(parameter.grad)

        for _ in range(STEPS):
            backward(averages=True)
            plain.step()
            optimizer.step()
        found["values"] = different(values(models[1]), values(models[0]))
        found["clip"] = error_of(lambda: optimizer.clip_grad_norm_(1.0))
        backward(averages=False)
        found["apart"] = error_of(optimizer.step)
        found["step"] = session.committed_step
        distributed.barrier()
    return found


class Dtypes(nn.Module):
    """Layers of two dtypes, and a frozen one of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).to(torch.float64).requires_grad_(False)
        self.first = nn.Linear(16, 32).bfloat16()
        self.last = nn.Linear(32, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.frozen(tokens[:, :16].double() / 50)
        found = self.last(self.first(found.bfloat16()).tanh().float())
        loss: torch.Tensor = found.square().mean()
        return loss


class Masters:
    """torch's fused AdamW over float32 copies of bfloat16 shards."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._pairs = [(each, nn.Parameter(local(each).float())) for each in parameters]
        self._optimizer = torch.optim.AdamW([own for _, own in self._pairs], lr=RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, own in self._pairs:
            assert parameter.grad is not None
            own.grad = local(parameter.grad).float()
        self._optimizer.step()
        for parameter, own in self._pairs:
            local(parameter).copy_(own)
            parameter.grad = None


def dtypes(address: str) -> dict[str, Any]:
    """Layers of several dtypes, each sharded by itself: differences to torch. Sharded together,
    torch refuses them."""
    torch.manual_seed(0)
    made = Dtypes()
    models = (copy.deepcopy(made), made)
    for each in models:
        for layer in (each.frozen, each.first, each.last):
            fully_shard(layer)
    masters = Masters([each for each in models[0].parameters() if each.requires_grad])
    found: dict[str, Any] = {"differences": []}
    with memd_client.connect(address, job="dtypes", fresh=True, **QUOTAS) as session:

        def optimizer_of(*modules: nn.Module) -> memd_client.AdamW:
            named = [
                (f"{at}.{name}", each)
                for at, module in enumerate(modules)
                for name, each in module.named_parameters()
            ]
            return memd_client.AdamW(named, lr=RATE, session=session)

        found["frozen"] = error_of(partial(optimizer_of, models[1].frozen))
        optimizer = optimizer_of(models[1].first, models[1].last)
        for step in range(STEPS):
            losses = [each(batch(step)) for each in models]
            for each in losses:
                each.backward()
            masters.step()
            optimizer.step()
            optimizer.zero_grad()
            if float(losses[0].detach()) != float(losses[1].detach()):
                found["differences"].append(f"step {step}")
        found["differences"] += different(values(models[1]), values(models[0]))
        found["step"] = session.committed_step
        together: Any = fully_shard(Dtypes())
        found["together"] = error_of(partial(together, batch(0)))
        distributed.barrier()
    return found


@contextmanager
def connected(address: str) -> Iterator[memd_client.Session]:
    with memd_client.connect(address, job="refused", fresh=True, **QUOTAS) as session:
        yield session
        distributed.barrier()
    distributed.barrier()


def refused(address: str) -> dict[str, Any]:
    """memd refuses these in a sentence on each rank."""
    found: dict[str, Any] = {}
    world_size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    both = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))

    def refuse(name: str, model: Any) -> None:
        with connected(address) as session:
            made = partial(memd_client.AdamW, model.named_parameters(), session=session)
            found[name] = error_of(made)

    offload = CPUOffloadPolicy(pin_memory=False)
    refuse("offloaded", fully_shard(nn.Linear(8, 8), offload_policy=offload))
    refuse("uneven", fully_shard(nn.Linear(8, 10)))
    columns = fully_shard(nn.Linear(16, 16, bias=False), shard_placement_fn=lambda _: Shard(1))
    refuse("columns", columns)
    refuse("replicated", fully_shard(nn.Linear(8, 16), mesh=both))
    layer = nn.Linear(8, 16, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    refuse("by hand", layer)
    layer = nn.Linear(8, 16, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate()]))
    refuse("whole", layer)
    with connected(address) as session:
        model = sharded(Small())
        file = f"{os.environ['MEMD_FOLDER']}/refused-{distributed.get_rank()}.safetensors"
        found["unknown"] = error_of(partial(memd_client.save_safetensors, model, file))
        optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
        plain = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
        model(*batches(0, 1)).backward()
        plain.step()
        found["changed"] = error_of(partial(memd_client.save_safetensors, model, file))
        state = plain.state_dict()
        found["moments"] = error_of(partial(optimizer.load_state_dict, state))
        plain_model = Small()
        memd_client.save_safetensors(plain_model, file)
        writer = memd_client.checkpoint.Writer(file.removesuffix(".safetensors"))
        try:
            save(model.state_dict(), storage_writer=writer, no_dist=True)
        except CheckpointException as error:  # it is no Exception
            found["checkpoint"] = repr(error.failures)
        found["load"] = error_of(partial(memd_client.load_safetensors, model, file, session))
        optimizer.step()
        found["step"] = session.committed_step
    return found


class Beside(nn.Module):
    """A body that is sharded, between layers that are offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"embedding": nn.Embedding(50, 32), "head": nn.Linear(32, 50)})
        self.body = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.outer["head"](self.body(self.outer["embedding"](tokens[:, :-1])))
        return nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())

    def parts(self) -> list[nn.Module]:
        return [self.outer, self.body]

    def shard(self, *, with_root: bool) -> None:
        for layer in (self.body[0], self.body[2], self.body):
            fully_shard(layer)
        if with_root:
            fully_shard(self, ignored_params=set(self.outer.parameters()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """How offloaded and sharded modules are trained together."""

    is_sharded_first: bool = False
    with_root: bool = False  # which ignores what is offloaded
    optimizer_count: int = 1
    clip: float | None = None
    micro_count: int = 1
    scale: float | None = None


PAIRINGS = {
    "one optimizer": Pairing(),
    "sharded first": Pairing(is_sharded_first=True),
    "root": Pairing(with_root=True),
    "root first": Pairing(with_root=True, is_sharded_first=True),
    "two optimizers": Pairing(optimizer_count=2),
    "clipped": Pairing(optimizer_count=2, clip=0.05),
    "accumulated": Pairing(micro_count=3),
    "scaled": Pairing(scale=1024.0),
    "scaled, two optimizers": Pairing(optimizer_count=2, scale=1024.0),
    "scaled, clipped": Pairing(optimizer_count=2, scale=1024.0, clip=0.05),
}


class Paired:
    """Trains a `Beside`. The reference averages the gradients of what is not sharded by hand."""

    def __init__(
        self,
        model: Beside,
        optimizers: list[Any],
        pairing: Pairing,
        session: memd_client.Session | None,
    ) -> None:
        self.model = model
        self._optimizers = optimizers
        self._pairing = pairing
        self._session = session
        self._scaler = torch.amp.GradScaler(
            "cpu", init_scale=pairing.scale or 1.0, growth_interval=2
        )

    def step(self, step: int) -> list[float]:
        pairing, scaler = self._pairing, self._scaler
        found = []
        for micro, tokens in enumerate(batches(step, pairing.micro_count)):
            is_last = micro == pairing.micro_count - 1
            body: Any = self.model.body
            body.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or self._session is None else self._session.no_sync():
                loss = self.model(tokens)
                found.append(float(loss.detach()))
                if pairing.scale is not None and step == 2 and distributed.get_rank():
                    loss = loss * float("inf")
                (loss if pairing.scale is None else scaler.scale(loss)).backward()
        if self._session is None:
            average(self.model.outer)
        for optimizer in self._optimizers:
            if pairing.clip is not None:
                if pairing.scale is not None:
                    scaler.unscale_(optimizer)
                found.append(self._clip(optimizer, pairing.clip))
            if pairing.scale is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if pairing.scale is not None:
            scaler.update()
            found.append(scaler.get_scale())
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return found

    def _clip(self, optimizer: Any, bound: float) -> float:
        if self._session is not None:
            return float(optimizer.clip_grad_norm_(bound))
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        norm: Any = nn.utils.clip_grad_norm_(parameters, bound)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _reference(model: Beside, pairing: Pairing) -> Paired:
    model.shard(with_root=pairing.with_root)
    from_first_rank(model.outer)
    # torch's kernel takes no group of both kinds.
    groups = [{"params": list(part.parameters())} for part in model.parts()]
    # Nor has torch a GradScaler for an optimizer of both.
    is_apart = pairing.optimizer_count > 1 or pairing.scale is not None
    parts = [[each] for each in groups] if is_apart else [groups]
    made = [torch.optim.AdamW(part, lr=RATE, fused=True) for part in parts]
    return Paired(model, made, pairing, None)


def _paired(model: Beside, pairing: Pairing, session: memd_client.Session) -> Paired:
    if pairing.is_sharded_first:
        model.shard(with_root=pairing.with_root)
    memd_client.offload(model.outer, session)
    if not pairing.is_sharded_first:
        model.shard(with_root=pairing.with_root)
    named = [model] if pairing.optimizer_count == 1 else model.parts()
    made = [memd_client.AdamW(part.named_parameters(), lr=RATE, session=session) for part in named]
    return Paired(model, made, pairing, session)


def beside(address: str) -> dict[str, Any]:
    """Differences to torch of each pairing, and of a job that goes on."""
    found: dict[str, Any] = {}
    for name, pairing in PAIRINGS.items():
        torch.manual_seed(0)
        model = Beside()
        reference = _reference(copy.deepcopy(model), pairing)
        differences = []
        for is_fresh in (True, False):
            torch.manual_seed(0)
            model, first = Beside(), 0 if is_fresh else STEPS
            with memd_client.connect(address, job="beside", fresh=is_fresh, **QUOTAS) as session:
                trained = _paired(model, pairing, session)
                if pairing.scale is not None and not is_fresh:
                    trained._scaler.load_state_dict(reference._scaler.state_dict())
                for step in range(first, first + STEPS):
                    wanted, made = reference.step(step), trained.step(step)
                    if repr(made) != repr(wanted):
                        differences.append(f"step {step}: {made}, not {wanted}")
                own = {key: value.clone() for key, value in values(model).items()}
                differences += different(own, values(reference.model))
                distributed.barrier()
        found[name] = differences
    return found


def mixed_up(address: str) -> dict[str, Any]:
    """Modules that are offloaded and sharded at once, and one norm of both kinds."""
    found: dict[str, Any] = {}
    tokens = batch(0)
    with connected(address) as session:
        found["sharded"] = error_of(partial(memd_client.offload, sharded(Small()), session))
        part = Beside()
        fully_shard(part.body)
        found["in part"] = error_of(partial(memd_client.offload, part, session))
    with connected(address) as session:
        model = memd_client.offload(Small(), session)
        fully_shard(model)
        make = partial(memd_client.AdamW, model.named_parameters(), session=session)
        found["offloaded"] = error_of(make)
    with connected(address) as session:
        trained = _paired(Beside(), Pairing(), session)
        (optimizer,) = trained._optimizers
        trained.model(tokens).backward()
        found["clip"] = error_of(partial(optimizer.clip_grad_norm_, 1.0))
        optimizer.step()
        found["step"] = session.committed_step
    return found


class Wide(nn.Module):
    """Three ranks can share its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96, bias=False)
        self.last = nn.Linear(96, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.last(self.first(nn.functional.one_hot(tokens, 64).float()).tanh())
        loss: torch.Tensor = found.square().mean()
        return loss


def killed(address: str) -> dict[str, Any]:
    """See `_trained_until_killed`. What the others are told."""
    try:
        return _trained_until_killed(address)
    except memd_client.MemdError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _trained_until_killed(address: str) -> dict[str, Any]:
    """Trains to STEPS from where the job is, and clips. MEMD_DIE is "RANK.STEP": that rank is
    killed there, at MEMD_PLACE."""
    dies = tuple(map(int, os.environ.get("MEMD_DIE", "-1.-1").split(".")))
    torch.manual_seed(0)
    model = sharded(Wide())
    with memd_client.connect(address, job="killed", **QUOTAS) as session:
        optimizer = memd_client.AdamW(model.named_parameters(), lr=RATE, session=session)
        first = session.committed_step
        losses = []
        for step in range(first, STEPS):
            place = ""
            if dies == (distributed.get_rank(), step):
                place = os.environ["MEMD_PLACE"]
                DYING[place](session)
            # Those of torch name nobody: the next call of memd does.
            with suppress(RuntimeError):
                loss = model(batch(step))
                loss.backward()
                losses.append(float(loss.detach()))
            if place == "after backward":
                die()
            optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
            if session.committed_step != step + 1:
                raise AssertionError(f"{session.committed_step} after step {step}")
        distributed.barrier()
        return {"first": first, "losses": losses, "sum": total(values(model))}


def die(*given: Any, **named: Any) -> None:
    del given, named
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_backward(session: memd_client.Session) -> None:
    del session
    vars(distributed)["reduce_scatter_single"] = die


def _die_in_norm(session: memd_client.Session) -> None:
    del session
    vars(nn.utils)["get_total_norm"] = die


def _die_in_exchange(session: memd_client.Session) -> None:
    vars(session.transaction.job.ranks)["exchange"] = die


def _die_in_seal(session: memd_client.Session) -> None:
    """Its range of one gradient is in memd then, and of the other is not."""
    targets = session.transaction.job.shards.parameters
    vars(max(targets, key=lambda each: each.shard.shard_id))["seal"] = die


def _die_when_sent(session: memd_client.Session) -> None:
    """The daemon has its step, and the others may not have sent theirs."""
    control = session.transaction.job.control
    begin_step = control.begin_step

    def begin(request: session_pb2.StepRequest) -> StepCall:
        call = begin_step(request)
        time.sleep(0.5)  # it is on its way
        die()
        return call

    vars(control)["begin_step"] = begin


DYING: dict[str, Callable[[memd_client.Session], None]] = {
    "in backward": _die_in_backward,
    "after backward": lambda session: None,
    "in exchange": _die_in_exchange,
    "in clipping": _die_in_norm,
    "in step": _die_in_seal,
    "in commit": _die_when_sent,
}


PROGRAMS: tuple[Callable[[str], dict[str, Any]], ...] = (
    bits,
    saved,
    committed,
    ignored,
    dtypes,
    beside,
    mixed_up,
    refused,
)


def everything(address: str) -> dict[str, Any]:
    """The findings of each program, by its name. Each may take as long as one."""
    found = {}
    for program in PROGRAMS:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        found[program.__name__] = program(address)
    return found


if __name__ == "__main__":
    alone = {each.__name__: each for each in (elastic, killed, *PROGRAMS)}
    main({"all": everything, **alone})
