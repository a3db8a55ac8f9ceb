"""Programs that each rank of a job runs.

    python -m tests.integration.rank_programs NAME ADDRESS FILE

RANK and WORLD_SIZE are in the environment. FILE is where the ranks meet; torchrun's ranks pass "-".
Prints what it found as one line of JSON.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import memd_client
from memd_client.connection.shard import Shard, shard_spec
from memd_client.core import leases
from memd_client.parameters import unnamed
from memd_native import PART_GRADIENT
from memd_proto.v1.types_pb2 import SHARD_KIND_BLOB as BLOB

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# Changes the gradients of a model, and returns the numbers that it has read.
Change = Callable[[nn.Module], list[float]]
STEPS = 5
# A rank that hangs says where and ends, before the test's patience does.
HANG_S = 90
QUOTAS: dict[str, Any] = {"host_bytes": "48MiB", "nvme_bytes": "64MiB"}


class Tied(nn.Module):
    """A language model in small: its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.head(self.body(self.embedding(tokens)))
        return nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Branching(nn.Module):
    """Ranks use different experts, one of which nobody uses, beside batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.large = nn.Linear(16, 20_000)  # a bucket of its own

    def expert_of(self, tokens: torch.Tensor) -> int:
        del tokens
        return distributed.get_rank()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        expert = self.experts[self.expert_of(tokens)]
        found = self.large(expert(self.norm(tokens.float()[:, :16])))
        loss: torch.Tensor = found.square().mean()
        return loss


class Routed(Branching):
    """Each micro-batch has its expert: what a rank accumulates, its last backward may not use."""

    def expert_of(self, tokens: torch.Tensor) -> int:
        return int(tokens[0, 0]) % len(self.experts)


class Adapted(nn.Module):
    """A frozen model with trained low-rank adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)
        self.requires_grad_(False)
        self.down = nn.Linear(16, 4, bias=False)
        self.up = nn.Linear(4, 50, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embedding(tokens[:, :-1])
        found = self.head(found) + self.up(self.down(found))
        return nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, micro: int = 0) -> torch.Tensor:
    seed = 1000 * step + 100 * micro + distributed.get_rank()
    return torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(seed))


def batches(step: int, count: int) -> list[torch.Tensor]:
    """Micro-batches of this rank."""
    return [batch(step, micro) for micro in range(count)]


def average(model: nn.Module) -> None:
    """The rule: each gradient times 1/world, then the sum in the order of ranks."""
    world = distributed.get_world_size()
    for parameter in model.parameters():
        part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / 1
        part *= 1.0 / world
        parts = [torch.empty_like(part) for _ in range(world)]
        distributed.all_gather(parts, part)
        is_used = torch.tensor(float(parameter.grad is not None))
        distributed.all_reduce(is_used)
        total = parts[0].clone()
        for other in parts[1:]:
            total += other
        parameter.grad = total if is_used else None


def from_first_rank(model: nn.Module, *, buffers_only: bool = False) -> None:
    tensors = list(model.buffers()) + ([] if buffers_only else list(model.parameters()))
    with torch.no_grad():
        for tensor in tensors:
            distributed.broadcast(tensor, 0)


