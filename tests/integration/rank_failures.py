"""Programs in which a call of one rank fails or comes late, and in which all ranks go on then.

    python -m tests.integration.rank_failures NAME ADDRESS FILE

See `rank_programs`. "all" and "late" run several of them, one after the other.
"""

from __future__ import annotations

import copy
import faulthandler
import time
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import memd_client
from memd_client.core.leases import MODE_READ, MODE_WRITE
from memd_client.parameters.parameter import StreamedParameter
from memd_native import PART_GRADIENT
from tests.integration.rank_programs import (
    HANG_S,
    QUOTAS,
    Branching,
    Counter,
    Reference,
    batch,
    batches,
    error_of,
    limit,
    main,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memd_client.connection.calls import StepCall
    from memd_client.connection.shard import Shard
    from memd_client.transaction.transaction import Staging, Transaction
    from memd_proto.v1 import session_pb2


@contextmanager
def connected(
    address: str, limit_s: float = 5.0, *, fresh: bool = True
) -> Iterator[memd_client.Session]:
    """To a new job, or the last one. Ranks wait for each other for so long."""
    with limit(limit_s):
        session = memd_client.connect(address, job="failures", fresh=fresh, **QUOTAS)
    with session:
        yield session
        distributed.barrier()
    distributed.barrier()


class Trained:
    """A small offloaded model of this rank, and the errors of its calls."""

    def __init__(
        self,
        session: memd_client.Session,
        model: nn.Module | None = None,
        *,
        layers: int | None = None,
    ) -> None:
        """The optimizer has the parameters of the first `layers`, or all."""
        torch.manual_seed(0)
        self.session = session
        self.model = memd_client.offload(model or nn.Linear(4, 4), session)
        parameters = list(self.model.parameters())[: None if layers is None else 2 * layers]
        self.optimizer = memd_client.AdamW(parameters, lr=1e-2)
        self.errors: dict[str, str] = {}

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()

    def refuse(self, name: str, call: Callable[[], Any]) -> None:
        self.errors[name] = error_of(call)

    def gradients(self) -> list[Any]:
        found = [parameter.grad for parameter in self.model.parameters()]
        return [each.clone().tolist() for each in found if each is not None]

    def found(self) -> dict[str, Any]:
        return {**self.errors, "step": self.session.committed_step}


@contextmanager
def failing(session: memd_client.Session, mode: int, *ranks: int) -> Iterator[None]:
    """Inside, these ranks lease no gradient in this mode."""
    leases = session.leases  # asked for once: it waits for the step in flight
    lease_gradient = leases.gradient

    def gradient(
        shard: Shard, asked: int = MODE_READ, *, part: int = PART_GRADIENT
    ) -> torch.Tensor:
        if asked == mode and distributed.get_rank() in ranks:
            raise memd_client.CapacityError("no room")
        return lease_gradient(shard, asked, part=part)

    vars(leases)["gradient"] = gradient
    try:
        yield
    finally:
        del vars(leases)["gradient"]


def one_raises(address: str) -> dict[str, Any]:
    """Between two exchanges of clipping, unscaling or a change of `p.grad`."""
    rank = distributed.get_rank()
    with connected(address) as session:
        trained = Trained(session)
        refuse, optimizer = trained.refuse, trained.optimizer
        weight = trained.model.get_parameter("weight")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        trained.backward()
        assert weight.grad is not None
        mine = weight.grad.clone()
        weight.grad = mine
        if rank == 1:
            mine.add_(1)
        refuse("clip", lambda: optimizer.clip_grad_norm_(1.0))
        refuse("unscale", lambda: scaler.unscale_(optimizer))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        weight.grad = torch.full((4, 4), 2.0)
        refuse("shape", lambda: setattr(weight, "grad", torch.ones(4, 4 + rank)))
        with failing(session, MODE_READ, 1):
            refuse("norm", lambda: optimizer.clip_grad_norm_(1.0))
        trained.errors["unchanged"] = str(trained.gradients())
        with failing(session, MODE_WRITE, 1):
            refuse("scale", lambda: optimizer.clip_grad_norm_(1.0))
        for name, again in _uses(trained):
            refuse(f"{name} after scale", again)
        optimizer.zero_grad()
        trained.backward()
        with failing(session, MODE_WRITE, 1):
            refuse("divide", lambda: scaler.unscale_(optimizer))
        refuse("step after divide", optimizer.step)
        optimizer.zero_grad()
        trained.backward()
        gradient = trained.model.get_parameter("bias").grad
        assert gradient is not None
        with failing(session, MODE_WRITE, 0, 1):
            refuse("write", lambda: gradient.mul_(2))
        refuse("step after write", optimizer.step)
        optimizer.zero_grad()
        for name, change in (
            ("clip", lambda: optimizer.clip_grad_norm_(1.0)),
            ("unscale", lambda: _new_scaler().unscale_(optimizer)),
        ):
            trained.backward()
            with not_following(session, "weight"):
                refuse(f"follow {name}", change)
            refuse(f"step after follow {name}", optimizer.step)
            optimizer.zero_grad()
        refuse("kept after write", gradient.clone)
        trained.backward()
        optimizer.step()
        return trained.found()


def _new_scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    return scaler


@contextmanager
def not_following(session: memd_client.Session, name: str) -> Iterator[None]:
    """Inside, rank 1 can't show in a tensor of its own what rank 0 has made of a gradient."""
    if not distributed.get_rank():
        yield
        return
    slot = next(
        each.gradient
        for each in session.transaction.job.shards.parameters
        if isinstance(each, StreamedParameter) and each.shard.name == name
    )
    vars(slot)["show_in_assigned"] = Mock(side_effect=memd_client.CapacityError("no room"))
    try:
        yield
    finally:
        del vars(slot)["show_in_assigned"]


def _uses(trained: Trained) -> list[tuple[str, Callable[[], Any]]]:
    return [
        ("read", trained.gradients),
        ("clip", lambda: trained.optimizer.clip_grad_norm_(1.0)),
        ("step", trained.optimizer.step),
        ("backward", trained.backward),
    ]


def one_raises_in_tiles(address: str) -> dict[str, Any]:
    """As `one_raises`, of a parameter that is in memd in tiles."""
    rank = distributed.get_rank()
    with connected(address) as session:
        trained = Trained(session, memd_client.tile_linears(nn.Linear(4, 8), bytes_max=64))
        weight = trained.model.get_parameter("weight")
        trained.backward()
        gradient = weight.grad
        assert gradient is not None
        trained.refuse("shape", lambda: setattr(weight, "grad", torch.ones(8, 4 + rank)))
        trained.refuse("operation", lambda: gradient.add_(torch.ones(3 if rank else 4)))
        mine = gradient.clone()
        weight.grad = mine
        if rank:
            mine.add_(1)
        trained.refuse("clip", lambda: trained.optimizer.clip_grad_norm_(1.0))
        weight.grad = torch.full((8, 4), 2.0)
        trained.errors["unchanged"] = str(torch.equal(weight.grad.clone(), torch.full((8, 4), 2.0)))
        trained.optimizer.step()
        return trained.found()


def late_drop(address: str) -> dict[str, Any]:
    """Rank 1 comes late to a drop of gradients, which rank 0 then makes again."""
    is_late = distributed.get_rank() == 1
    with connected(address, 3.0) as session:
        trained = Trained(session)
        zero_grad = trained.optimizer.zero_grad
        trained.backward()
        if not is_late:
            trained.refuse("late", zero_grad)
        distributed.barrier()
        if is_late:
            zero_grad()
        else:
            trained.refuse("again", zero_grad)
        trained.backward()
        if not is_late:
            trained.refuse("late again", zero_grad)
        distributed.barrier()
        if is_late:
            zero_grad()
        trained.backward()  # where rank 0 makes that call again
        trained.optimizer.step()
        return trained.found()


def late_end(address: str) -> dict[str, Any]:
    """Rank 1 comes late to the end of a backward, of which rank 0 has dropped the gradients."""
    is_late = distributed.get_rank() == 1
    with connected(address, 3.0) as session:
        trained = Trained(session)
        if not is_late:
            trained.refuse("late", trained.backward)
        distributed.barrier()
        trained.refuse("apart", trained.backward if is_late else trained.optimizer.zero_grad)
        trained.refuse("zero_grad", trained.optimizer.zero_grad)
        trained.backward()
        trained.optimizer.step()
        return trained.found()


def two_optimizers(address: str) -> dict[str, Any]:
    """Ranks accumulate differently, and only rank 0 has gradients of the second optimizer."""
    rank = distributed.get_rank()
    with connected(address) as session:
        trained = Trained(session, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), layers=1)
        model, first = trained.model, trained.optimizer
        second = memd_client.AdamW(model.get_submodule("1").parameters())

        def backward() -> None:
            used = model.get_submodule("0") if rank else model
            used(torch.ones(2, 4)).sum().backward()

        def backward_apart() -> None:
            for _ in range(1 + rank):
                with session.no_sync():
                    backward()
            backward()

        trained.refuse("apart", backward_apart)
        trained.refuse("first", first.zero_grad)
        trained.refuse("second", second.zero_grad)
        trained.refuse("apart again", backward_apart)
        trained.refuse("module", model.zero_grad)
        backward()
        first.step()
        second.step()
        return trained.found()


