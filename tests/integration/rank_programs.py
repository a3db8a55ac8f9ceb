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
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import memd_client
from memd_client.connection import control
from memd_client.core import leases

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        expert = self.experts[distributed.get_rank()]
        found = self.large(expert(self.norm(tokens.float()[:, :16])))
        loss: torch.Tensor = found.square().mean()
        return loss


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + distributed.get_rank())
    return torch.randint(0, 50, (4, 17), generator=generator)


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

    def __init__(self, model: nn.Module, clip: float | None) -> None:
        self._model = model
        self._clip = clip
        from_first_rank(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        from_first_rank(self._model, buffers_only=True)
        loss = self._model(tokens)
        loss.backward()
        average(self._model)
        norm = 0.0
        if self._clip is not None:
            norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), self._clip))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss), norm

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

    def __init__(self, model: nn.Module, clip: float | None) -> None:
        super().__init__(model, clip)
        self._wrapped = DistributedDataParallel(model, find_unused_parameters=True)

    def step(self, tokens: torch.Tensor) -> tuple[float, float]:
        loss = self._wrapped(tokens)
        loss.backward()
        norm = 0.0
        if self._clip is not None:
            norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), self._clip))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss), norm


def bits(address: str) -> dict[str, Any]:
    """Differences to the rule, and to DistributedDataParallel where gloo sums in this order."""
    found = {}
    for made in (Tied, Branching):
        for clip in (None, 0.05):
            torch.manual_seed(distributed.get_rank())  # first values are rank 0's
            model = made()
            references = [Reference(copy.deepcopy(model), clip)]
            if distributed.get_world_size() == 2:
                references.append(WithTorch(copy.deepcopy(model), clip))
            job = f"{made.__name__}-{clip}-{distributed.get_world_size()}"
            with memd_client.connect(address, job=job, **QUOTAS) as session:
                found[job] = _differences(model, session, references, clip)
    return found


def _differences(
    model: nn.Module,
    session: memd_client.Session,
    references: list[Reference],
    clip: float | None,
) -> list[str]:
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        wanted = [each.step(batch(step)) for each in references]
        loss = model(batch(step))
        loss.backward()
        norm = 0.0 if clip is None else float(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
        found += [
            f"step {step}: {(float(loss), norm)}, not {each}"
            for each in wanted
            if each != (float(loss), norm)
        ]
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
    """Trains to STEPS from where the job is. MEMD_DIE is "RANK.STEP": that rank is killed there, in
    backward of its first start. MEMD_KILL is a step at which rank 0 kills the daemon."""
    dies = tuple(map(int, os.environ.get("MEMD_DIE", "-1.-1").split(".")))
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        dies = (-1, -1)
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
            loss = model(torch.randn(8, 64)).square().mean()
            if os.environ.get("MEMD_KILL") == str(step) and not distributed.get_rank():
                os.kill(session.daemon_process_id, signal.SIGKILL)
            if dies == (distributed.get_rank(), step):
                first_layer.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
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


def late(address: str) -> dict[str, Any]:
    """The last rank is late, at a step and then in a backward; limits are short."""
    control._LONG_S = 4.0
    leases._RANK_S, leases._TIMEOUT_S = 1.0, 1.0
    model = nn.Linear(4, 4)
    found = []
    with memd_client.connect(address, job="late", **QUOTAS) as session:
        memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        is_late = distributed.get_rank() == 0
        model(torch.ones(2, 4)).sum().backward()
        if not is_late:
            optimizer.step()
            found.append(_error(lambda: session.committed_step))
        distributed.barrier()
        if is_late:
            optimizer.step()
        step = session.committed_step
        distributed.barrier()
        if not is_late:
            found.append(_error(lambda: model(torch.ones(2, 4)).sum().backward()))
        distributed.barrier()
    return {"found": found, "step": step}


def refusals(address: str) -> dict[str, Any]:
    """Calls that several ranks may not make, each with its error on this rank."""
    rank = distributed.get_rank()
    found: dict[str, str] = {}

    def refuse(name: str, call: Callable[[], Any]) -> None:
        found[name] = _error(call)
        distributed.barrier()

    refuse("embedded", lambda: memd_client.connect("embedded:", job="x"))
    refuse("settings", lambda: memd_client.connect(address, job=f"of-{rank}"))
    refuse("world", lambda: memd_client.connect(address, job="x", world_size=5))
    with warnings.catch_warnings(record=True) as caught:
        session = memd_client.connect(address, job="refused", **QUOTAS)
    found["store"] = "; ".join(str(each.message) for each in caught)
    with session:
        refuse("models", lambda: memd_client.offload(nn.Linear(4, 4 + rank), session))
        refuse("init", lambda: memd_client.init(session).__enter__())
        model = memd_client.offload(nn.Linear(4, 4), session)
        refuse("resident", lambda: memd_client.AdamW(nn.Linear(2, 2).parameters(), session=session))
        refuse("early", lambda: memd_client.AdamW(model.parameters(), step_in_backward=True))
        outer = nn.Sequential(nn.Linear(4, 4), model)
        wrapped = DistributedDataParallel(outer, init_sync=False)
        refuse("wrapped", lambda: wrapped(torch.ones(2, 4)))
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        if rank:
            found["write"] = _error(lambda: model.load_state_dict(nn.Linear(4, 4).state_dict()))
        distributed.barrier()

        def backward() -> None:
            model(torch.ones(2, 4)).sum().backward()

        backward()
        refuse("second", backward)
        optimizer.zero_grad()
        backward()
        gradient = model.weight.grad
        assert gradient is not None
        refuse("grad", lambda: gradient.mul_(2))
        refuse("assigned", lambda: setattr(model.weight, "grad", torch.ones(4, 4)))
        refuse("dropped", lambda: setattr(model.weight, "grad", None))
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        refuse("scaler", lambda: scaler.step(optimizer))
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        optimizer.step()
        refuse("rates", lambda: session.committed_step)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        found["step"] = str(session.committed_step)
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
            "clip": _error(lambda: optimizer.clip_grad_norm_(0.5)),
        }
        optimizer.step()
        found["step"] = _error(lambda: session.committed_step)
        distributed.barrier()
        if rank:
            optimizer.param_groups[0]["params"].reverse()
        found["arguments"] = _error(lambda: optimizer.clip_grad_norm_(0.5 * (1 + rank)))
        found["norm"] = float(optimizer.clip_grad_norm_(0.5))
        optimizer.step()
        found["committed"] = session.committed_step
        distributed.barrier()
    return found


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # it is what the program prints
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    name, address, meeting = sys.argv[1:]
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    distributed.init_process_group(
        "gloo",
        init_method="env://" if meeting == "-" else f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    found = {"rank": distributed.get_rank(), **globals()[name](address)}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if "error" in found:
        time.sleep(0.5)  # others report what they have seen of the daemon, not of this end
        os._exit(1 if meeting == "-" else 0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