class Reference:
    """Plain torch that follows the rule."""

    def __init__(self, model: nn.Module, clip: float | None, change: Change | None = None) -> None:
        self._model = model
        self._clip = clip
        self._change = change
        from_first_rank(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def backward(self, micro_batches: list[torch.Tensor]) -> list[float]:
        """Accumulates and averages. Returns the losses."""
        from_first_rank(self._model, buffers_only=True)
        losses: list[torch.Tensor] = []
        for tokens in micro_batches:
            losses.append(self._model(tokens))
            losses[-1].backward()
        average(self._model)
        return [float(loss) for loss in losses]

    def step(self, micro_batches: list[torch.Tensor]) -> list[float]:
        """Returns the losses, and the norm of the gradients if they are clipped."""
        found = self.backward(micro_batches)
        if self._change is not None:
            found += self._change(self._model)
        if self._clip is not None:
            found.append(float(nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return found

    def evaluate(self, tokens: torch.Tensor) -> float:
        """Every rank evaluates with the first one's buffers."""
        from_first_rank(self._model, buffers_only=True)
        self._model.eval()
        with torch.no_grad():
            return float(self._model(tokens))

    def state(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict()


class WithTorch(Reference):
    """The same with DistributedDataParallel."""

    def __init__(self, model: nn.Module, clip: float | None, change: Change | None = None) -> None:
        super().__init__(model, clip, change)
        self._wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    def backward(self, micro_batches: list[torch.Tensor]) -> list[float]:
        return _accumulate(self._wrapped, self._wrapped.no_sync, micro_batches)


def _accumulate(
    model: nn.Module,
    no_sync: Callable[[], AbstractContextManager[None]],
    micro_batches: list[torch.Tensor],
) -> list[float]:
    losses = []
    for micro, tokens in enumerate(micro_batches):
        with nullcontext() if micro == len(micro_batches) - 1 else no_sync():
            loss = model(tokens)
            loss.backward()
        losses.append(float(loss))
    return losses


def accumulation(address: str) -> dict[str, Any]:
    """`bits` of steps of three micro-batches."""
    return bits(address, (Tied, Routed, Adapted), micro_count=3)


def bits(
    address: str,
    models: tuple[Callable[[], nn.Module], ...] = (Tied, Branching, Adapted),
    *,
    micro_count: int = 1,
) -> dict[str, Any]:
    """Differences to the rule, and to DistributedDataParallel where gloo sums in this order."""
    found = {}
    for made in models:
        for clip in (None, 0.05):
            torch.manual_seed(distributed.get_rank())  # first values are rank 0's
            model = made()
            references = [Reference(copy.deepcopy(model), clip)]
            if distributed.get_world_size() == 2:
                references.append(WithTorch(copy.deepcopy(model), clip))
            job = f"{type(model).__name__}-{clip}-{distributed.get_world_size()}"
            with memd_client.connect(address, job=job, **QUOTAS) as session:
                found[job] = _differences(model, session, references, clip, micro_count)
    return found


def _differences(
    model: nn.Module,
    session: memd_client.Session,
    references: list[Reference],
    clip: float | None,
    micro_count: int,
    change: Change | None = None,
) -> list[str]:
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        wanted = [each.step(batches(step, micro_count)) for each in references]
        made = _accumulate(model, session.no_sync, batches(step, micro_count))
        if change is not None:
            made += change(model)
        if clip is not None:
            made.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
        found += [f"step {step}: {made}, not {each}" for each in wanted if each != made]
    model.eval()
    with torch.no_grad():
        # One after the other: a rank may evaluate alone.
        for rank in range(distributed.get_world_size()):
            if rank == distributed.get_rank():
                evaluated = float(model(batch(STEPS)))
            distributed.barrier()
    wanted_evaluated = [each.evaluate(batch(STEPS)) for each in references]
    found += [f"{evaluated} is not {each}" for each in wanted_evaluated if each != evaluated]
    own = model.state_dict()
    for reference in references:
        others = reference.state()
        found += [
            f"{type(reference).__name__}: {name}"
            for name, value in own.items()
            if not torch.equal(value.clone(), others[name])
        ]
    return found


def reduced(address: str) -> dict[str, Any]:
    """`resident` with memd's communication hook."""
    return resident(address, hook=memd_client.reduce_hook)


def resident(
    address: str, hook: Callable[[memd_client.Session], Any] | None = None
) -> dict[str, Any]:
    """Differences to torch's optimizer of models that stay in each rank's process, wrapped in
    DistributedDataParallel: a job that is trained, and goes on with new models."""
    found = {}
    for made in (Tied, Routed, Adapted):
        for clip in (None, 0.05):
            torch.manual_seed(distributed.get_rank())
            reference = (WithTorch if hook is None else Reference)(made(), clip)
            job = f"{made.__name__}-{clip}"
            found[job] = [
                *_resident_differences(address, job, made(), reference, clip, 0, hook),
                *_resident_differences(address, job, made(), reference, clip, STEPS, hook),
            ]
    return found


def _resident_differences(
    address: str,
    job: str,
    model: nn.Module,
    reference: Reference,
    clip: float | None,
    first: int,
    hook: Callable[[memd_client.Session], Any] | None,
) -> list[str]:
    found = []
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    if not first:
        model.load_state_dict(reference.state())
    elif isinstance(model, Routed):
        model.norm.load_state_dict(reference._model.get_submodule("norm").state_dict())
    with memd_client.connect(address, job=job, **QUOTAS) as session:
        optimizer = memd_client.AdamW(wrapped.named_parameters(), lr=1e-2, session=session)
        if hook is not None:
            wrapped.register_comm_hook(None, hook(session))
        if session.committed_step != first:
            found.append(f"found at step {session.committed_step}")
        for step in range(first, first + STEPS):
            wanted = reference.step(batches(step, 2))
            if step % 2 and not list(model.buffers()):
                _accumulate(wrapped, wrapped.no_sync, [batch(99)])
                optimizer.zero_grad()  # no step takes these
            made = _accumulate(wrapped, wrapped.no_sync, batches(step, 2))
            if clip is not None:
                if step % 2:
                    made.append(float(optimizer.clip_grad_norm_(clip)))
                else:
                    made.append(float(nn.utils.clip_grad_norm_(wrapped.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
            if made != wanted:
                found.append(f"step {step}: {made}, not {wanted}")
        distributed.barrier()
    others = reference.state()
    return found + [
        f"step {first}: {name}"
        for name, value in model.state_dict().items()
        if not torch.equal(value, others[name])
    ]


def apart(address: str) -> dict[str, Any]:
    """Models of ranks that nobody wraps: the error of each call, and what can be done then."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    torch.manual_seed(rank)
    model = nn.Linear(4, 2)
    with memd_client.connect(address, job="apart", **QUOTAS) as session:

        def optimizer_of(width: int) -> memd_client.AdamW:
            return memd_client.AdamW(nn.Linear(4, width).named_parameters(), session=session)

        found["shapes"] = error_of(lambda: optimizer_of(2 + rank))
        optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
        found["first"] = model.weight.detach().tolist()

        def backward(scale: float) -> None:
            optimizer.zero_grad()
            (model(torch.ones(1, 4)) * scale).sum().backward()

        backward(1.0 + rank)
        found["gradients"] = error_of(optimizer.step)
        backward(1.0)
        with torch.no_grad():
            model.weight.add_(rank)
        found["values"] = error_of(optimizer.step)
        with torch.no_grad():
            model.weight.sub_(rank).round_().mul_(2)
        if rank:
            model.bias.grad = None
        found["others"] = error_of(optimizer.step)
        if rank:
            optimizer.zero_grad()
        found["none"] = error_of(optimizer.step)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        wrapped = DistributedDataParallel(nn.Linear(4, 3))
        wrapped.register_comm_hook(None, memd_client.reduce_hook(session))
        found["unknown"] = error_of(lambda: wrapped(torch.ones(1, 4)).sum().backward())
        found["step"] = session.committed_step
        found["values after"] = model.weight.detach().tolist()
        distributed.barrier()
    return found


def built(address: str) -> dict[str, Any]:
    """`bits` of models that init() builds, of which nearly nothing stays in the process."""
    unnamed._HOME_BYTES_MAX = 4096
    found = {}
    for made in (Tied, Branching):
        for _ in range(2):  # the second finds the stored values
            torch.manual_seed(distributed.get_rank())
            plain = made()
            drawn = torch.rand(())
            job = made.__name__
            torch.manual_seed(distributed.get_rank())
            with memd_client.connect(address, job=job, **QUOTAS) as session:
                with memd_client.init(session):
                    model = made()
                if torch.rand(()) != drawn:
                    found["random numbers"] = ["differ"]
                shards = session.transaction.job.shards.list_all()
                left = [each.spec.name for each in shards if each.spec.name.startswith("@init/")]
                if not session.committed_step:
                    references: list[Reference] = [Reference(copy.deepcopy(plain), None)]
                    if distributed.get_world_size() == 2:
                        references.append(WithTorch(plain, None))
                    found[job] = left + _differences(model, session, references, None, 1)
                    values = {key: each.clone() for key, each in model.state_dict().items()}
                else:
                    again = model.state_dict()
                    found[f"{job} again"] = left + [
                        key for key, each in values.items() if not torch.equal(each, again[key])
                    ]
                distributed.barrier()
    return found


def broken(address: str) -> dict[str, Any]:
    """One rank leaves init() by an exception, or builds something else: the error of each rank, and
    whether all can build again."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    with memd_client.connect(address, job="broken", **QUOTAS) as session:

        def build(model: Callable[[], nn.Module]) -> nn.Module:
            with memd_client.init(session):
                return model()

        def fail() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), Branching(), nn.Linear(-1 if rank else 8, 8))

        kept = []

        def build_two() -> nn.Module:
            kept.extend([nn.Linear(8, 8) for _ in range(1 + rank)])
            return kept[0]

        if not rank:
            # As a rank of an earlier start has left it that was killed inside init().
            job = session.transaction.job
            (left,) = job.declare(
                [shard_spec("@init/9/0", kind=BLOB, dtype=torch.uint8, shape=[8])]
            )
            job.leases.write(Shard.of(left), torch.zeros(8, dtype=torch.uint8))
        distributed.barrier()
        found["failed"] = error_of(lambda: build(fail))
        found["others"] = error_of(lambda: build(build_two))
        del kept[:]
        found["shapes"] = error_of(lambda: build(lambda: nn.Linear(8, 8 + rank)))
        model = build(lambda: nn.Linear(8, 8))
        optimizer = memd_client.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        found["step"] = session.committed_step
        shards = session.transaction.job.shards.list_all()
        found["left"] = [name for each in shards if (name := each.spec.name).startswith("@init/")]
        distributed.barrier()
    return found


def changes(address: str) -> dict[str, Any]:
    """`bits` of programs that change the average before they step with it, or clip it."""
    found = {}
    for change in (_by_value, _by_norm, _by_norms, _by_hand):
        torch.manual_seed(0)
        model = memd_client.tile_linears(Branching(), bytes_max=500_000)
        references = [Reference(copy.deepcopy(model), 0.05, change)]
        if distributed.get_world_size() == 2:
            references.append(WithTorch(copy.deepcopy(model), 0.05, change))
        job = f"changed{change.__name__}-{distributed.get_world_size()}"
        with memd_client.connect(address, job=job, **QUOTAS) as session:
            found[job] = _differences(model, session, references, 0.05, 1, change)
    return found


def _by_value(model: nn.Module) -> list[float]:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return []


def _by_norm(model: nn.Module) -> list[float]:
    return [float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))]


def _by_norms(model: nn.Module) -> list[float]:
    """Clips one parameter after the other, some, and one tensor."""
    clip = nn.utils.clip_grad_norm_
    parameters = list(model.parameters())
    found = [clip(parameter, 0.02) for parameter in parameters]
    found += [clip(parameters[::2], 0.03), clip(parameters[1:3], 1e-3, norm_type=float("inf"))]
    found.append(clip(parameters[-1:], 0.01, foreach=False))
    gradients = [each.grad for each in parameters[::3] if each.grad is not None]
    found.append(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters[::3], 0.02, found[-1])
    return [float(norm) for norm in found]


def _by_hand(model: nn.Module) -> list[float]:
    """Reads gradients before and after a change, and keeps tensors that stay the gradient."""
    read = []
    kept = []
    for at, parameter in enumerate(model.parameters()):
        gradient = parameter.grad
        if gradient is None:
            if at == 10:  # of the expert that nobody uses
                parameter.grad = torch.full_like(parameter, 0.25)
            continue
        read.append(float(gradient.abs().max()))
        if at % 4 == 0:
            gradient.view(-1)[::2].mul_(0.5)
            gradient /= 3
        elif at % 4 == 1:
            kept.append(gradient.clone() * 2 + 1)
            parameter.grad = kept[-1]
            parameter.grad.sub_(1)
        elif at % 4 == 2:
            parameter.grad = None
        else:
            torch.add(gradient, 0.125, out=gradient)
        if parameter.grad is not None:
            read.append(float(parameter.grad.abs().max()))
    nn.utils.clip_grad_value_(model.parameters(), 0.2)
    return read + [float(each.sum()) for each in kept]


class ScaledReference:
    """Plain torch with a GradScaler, whose gradients are averaged by the rule."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        from_first_rank(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        self._scaler = torch.amp.GradScaler("cpu", **SCALING)

    def backward(self, step: int) -> None:
        from_first_rank(self._model, buffers_only=True)
        for micro in range(2):
            self._scaler.scale(scaled_loss(self._model, step, micro)).backward()
        average(self._model)

    def step(self, step: int, clip: float | None) -> list[float]:
        self.backward(step)
        found = []
        if clip is not None:
            self._scaler.unscale_(self._optimizer)
            found.append(float(nn.utils.clip_grad_norm_(self._model.parameters(), clip)))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return [*found, self._scaler.get_scale()]


class ScaledWithTorch(ScaledReference):
    """The same with DistributedDataParallel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    def backward(self, step: int) -> None:
        with self._wrapped.no_sync():
            self._scaler.scale(scaled_loss(self._wrapped, step, 0)).backward()
        self._scaler.scale(scaled_loss(self._wrapped, step, 1)).backward()


SCALING: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
INFINITE_STEP = 2


def scaled_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """The loss is infinite on the last rank, in one micro-batch."""
    loss: torch.Tensor = model(batch(step, micro))
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    return loss * float("inf") if (step, micro) == (INFINITE_STEP, 0) and is_last else loss


def scaler(address: str) -> dict[str, Any]:
    """Differences to `ScaledReference`, and to DistributedDataParallel as in `bits`."""
    found = {}
    for clip in (None, 0.05):
        torch.manual_seed(0)
        model = Routed()
        references = [ScaledReference(copy.deepcopy(model))]
        if distributed.get_world_size() == 2:
            references.append(ScaledWithTorch(copy.deepcopy(model)))
        with memd_client.connect(address, job=f"scaler-{clip}", **QUOTAS) as session:
            found[str(clip)] = _scaled_differences(model, session, references, clip)
    return found


def _scaled_differences(
    model: nn.Module,
    session: memd_client.Session,
    references: list[ScaledReference],
    clip: float | None,
) -> list[str]:
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", **SCALING)
    found = []
    for step in range(STEPS):
        wanted = [each.step(step, clip) for each in references]
        with session.no_sync():
            scaler.scale(scaled_loss(model, step, 0)).backward()
        scaler.scale(scaled_loss(model, step, 1)).backward()
        made = []
        if clip is not None:
            scaler.unscale_(optimizer)
            made.append(float(optimizer.clip_grad_norm_(clip)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        made.append(scaler.get_scale())
        # The norm of what is not finite is NaN.
        found += [f"step {step}: {made}, not {each}" for each in wanted if str(each) != str(made)]
    own = model.state_dict()
    for reference in references:
        others = reference._model.state_dict()
        found += [
            f"{type(reference).__name__}: {name}"
            for name, value in own.items()
            if not torch.equal(value.clone(), others[name])
        ]
    if scaler.get_scale() == SCALING["init_scale"] * 2 ** (STEPS // 2):
        found.append("no step was skipped")
    return found


def gradients(address: str) -> dict[str, Any]:
    """`p.grad` in bfloat16 after backward, which every rank sees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 8)).bfloat16()
    plain = copy.deepcopy(model)
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(distributed.get_rank()))
    with memd_client.connect(address, job="gradients", **QUOTAS) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters())
        for each in (model, plain):
            each(inputs.bfloat16()).square().mean().backward()
        average(plain)
        equal = _equal_gradients(model, plain)
        # Dropped by all of them, and made anew.
        optimizer.zero_grad()
        is_dropped = all(parameter.grad is None for parameter in model.parameters())
        model(inputs.bfloat16()).square().mean().backward()
        equal += _equal_gradients(model, plain)
        optimizer.step()
        session.commit(wait=True)
        return {"equal": equal, "dropped": is_dropped, "step": session.committed_step}


def _equal_gradients(model: nn.Module, plain: nn.Module) -> list[bool]:
    equal = []
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        equal.append(torch.equal(own.grad.clone(), other.grad))
    return equal


def train(address: str) -> dict[str, Any]:
    """See `_trained`."""
    try:
        return _trained(address)
    except memd_client.MemdError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _trained(address: str) -> dict[str, Any]:
    """Trains to STEPS from where the job is, MEMD_MICRO micro-batches each. MEMD_DIE is
    "RANK.STEP": that rank is killed there, in its first start, at MEMD_PLACE: in the last
    "backward", between the "first" and the second, or while it adds to the "sum" of all. MEMD_KILL
    is a step at which rank 0 kills the daemon."""
    dies = tuple(map(int, os.environ.get("MEMD_DIE", "-1.-1").split(".")))
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        dies = (-1, -1)
    place = os.environ.get("MEMD_PLACE", "backward")
    micro_count = int(os.environ.get("MEMD_MICRO", "1"))
    second = min(1, micro_count - 1)
    torch.manual_seed(0)
    first_layer = nn.Linear(64, 512)
    model = nn.Sequential(first_layer, nn.Dropout(0.5), nn.Linear(512, 50))
    with memd_client.connect(address, job="train", **QUOTAS) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        session.track(scheduler=scheduler, rng=True)
        torch.manual_seed(100 + distributed.get_rank())
        first = session.resume()
        losses = []
        for step in range(first, STEPS):
            if dies == (distributed.get_rank(), step) and place == "sum":
                _die_in_sum(session)
            for micro in range(micro_count):
                is_last = micro == micro_count - 1
                with nullcontext() if is_last else session.no_sync():
                    loss = model(torch.randn(8, 64)).square().mean()
                    if dies == (distributed.get_rank(), step) and place == "backward" and is_last:
                        first_layer.weight.register_hook(lambda _: _die())
                    is_killed = os.environ.get("MEMD_KILL") == str(step) and micro == second
                    if is_killed and not distributed.get_rank():
                        os.kill(session.daemon_process_id, signal.SIGKILL)
                    loss.backward()
                if dies == (distributed.get_rank(), step) and place == "first":
                    _die()
            optimizer.step()
            scheduler.step()
            session.commit()
            losses.append(float(loss))
        values = [parameter.detach().clone() for parameter in model.parameters()]
        total = sum(value.double().sum() for value in values)
        return {
            "first": first,
            "losses": losses,
            "sum": float(total),
            "rates": scheduler.get_last_lr(),
        }


class Counter:
    """Something to track."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def elastic(address: str) -> dict[str, Any]:
    """Two commits of a job that any number of ranks has trained before: what this rank has found,
    and what it leaves."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with memd_client.connect(address, job="elastic", **QUOTAS) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        samples, epoch = Counter(100 * (rank + 1)), Counter(0)
        session.track(scheduler=scheduler, samples=samples, epoch=epoch, rng=True)
        if not rank:
            session.track(log=Counter(0))
        torch.manual_seed(100 + rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first = session.resume()
        seen = [samples.value, epoch.value, torch.initial_seed() == 100 + rank]
        found: dict[str, Any] = {
            "first": first,
            "sum": float(model.weight.detach().double().sum()),
            "rates": [*scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]],
            "seen": seen,
            "drawn": float(torch.rand(())),
            "warned": [str(each.message) for each in caught if "made commit" in str(each.message)],
        }
        epoch.value = first
        for _ in range(2):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            scheduler.step()
            samples.value += 1
            epoch.value += 1
            session.commit()
        distributed.barrier()
        found["stored"] = sorted(
            shard.spec.name.removesuffix("@staged")
            for shard in session.transaction.job.shards.list_all()
            if shard.spec.name.startswith("memd.tracked.")
        )
        found["left"] = float(model.weight.detach().double().sum())
        state = torch.get_rng_state()
        found["next"] = float(torch.rand(()))
        torch.set_rng_state(state)
        distributed.barrier()
    return found


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_sum(session: memd_client.Session) -> None:
    """The next part of this rank is half added when it dies."""
    lease_gradient = session.leases.gradient

    def gradient(shard: Shard, mode: int, *, part: int = PART_GRADIENT) -> torch.Tensor:
        lease = lease_gradient(shard, mode, part=part)
        if part == PART_GRADIENT:
            lease.view(-1)[: lease.numel() // 2].add_(1.0)
            _die()
        return lease

    vars(session.leases)["gradient"] = gradient


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Inside, the default process group has this timeout, as `init_process_group` sets it."""
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=HANG_S))


def late(address: str) -> dict[str, Any]:
    """The first rank is late, at a step and then in a backward; limits are short."""
    leases._TIMEOUT_S = 1.0
    model = nn.Linear(4, 4)
    found = []
    with limit(4.0):
        session = memd_client.connect(address, job="late", **QUOTAS)
    with session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        is_late = distributed.get_rank() == 0
        model(torch.ones(2, 4)).sum().backward()
        if not is_late:
            optimizer.step()
            found.append(error_of(lambda: session.committed_step))
        distributed.barrier()
        if is_late:
            optimizer.step()
        step = session.committed_step
        distributed.barrier()
        if not is_late:
            found.append(error_of(lambda: model(torch.ones(2, 4)).sum().backward()))
        distributed.barrier()
    return {"found": found, "step": step}


def refusals(address: str) -> dict[str, Any]:
    """Calls that several ranks may not make, each with its error on this rank."""
    rank = distributed.get_rank()
    found: dict[str, str] = {}

    def refuse(name: str, call: Callable[[], Any]) -> None:
        found[name] = error_of(call)
        distributed.barrier()

    refuse("embedded", lambda: memd_client.connect("embedded:", job="x"))
    refuse("settings", lambda: memd_client.connect(address, job=f"of-{rank}"))
    refuse("world", lambda: memd_client.connect(address, job="x", world_size=5))
    with warnings.catch_warnings(record=True) as caught:
        session = memd_client.connect(address, job="refused", **QUOTAS)
    found["store"] = "; ".join(str(each.message) for each in caught)
    with session:
        refuse("models", lambda: memd_client.offload(nn.Linear(4, 4 + rank), session))
        model = memd_client.offload(nn.Linear(4, 4), session)
        refuse("early", lambda: memd_client.AdamW(model.parameters(), step_in_backward=True))
        outer = nn.Sequential(nn.Linear(4, 4), model)
        wrapped = DistributedDataParallel(outer, init_sync=False)
        refuse("wrapped", lambda: wrapped(torch.ones(2, 4)))
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        if rank:
            found["write"] = error_of(lambda: model.load_state_dict(nn.Linear(4, 4).state_dict()))
        distributed.barrier()

        def backward() -> None:
            model(torch.ones(2, 4)).sum().backward()

        backward()
        refuse("second", backward)
        optimizer.zero_grad()
        backward()
        gradient = model.weight.grad
        assert gradient is not None
        before = gradient.clone()
        refuse("grad", lambda: gradient.mul_(2 + rank))
        refuse("assigned", lambda: setattr(model.weight, "grad", torch.full((4, 4), 1.0 + rank)))
        other = None if rank else torch.ones(4, 4)
        refuse("dropped", lambda: setattr(model.weight, "grad", other))
        other = model.bias if rank else model.weight
        refuse("other", lambda: setattr(other, "grad", None))
        refuse("failed", lambda: gradient.add_(torch.ones(4 if rank else 3)))
        refuse("memory", gradient.numpy)
        refuse("shared", lambda: setattr(model.bias, "grad", gradient[0]))
        refuse("zeros", lambda: optimizer.zero_grad(set_to_none=False))
        found["same"] = str(torch.equal(before, gradient.clone()))
        mine = before.clone()
        model.weight.grad = mine
        mine.add_(1)
        refuse("left", optimizer.step)
        model.weight.grad = before
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (1 + rank))
        scaler.scale(torch.ones(()))
        refuse("scaler", lambda: scaler.unscale_(optimizer))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (1 + rank))
        scaler.scale(torch.ones(()))
        refuse("scaled step", lambda: scaler.step(optimizer))
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        optimizer.step()
        refuse("rates", lambda: session.committed_step)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        found["step"] = str(session.committed_step)
        distributed.barrier()
    return found


def spilled(address: str) -> dict[str, Any]:
    """The sums of two ranks, of 16 MiB each, beside as much of values and of gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    quotas: dict[str, Any] = {"host_bytes": "48MiB", "nvme_bytes": "400MiB"}
    equal = []
    with memd_client.connect(address, job="spilled", **quotas) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-3)
        for step in range(2):
            torch.manual_seed(10 * step + distributed.get_rank())
            inputs = [torch.randn(8, 1024) for _ in range(3)]
            for each in inputs:
                plain(each).square().mean().backward()
            average(plain)
            for each in inputs[:-1]:
                with session.no_sync():
                    model(each).square().mean().backward()
            model(inputs[-1]).square().mean().backward()
            equal.append(all(_equal_gradients(model, plain)))
            for one in (reference, optimizer):
                one.step()
                one.zero_grad()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        equal.append(all(torch.equal(own.detach().clone(), other) for own, other in pairs))
        return {"equal": equal, "step": session.committed_step}


def counts(address: str) -> dict[str, Any]:
    """Ranks that accumulate differently: the error of each call on this rank."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    inputs = torch.full((2, 4), 1.0 + rank)
    with memd_client.connect(address, job="counts", **QUOTAS) as session:
        model = memd_client.offload(nn.Linear(4, 4), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)

        def backward() -> None:
            model(inputs).sum().backward()

        def accumulate(count: int) -> None:
            for _ in range(count):
                with session.no_sync():
                    backward()

        # One rank may drop what it has accumulated.
        if rank:
            accumulate(1)
            optimizer.zero_grad()
        accumulate(2)
        own = model.weight.grad
        assert own is not None
        found["own"] = own.clone().tolist()
        own.mul_(2.0 + rank)
        kept = own.clone() * 2
        model.weight.grad = kept
        own = model.weight.grad
        own.div_(2)
        found["kept"] = torch.equal(kept, own.clone())
        with session.no_sync():
            found["held"] = error_of(backward)
        del kept
        backward()
        found["averaged"] = own.clone().tolist()
        found["again"] = error_of(lambda: accumulate(1))
        optimizer.step()
        accumulate(1 + rank)
        found["other count"] = error_of(backward)
        optimizer.zero_grad()
        accumulate(1)
        found["never averaged"] = error_of(optimizer.step)
        optimizer.zero_grad()
        accumulate(1 + rank)
        found["one never averages"] = error_of(optimizer.step if rank else backward)
        optimizer.zero_grad()
        loss = model(inputs).sum()
        with session.no_sync():
            found["forward outside"] = error_of(loss.backward)
            loss = model(inputs).sum()
        found["backward outside"] = error_of(loss.backward)
        accumulate(1)
        # A rank without a last gradient: what it has accumulated counts.
        if rank == 0:
            backward()
        gradient_sum = optimizer.clip_grad_norm_(1e9)
        found["norm"] = float(gradient_sum)
        optimizer.step()
        found["step"] = session.committed_step
        distributed.barrier()
    return found


class Shifted(nn.Module):
    """A layer with a buffer."""

    shift: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), value))
        self.register_buffer("shift", torch.full((4,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.shift


class Unordered(nn.Module):
    """Its layers come in another order on each rank, as from a set."""

    VALUES: ClassVar = {"first": 1.0, "second": 2.0}

    def __init__(self) -> None:
        super().__init__()
        names = sorted(self.VALUES, reverse=distributed.get_rank() == 1)
        self.layers = nn.ModuleDict({name: Shifted(self.VALUES[name]) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.layers["first"](x).sum() + 5 * self.layers["second"](x).sum()
        return total


def orders(address: str) -> dict[str, Any]:
    """Ranks order their layers differently: returns the error or the values of each call."""
    rank = distributed.get_rank()
    model = Unordered()
    with memd_client.connect(address, job="orders", **QUOTAS) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(2, 4)).backward()
        found: dict[str, Any] = {
            "buffers": {
                name: layer.get_buffer("shift").tolist() for name, layer in model.layers.items()
            },
            "clip": error_of(lambda: optimizer.clip_grad_norm_(0.5)),
        }
        optimizer.step()
        found["step"] = error_of(lambda: session.committed_step)
        distributed.barrier()
        if rank:
            optimizer.param_groups[0]["params"].reverse()
        found["arguments"] = error_of(lambda: optimizer.clip_grad_norm_(0.5 * (1 + rank)))
        found["norm"] = float(optimizer.clip_grad_norm_(0.5))
        optimizer.step()
        found["committed"] = session.committed_step
        distributed.barrier()
    return found


def loads(address: str) -> dict[str, Any]:
    """Rank 0 loads a checkpoint in the middle, while the others wait. MEMD_FILE is that file."""
    torch.manual_seed(distributed.get_rank())
    model = Shifted(1.0)
    with memd_client.connect(address, job="loads", **QUOTAS) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)

        def step() -> None:
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        before = session.committed_step
        distributed.barrier()
        if not distributed.get_rank():
            memd_client.load_safetensors(model, os.environ["MEMD_FILE"], session)
        distributed.barrier()
        loaded = model.weight.detach().flatten().tolist()
        step()
        after = session.committed_step
        values = model.weight.detach().flatten().tolist()
        distributed.barrier()
    return {"steps": [before, after], "loaded": loaded, "values": values}


def error_of(call: Callable[[], Any]) -> str:
    """For people."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # it is what the program prints
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(programs: dict[str, Any]) -> None:
    """Runs the one that this process was started for."""
    name, address, meeting = sys.argv[1:]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    distributed.init_process_group(
        "gloo",
        init_method="env://" if meeting == "-" else f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found = {"rank": distributed.get_rank(), **programs[name](address)}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if "error" in found:
        time.sleep(0.5)  # others report what they have seen of the daemon, not of this end
        os._exit(1 if meeting == "-" else 0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(globals())