def unscaled(address: str) -> dict[str, Any]:
    """A GradScaler over what a rank has accumulated, over a tensor that was assigned, and over
    gradients that a skipped step has left."""
    rank = distributed.get_rank()
    with connected(address) as session:
        trained = Trained(session)
        model, optimizer = trained.model, trained.optimizer
        found: dict[str, Any] = {}

        def backward(factor: float) -> torch.amp.GradScaler:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(model(torch.ones(2, 4)).sum() * factor).backward()
            return scaler

        with session.no_sync():
            scaler = backward(1.0 + rank)
        scaler.unscale_(optimizer)
        found["own"] = trained.gradients()
        optimizer.zero_grad()
        scaler = backward(1.0)
        mine = [torch.full_like(parameter, 8.0) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), mine, strict=True):
            parameter.grad = gradient
        scaler.unscale_(optimizer)
        found["assigned"] = [each.tolist() for each in mine]
        optimizer.zero_grad()
        scaler = backward(float("inf") if rank else 1.0)
        scaler.unscale_(optimizer)
        if rank:
            time.sleep(1)  # rank 0 goes on with a step that the daemon can't close yet
        scaler.step(optimizer)
        scaler.update()
        trained.refuse("left", lambda: scaler.unscale_(optimizer))
        optimizer.zero_grad()
        backward(1.0).step(optimizer)
        return {**found, **trained.found()}


def refused_unchanged(address: str) -> dict[str, Any]:
    """Clipping and checking that are refused, or fail, before any gradient changes."""
    rank = distributed.get_rank()
    with connected(address) as session:
        trained = Trained(session)
        model, optimizer, refuse = trained.model, trained.optimizer, trained.refuse
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(2, 4)).sum() * (float("inf") if rank else 1.0)).backward()
        before = str(trained.gradients())

        def clip(bound: float = 1.0) -> torch.Tensor:
            return optimizer.clip_grad_norm_(bound, error_if_nonfinite=True)

        refuse("infinite", clip)
        refuse("apart", lambda: clip(1.0 + rank))
        parameters = list(model.parameters())
        refuse("torch", partial(nn.utils.clip_grad_norm_, parameters, 1, error_if_nonfinite=True))
        with failing(session, MODE_READ, 1):
            refuse("check", lambda: scaler.step(optimizer))  # it has divided nothing yet
        trained.errors["unchanged"] = str(before == str(trained.gradients()))
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        refuse("finite", lambda: scaler.step(optimizer))
        return trained.found()


def unscaled_apart(address: str) -> dict[str, Any]:
    """`scaler.step()` of models that stay in the processes, where ranks differ, and again."""
    rank = distributed.get_rank()
    model = nn.Linear(4, 2)
    with connected(address) as session:
        optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        assert model.bias.grad is not None
        model.bias.grad.add_(rank)
        found: dict[str, Any] = {"apart": error_of(lambda: scaler.step(optimizer))}
        model.bias.grad.sub_(rank)
        scaler.step(optimizer)
        found["step"] = session.committed_step
        found["gradients"] = [
            each.grad.tolist() for each in model.parameters() if each.grad is not None
        ]
    return found


class Parts(nn.Module):
    """Two heads over one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.left: nn.Module = nn.Linear(6, 6)
        self.right: nn.Module = nn.Linear(6, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.body(tokens.float()[:, :6] / 50).tanh()
        loss: torch.Tensor = self.left(found).square().mean() + self.right(found).abs().mean()
        return loss


def hooked(address: str) -> dict[str, Any]:
    """Two models in DistributedDataParallel with memd's hook, beside an offloaded one."""
    torch.manual_seed(0)
    model = Parts()
    reference = Reference(copy.deepcopy(model), None)
    with connected(address) as session:
        memd_client.offload(model.body, session)
        parameters = list(model.named_parameters())
        optimizer = memd_client.AdamW(parameters, lr=1e-2, session=session)
        wrapped = [DistributedDataParallel(each) for each in (model.left, model.right)]
        model.left, model.right = wrapped
        for each in wrapped:
            each.register_comm_hook(None, memd_client.reduce_hook(session))
        differences = []
        for step in range(3):
            first, second = batches(step, 2)
            with session.no_sync(), wrapped[0].no_sync(), wrapped[1].no_sync():
                losses = [model(first)]
                losses[0].backward()
            losses.append(model(second))
            losses[1].backward()
            optimizer.step()
            optimizer.zero_grad()
            if [float(loss) for loss in losses] != reference.step([first, second]):
                differences.append(f"losses of step {step}")
        wanted = list(reference.state().values())
        differences += [
            name
            for (name, value), other in zip(parameters, wanted, strict=True)
            if not torch.equal(value.detach().clone(), other)
        ]

        def backward_alone() -> None:
            with session.no_sync():
                model(batch(0)).backward()

        found: dict[str, Any] = {"differences": differences, "alone": error_of(backward_alone)}
        found["step"] = session.committed_step
    return found


def static_graph(address: str) -> dict[str, Any]:
    """The hook of a model whose first backward tells of its gradients at its end."""
    with connected(address) as session:
        model = nn.Linear(4, 2)
        wrapped = DistributedDataParallel(model, static_graph=True)
        wrapped.register_comm_hook(None, memd_client.reduce_hook(session))
        optimizer = memd_client.AdamW(model.named_parameters(), session=session)
        found: dict[str, Any] = {
            "static": error_of(lambda: wrapped(torch.ones(2, 4)).sum().backward())
        }
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, memd_client.reduce_hook(session))
        optimizer.zero_grad()
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        found["step"] = session.committed_step
    return found


def second_backward(address: str) -> dict[str, Any]:
    """A second backward, of other parameters than the first or after an assignment."""
    with connected(address) as session:
        trained = Trained(session, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        first, second = trained.model.get_submodule("0"), trained.model.get_submodule("1")
        weight = first.get_parameter("weight")
        first(torch.ones(2, 4)).sum().backward()
        trained.refuse("other", lambda: second(torch.ones(2, 4)).sum().backward())
        trained.optimizer.zero_grad()
        weight.grad = torch.zeros(4, 4)
        trained.refuse("assigned", trained.backward)
        trained.optimizer.zero_grad()
        trained.backward()
        trained.refuse("same", trained.backward)
        trained.optimizer.step()
        return trained.found()


def logged(address: str) -> dict[str, Any]:
    """Rank 0 alone reads gradients that a skipped step and a refused one have left."""
    rank = distributed.get_rank()
    with connected(address) as session:
        trained = Trained(session)
        optimizer = trained.optimizer
        found: dict[str, Any] = {}

        def log(name: str) -> None:
            if not rank:
                found[name] = trained.gradients()
            distributed.barrier()

        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(trained.model(torch.ones(2, 4)).sum() * float("inf")).backward()
        scaler.step(optimizer)
        log("skipped")
        trained.refuse("zero_grad", optimizer.zero_grad)
        trained.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        optimizer.step()
        trained.refuse("rates", lambda: session.committed_step)
        log("refused")
        trained.refuse("clip", lambda: optimizer.clip_grad_norm_(1e9))
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        return {**found, **trained.found()}


def tracked_by_one(address: str) -> dict[str, Any]:
    """Rank 0 alone tracks something, and the same ranks go on with the job."""
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    for is_fresh in (True, False):
        torch.manual_seed(0)
        with connected(address, fresh=is_fresh) as session:
            model = memd_client.offload(nn.Linear(4, 4), session)
            optimizer = memd_client.AdamW(model.parameters())
            counter = Counter(0)
            if not rank:
                session.track(counter=counter)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found["step"] = session.resume()
            found["warned"] = [str(each.message) for each in caught]
            found["count"] = counter.value
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            counter.value += 1
            session.commit()
    return found


class LostAnswer:
    """The answer to a step, which nobody gets who asks once."""

    def __init__(self, call: StepCall) -> None:
        self._call = call
        self._is_lost = False

    def wait_until_sent(self) -> None:
        self._call.wait_until_sent()

    def done(self) -> bool:
        return self._call.done()

    def result(self) -> session_pb2.StepResponse:
        answer = self._call.result()
        if not self._is_lost:
            self._is_lost = True
            raise memd_client.DeadlineExceeded("lost")
        return answer

    def seconds(self) -> float:
        return self._call.seconds()


def repeated(address: str) -> dict[str, Any]:
    """Rank 1 loses the answer to a step, and makes it again while rank 0 has gone on."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    with connected(address) as session:
        optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
        model(torch.ones(1, 4)).sum().backward()
        control = session.transaction.job.control
        begin_step = control.begin_step
        found: dict[str, Any] = {}
        if rank:
            vars(control)["begin_step"] = lambda request: LostAnswer(begin_step(request))
        found["lost"] = error_of(optimizer.step)
        if rank:
            del vars(control)["begin_step"]
            found["again"] = error_of(optimizer.step)
        distributed.barrier()
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        found["step"] = session.committed_step
        found["values"] = model.weight.tolist()
    return found


class Refusing:
    """A part of each commit that one rank may refuse."""

    def __init__(self) -> None:
        self.refuses = False

    def capture(self, number: int, transaction: Transaction) -> Staging:
        del number, transaction
        if self.refuses:
            raise memd_client.InvalidArgument("refused here")
        return list

    def load(self, number: int, transaction: Transaction) -> Callable[[], None]:
        del number, transaction
        return lambda: None

    def holds(self, number: int, transaction: Transaction) -> bool:
        del number, transaction
        return False


# One rank waits here for another that does more; none gives up.
PATIENCE_S = 60.0


@contextmanager
def staging_nothing(session: memd_client.Session, rank: int) -> Iterator[None]:
    """Inside, `rank` finds no room for what a step writes beside its update."""

    def write(shard: Shard, value: torch.Tensor) -> None:
        raise memd_client.CapacityError(f"no room for {shard.label!r}: {value.nbytes}")

    leases = session.leases
    if distributed.get_rank() == rank:
        vars(leases)["write"] = write
    try:
        yield
    finally:
        vars(leases).pop("write", None)


def unsent(address: str) -> dict[str, Any]:
    """One rank fails before its step is sent, and makes it again while the other waits in its
    own."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = Branching()
    reference = Reference(copy.deepcopy(model), None)
    with connected(address, PATIENCE_S) as session:
        trained = Trained(session, model)
        optimizer, refusing = trained.optimizer, Refusing()
        session.transaction.add(refusing)

        def backward(step: int) -> None:
            reference.step([batch(step)])
            optimizer.zero_grad()
            scaler.scale(model(batch(step))).backward()

        def step_again(step: Callable[[], Any], *, on: int) -> None:
            distributed.barrier()  # the other rank has sent its step
            if rank == on:
                refusing.refuses = False
                trained.errors["kept"] = str(len(trained.gradients()))
                step()

        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        backward(0)
        with staging_nothing(session, 0):
            trained.refuse("staged", optimizer.step)
        step_again(optimizer.step, on=0)
        backward(1)
        refusing.refuses = rank == 1
        trained.refuse("refused", optimizer.step)
        step_again(optimizer.step, on=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # which changes no bits
        backward(2)
        refusing.refuses = rank == 1
        trained.refuse("scaled", lambda: scaler.step(optimizer))
        step_again(lambda: scaler.step(optimizer), on=1)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        wanted = reference.state()
        trained.errors["differences"] = str([n for n in own if not torch.equal(own[n], wanted[n])])
        return trained.found()


def unsent_apart(address: str) -> dict[str, Any]:
    """As `unsent`, of a model that stays in the processes, whose gradients ranks compare."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    reference = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-2, fused=True)
    with connected(address, PATIENCE_S) as session:
        optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
        refusing = Refusing()
        session.transaction.add(refusing)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # which changes no bits
        scaler.scale(torch.ones(()))
        found: dict[str, Any] = {}
        for name, factor, step in (
            ("refused", 1.0, optimizer.step),
            ("scaled", 4.0, lambda: scaler.step(optimizer)),
        ):
            for parameter, plain in zip(
                model.parameters(), reference.param_groups[0]["params"], strict=True
            ):
                parameter.grad = torch.full_like(parameter, 2.0 * factor)
                plain.grad = torch.full_like(parameter, 2.0)
            reference.step()
            refusing.refuses = rank == 1
            if rank:
                found[name] = error_of(step)
                refusing.refuses = False
            step()
        found["step"] = session.committed_step
        found["values"] = [each.tolist() for each in model.parameters()]
        found["wanted"] = [each.tolist() for each in reference.param_groups[0]["params"]]
    return found


def held(address: str) -> dict[str, Any]:
    """As `unsent`, where a rank holds a gradient that it finds no room to keep."""
    rank = distributed.get_rank()
    with connected(address, PATIENCE_S) as session:
        trained = Trained(session, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        last = list(trained.model.parameters())[-1]
        optimizer, found = trained.optimizer, {}
        trained.backward()
        kept = last.grad
        assert kept is not None
        values = kept.tolist()
        with failing(session, MODE_READ, 1):
            trained.refuse("gradient", optimizer.step)
        distributed.barrier()
        if rank:
            found["still"] = kept.tolist() == values and kept is last.grad
            optimizer.step()
        found["kept"] = kept.tolist() == values
        return {**found, **trained.found()}


def undropped(address: str) -> dict[str, Any]:
    """Rank 1 can't drop one of its gradients, as all ranks do after they differed, and drops it
    later."""
    rank = distributed.get_rank()
    with connected(address, PATIENCE_S) as session:
        trained = Trained(session)
        zero_grad = trained.optimizer.zero_grad
        for _ in range(1 + rank):
            with session.no_sync():
                trained.backward()
        trained.refuse("apart", trained.backward)
        if rank:
            first = vars(session.transaction.job.shards.parameters[0])
            first["forget_gradient"] = Mock(side_effect=memd_client.MemdError("still held"))
            trained.refuse("held", zero_grad)
            left = [each for each in trained.model.parameters() if each.grad is not None]
            trained.errors["left"] = str(len(left))
            del first["forget_gradient"]
        zero_grad()
        trained.backward()
        trained.optimizer.step()
        return trained.found()


class Buffered(nn.Module):
    """Buffers of dtypes that gloo does not know, and a count of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        rank = distributed.get_rank()
        for dtype in (torch.int16, torch.complex64, torch.bool, torch.float8_e4m3fn):
            values = torch.arange(3).add(10 * rank).to(dtype)
            self.register_buffer(str(dtype).split(".")[1], values, persistent=False)
        self.register_buffer("empty", torch.empty(0), persistent=False)
        self.register_buffer("transposed", torch.full((3, 2), 1.0 * rank).t(), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("count").add_(1 + distributed.get_rank())
        found: torch.Tensor = self.inner(x)
        return found


def buffered(address: str) -> dict[str, Any]:
    """All ranks train with rank 0's buffers, also where a checkpoint computes a forward again."""
    with connected(address) as session:
        model = memd_client.offload(Buffered(), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        inputs = torch.ones(2, 4, requires_grad=True)
        model(inputs).sum().backward()
        found: dict[str, Any] = {
            name: (buffer.real if buffer.is_complex() else buffer).float().tolist()
            for name, buffer in model.named_buffers()
        }
        optimizer.step()
        optimizer.zero_grad()
        # The second forward runs in backward.
        checkpoint(model, inputs, use_reentrant=False).sum().backward()
        found["count after checkpoint"] = int(model.get_buffer("count"))
        optimizer.step()
        found["step"] = session.committed_step
    return found


def copied(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state, which does not change with it any more."""
    found = copy.deepcopy(optimizer.state_dict())
    for index, state in found["state"].items():
        found["state"][index] = {name: each.clone() for name, each in state.items()}
    return found


def loaded_states(address: str) -> dict[str, Any]:
    """All ranks load an earlier state of the optimizer, one of them late, and forget it then."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = Branching()
    reference = Reference(copy.deepcopy(model), None)
    plain = reference._optimizer
    with connected(address, PATIENCE_S) as session:
        trained = Trained(session, model)
        optimizer = trained.optimizer
        differences = []

        def steps(*numbers: int) -> None:
            for step in numbers:
                (wanted,) = reference.step([batch(step)])
                loss = model(batch(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if float(loss.detach()) != wanted:
                    differences.append(f"step {step}")

        def counts() -> list[int]:
            states = optimizer.state_dict()["state"].values()
            return [int(each["step"]) for each in states if each]

        steps(0, 1)
        earlier, wanted = copied(optimizer), copied(plain)
        steps(2)
        held = optimizer.state_dict()["state"][0]["exp_avg"]
        if rank:
            time.sleep(0.5)
        optimizer.load_state_dict(earlier)
        plain.load_state_dict(wanted)
        found = {
            "counts": counts(),
            "held": held.tolist() != earlier["state"][0]["exp_avg"].tolist(),
        }
        steps(3, 4)
        apart = copied(optimizer)
        apart["state"][0]["step"] += rank
        trained.refuse("apart", partial(optimizer.load_state_dict, apart))
        optimizer.reset_state()
        plain.state.clear()
        found["reset"] = counts()
        steps(5, 6)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        others = reference.state()
        differences += [name for name in own if not torch.equal(own[name], others[name])]
        return {**found, **trained.found(), "differences": differences}


def sparse(address: str) -> dict[str, Any]:
    """A gradient that memd does not take, of a model that stays in the processes."""
    model = nn.Embedding(4, 4, sparse=True)
    with connected(address) as session:
        optimizer = memd_client.AdamW(model.named_parameters(), session=session)
        model(torch.tensor([1])).sum().backward()
        return {"step": error_of(optimizer.step)}


def unconnected(address: str) -> dict[str, Any]:
    """Calls of connect() that fail, on all ranks or on one, leave no process group."""
    rank = distributed.get_rank()
    groups = len(distributed.distributed_c10d._world.pg_map)
    found: dict[str, Any] = {}
    for name, of_rank in {
        "absent": "unix:///nowhere/memd.sock",
        "one": address if rank else "tcp://1",
        "job": address,
    }.items():
        job = "failures" if name != "job" or rank else ""
        found[name] = error_of(partial(memd_client.connect, of_rank, job=job))
    found["groups"] = len(distributed.distributed_c10d._world.pg_map) - groups
    with connected(address) as session:
        found["step"] = session.committed_step
    return found


# Ranks wait here until they give up.
LATE: tuple[Callable[[str], dict[str, Any]], ...] = (late_drop, late_end)
PROGRAMS: tuple[Callable[[str], dict[str, Any]], ...] = (
    one_raises,
    one_raises_in_tiles,
    two_optimizers,
    unscaled,
    refused_unchanged,
    unscaled_apart,
    second_backward,
    hooked,
    static_graph,
    logged,
    tracked_by_one,
    repeated,
    unsent,
    unsent_apart,
    held,
    undropped,
    buffered,
    loaded_states,
    sparse,
    unconnected,
)


def found_in(programs: Iterable[Callable[[str], dict[str, Any]]], address: str) -> dict[str, Any]:
    """The findings of each program, by its name. Each may take as long as one."""
    found = {}
    for program in programs:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        found[program.__name__] = program(address)
    return found


if __name__ == "__main__":
    groups = {"all": partial(found_in, PROGRAMS), "late": partial(found_in, LATE)}
    main({**groups, **{program.__name__: program for program in (*PROGRAMS, *LATE)}})
