"""offload(activations=...): what must hold of it, whoever serves it. As client_cases.py."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import memd_client
from memd_client import Session
from memd_client.core.scratch import slot_bytes
from memd_client.parameters import saved_activations
from memd_native import SCRATCH_PREFIX
from tests.unit.client_cases import (
    LENGTH,
    MODELS,
    WIDTH,
    Gpt,
    Mlp,
    assert_same_gradients,
    assert_same_state,
    batch,
    build,
    compiled,
    leases_held,
    loss_of,
    skip_without_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TIERS = ("host", "nvme")


class Lora(nn.Module):
    """Frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x) + self.up(self.down(x)).tanh()
        return output


class _Keep(torch.autograd.Function):
    """Hands what it is given to `seen` in backward, as autograd has kept it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, kept: list[torch.Tensor], seen: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.save_for_backward(*kept)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen += ctx.saved_tensors
        return gradients[0], None, None


class Keeper(nn.Module):
    """Keeps whatever `make` returns for backward."""

    def __init__(self, make: Callable[[], list[torch.Tensor]] = list) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.make = make
        self.seen: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        output: torch.Tensor = _Keep.apply(  # type: ignore[no-untyped-call]  # torch's
            self.bias, self.make(), self.seen
        )
        return output


def activation_bytes(session: Session) -> int:
    return session.statistics().activation_bytes


def slot_names(session: Session) -> set[str]:
    job = session.transaction.job
    return {
        shard.spec.name
        for shard in job.shards.list_all()
        if shard.spec.name.startswith(SCRATCH_PREFIX)
    }


def saved_of(make: Callable[[], list[torch.Tensor]], session: Session) -> list[torch.Tensor]:
    """The tensors that `make` returns in a forward, as backward sees them."""
    keeper = memd_client.offload(Keeper(make), session, activations="nvme")
    keeper().backward()
    return keeper.seen


class _Named(torch.Tensor):
    """A subclass."""


def _buffer(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count).to(dtype)


def _with_nan() -> torch.Tensor:
    bits = torch.arange(1 << 10, dtype=torch.int32) + 0x7F80_0001
    return bits.view(torch.float32)


def _at_odd_address() -> torch.Tensor:
    """A float that begins at an address that no float should have."""
    raw = torch.arange(4097, dtype=torch.int16).view(torch.uint8)[: 4 * 1024 + 1].numpy()
    return torch.frombuffer(raw.data, dtype=torch.float32, offset=1, count=1023)


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: _buffer(64).view(8, 8),
    "transposed": lambda: _buffer(64).view(8, 8).t(),
    "a slice": lambda: _buffer(4096)[37:2000],
    "a small slice": lambda: _buffer(4096)[2000:2100],
    "with steps": lambda: _buffer(4096)[5::3],
    "expanded": lambda: _buffer(8).view(8, 1).expand(8, 100),
    "overlapping": lambda: _buffer(100).as_strided((90, 10), (1, 1)),
    "channels last": lambda: _buffer(600).view(2, 3, 10, 10).to(memory_format=torch.channels_last),
    "empty": lambda: torch.empty(3, 0, 2),
    "a number": lambda: torch.tensor(3.0),
    "complex": lambda: torch.complex(_buffer(50), -_buffer(50)),
    "conjugated": lambda: torch.complex(_buffer(50), _buffer(50)).conj(),
    "negated": lambda: torch.complex(_buffer(50), _buffer(50)).conj().imag,
    "real part": lambda: torch.complex(_buffer(50), _buffer(50)).real,
    "double": lambda: _buffer(50, torch.float64)[1:],
    "half": lambda: _buffer(50, torch.float16)[1:],
    "brain": lambda: _buffer(50, torch.bfloat16)[3:],
    "integers": lambda: _buffer(300, torch.int64)[7:],
    "bytes": lambda: _buffer(250, torch.uint8)[7:],
    "bools": lambda: _buffer(250).remainder(2).bool()[3:],
    "eight bits": lambda: _buffer(64).to(torch.float8_e4m3fn),
    "not a number": _with_nan,
    "another dtype": lambda: _buffer(64).view(torch.int32)[3:],
    "sparse": lambda: torch.eye(50).to_sparse(),
    "a subclass": lambda: _buffer(64).as_subclass(_Named),
    "at an odd address": _at_odd_address,
}


@pytest.fixture(autouse=True)
def all_are_stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small."""
    monkeypatch.setattr(saved_activations, "SMALL_BYTES", 1)


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[*MODELS, "adapters"])
def stored_pair(
    request: pytest.FixtureRequest, session: Session, tier: str
) -> tuple[nn.Module, nn.Module]:
    """An offloaded model whose activations are too, and the same one in memory."""
    make = MODELS.get(request.param, Lora)
    return memd_client.offload(build(make), session, activations=tier), build(make)


@pytest.fixture
def stored_mlp(session: Session, tier: str) -> tuple[Mlp, Mlp]:
    torch.manual_seed(0)
    reference = Mlp()
    return memd_client.offload(copy.deepcopy(reference), session, activations=tier), reference


def has_same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided:
        return torch.equal(one.to_dense(), other.to_dense())
    return (
        (one.dtype, one.shape, one.stride(), one.is_conj(), one.is_neg(), type(one))
        == (other.dtype, other.shape, other.stride(), other.is_conj(), other.is_neg(), type(other))
        and (one.numel() == 0 or one.data_ptr() % 64 == other.data_ptr() % 64)
        and bits(one) == bits(other)
    )


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.as_subclass(torch.Tensor).detach().resolve_conj().resolve_neg()
    return bytes(plain.contiguous().view(-1).view(torch.uint8).tolist())


class TestActivations:
    def test_training_has_the_bits_of_the_untouched_model(
        self, stored_pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        model, reference = stored_pair
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        trained_there = [each for each in reference.parameters() if each.requires_grad]
        ours = memd_client.AdamW(trained, lr=1e-2, weight_decay=0.1)
        torchs = torch.optim.AdamW(trained_there, lr=1e-2, weight_decay=0.1, fused=True)
        for step in range(5):
            losses = []
            for each, optimizer in ((model, ours), (reference, torchs)):
                for micro in range(2):
                    loss = loss_of(each, 2 * step + micro)
                    loss.backward()
                    losses.append(loss.detach())
                    with torch.no_grad():  # evaluation between micro-batches
                        losses.append(loss_of(each.eval(), 50))
                    each.train()
                del loss
                if step != 2:  # a skipped step
                    optimizer.step()
                optimizer.zero_grad()
            half = len(losses) // 2
            assert all(map(torch.equal, losses[:half], losses[half:]))
        found = session.statistics()
        assert found.activation_bytes_max > 0
        assert found.activation_bytes == found.leases_held == 0
        assert_same_state(model, reference)

    def test_backward_runs_again_and_in_any_order_and_other_thread(
        self, stored_pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        for model in stored_pair:
            losses = [loss_of(model, index) for index in range(3)]
            if not getattr(model, "checkpointing", None):  # which cannot run backward twice
                losses[1].backward(retain_graph=True)
            losses[2].backward()

            def go_on(loss: torch.Tensor = losses[1]) -> None:
                # torch gives this number to a new thread in its first parallel operation, and
                # oneDNN asks for it before.
                torch.set_num_threads(torch.get_num_threads())
                loss.backward()

            thread = threading.Thread(target=go_on)
            thread.start()
            thread.join()
            losses[0].backward()
            del losses, thread, go_on
        assert activation_bytes(session) == leases_held(session) == 0
        assert_same_gradients(*stored_pair)

    def test_gradients_of_gradients_have_the_same_bits(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in stored_mlp:
            x = batch(module).requires_grad_()
            output = module(x).square().sum()
            (gradient,) = torch.autograd.grad(output, x, create_graph=True)
            (gradient.norm() + output).backward()
            del output, gradient
        assert_same_gradients(*stored_mlp)
        assert activation_bytes(session) == leases_held(session) == 0

    def test_a_graph_that_is_dropped_gives_its_slots_to_the_next_one(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, _ = stored_mlp
        loss = loss_of(model)
        held, slots = activation_bytes(session), slot_names(session)
        assert held
        assert leases_held(session) == 0
        del loss
        assert activation_bytes(session) == 0
        for index in range(4):
            loss_of(model, index).backward()
            assert slot_names(session) == slots
        assert session.statistics().activation_bytes_max == held

    def test_the_tensors_themselves_are_freed(self, stored_mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = stored_mlp
        outputs = []
        model.layers[1].register_forward_hook(
            lambda _, __, output: outputs.append(StorageWeakRef(output.untyped_storage()))
        )
        loss = loss_of(model)
        assert all(output.expired() for output in outputs)
        loss.backward()

    def test_evaluation_stores_nothing(self, stored_mlp: tuple[Mlp, Mlp], session: Session) -> None:
        model, reference = stored_mlp
        with torch.no_grad():
            assert torch.equal(loss_of(model), loss_of(reference))
        with torch.inference_mode():
            assert torch.equal(loss_of(model), loss_of(reference))
        assert not slot_names(session)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_checkpoint_stores_its_inputs(self, session: Session, reentrant: bool) -> None:
        model = memd_client.offload(
            build(lambda: Gpt(checkpointing=reentrant)), session, activations="nvme"
        )
        x_bytes = 4 * LENGTH * WIDTH * 4
        loss = loss_of(model)
        # The inputs of three blocks and of the head, and the tokens.
        expected = 4 * slot_bytes(x_bytes) + slot_bytes(4 * LENGTH * 8)
        assert activation_bytes(session) == expected
        loss.backward()
        # Nothing that was computed again was stored.
        assert session.statistics().activation_bytes_max == expected

    def test_what_several_operations_save_is_stored_once(self, session: Session) -> None:
        def make() -> list[torch.Tensor]:
            together = torch.randn(10, 300)
            return [together, *together.chunk(3, 1), together.t(), together.view(torch.int32)]

        keeper = memd_client.offload(Keeper(make), session, activations="nvme")
        output = keeper()
        assert activation_bytes(session) == slot_bytes(12_000)
        output.backward()
        together, *parts = keeper.seen
        assert all(torch.equal(*pair) for pair in zip(together.chunk(3, 1), parts, strict=False))

    def test_bytes_that_change_unseen_are_stored_anew(self, session: Session) -> None:
        keeper = memd_client.offload(Keeper(), session, activations="nvme")
        x = torch.zeros(1000)
        keeper.make = lambda: [x]
        first = keeper()
        x.numpy()[:] = 1  # no version counts it
        second = keeper()
        second.backward()
        first.backward()
        assert keeper.seen[0].eq(1).all()
        assert keeper.seen[1].eq(0).all()

    @pytest.mark.parametrize("form", FORMS)
    def test_backward_sees_the_same_bits_in_the_same_form(
        self, session: Session, form: str
    ) -> None:
        (seen,) = saved_of(lambda: [FORMS[form]()], session)
        assert has_same_form(seen, FORMS[form]())

    def test_tensors_of_one_storage_that_stay_or_go_have_the_same_bits(
        self, session: Session
    ) -> None:
        def make() -> list[torch.Tensor]:
            torch.manual_seed(3)
            x = torch.randn(5000)
            return [x[4003:], x[:100], x[10:4990], x[4100:4200], x.view(50, 100).t()]

        assert all(map(has_same_form, saved_of(make, session), make()))

    def test_a_change_in_place_is_torchs_error(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for model in stored_mlp:
            x = batch(model)
            loss = model(x).sum()
            x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del loss
        assert activation_bytes(session) == 0

    def test_a_change_of_a_view_in_place_is_torchs_error(self, session: Session) -> None:
        keeper = memd_client.offload(Keeper(), session, activations="nvme")
        x = torch.zeros(10, 100)
        keeper.make = lambda: [x]
        output = keeper()
        x[3].fill_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()

    def test_exceptions_leave_nothing_behind(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = stored_mlp

        def fail(*_: Any) -> None:
            raise ValueError("no")

        handle = model.second.register_forward_hook(fail)
        with pytest.raises(ValueError, match="no"):
            loss_of(model)
        handle.remove()
        assert activation_bytes(session) == 0
        x = batch(model).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(ValueError, match="no"):
            model(x).sum().backward()
        model.zero_grad()
        assert activation_bytes(session) == leases_held(session) == 0
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)

    def test_backward_after_close_says_what_was_lost(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, _ = stored_mlp
        loss = loss_of(model)
        session.close()
        with pytest.raises(memd_client.MemdError, match=r"closed.*run backward before"):
            loss.backward()
        del loss

    def test_models_of_one_session_keep_theirs_apart(self, session: Session) -> None:
        def pair(*, is_offloaded: bool) -> nn.ModuleDict:
            torch.manual_seed(0)
            both = nn.ModuleDict({"a": Mlp()}), nn.ModuleDict({"b": Mlp()})
            if is_offloaded:
                memd_client.offload(both[0], session, activations="host")
                memd_client.offload(both[1], session, strict=False, activations="nvme")
            return nn.ModuleDict({"a": both[0]["a"], "b": both[1]["b"]})

        model, reference = pair(is_offloaded=True), pair(is_offloaded=False)
        for each in (model, reference):
            x = batch(each)
            (each["b"](each["a"](x)).sum() + each["a"](each["b"](x)).sum()).backward()
        assert_same_gradients(model, reference)
        assert activation_bytes(session) == 0

    def test_only_models_that_asked_for_it_store(self, session: Session) -> None:
        model = nn.ModuleDict({"plain": Mlp(), "stored": Mlp()})
        plain = memd_client.offload(nn.ModuleDict({"plain": model["plain"]}), session)["plain"]
        assert isinstance(plain, Mlp)
        loss = loss_of(plain)
        assert activation_bytes(session) == 0
        loss.backward()
        # Modules that such a model calls store theirs all the same.
        other = nn.ModuleDict({"stored": model["stored"]})
        memd_client.offload(other, session, strict=False, activations="nvme")
        plain.layers.append(model["stored"])
        loss = loss_of(plain)
        assert activation_bytes(session) > 0
        loss.backward()

    def test_a_copy_of_the_model_stores_nothing(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        loss_of(copy.deepcopy(stored_mlp[0])).backward()
        assert not slot_names(session)

    def test_hooks_of_the_user_come_first(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        with save_on_cpu():
            loss_of(stored_mlp[0]).backward()
        loss_of(stored_mlp[1]).backward()
        assert not slot_names(session)
        assert_same_gradients(*stored_mlp)

    def test_autocast_has_the_same_bits(
        self, stored_pair: tuple[nn.Module, nn.Module], session: Session
    ) -> None:
        skip_without_kernel(stored_pair[1], torch.bfloat16)
        for model in stored_pair:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model)
            loss.backward()
            del loss
        assert activation_bytes(session) == 0
        assert_same_gradients(*stored_pair)

    def test_buffers_stay(self, session: Session) -> None:
        class Masked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(()))
                self.register_buffer("mask", torch.ones(1000))

            def forward(self) -> torch.Tensor:
                return self.weight * self.get_buffer("mask")

        output = memd_client.offload(Masked(), session, activations="nvme")()
        assert activation_bytes(session) == 0
        output.sum().backward()

    def test_tensors_that_memd_holds_stay(self, session: Session) -> None:
        session.put("input", torch.arange(1000.0))
        keeper = memd_client.offload(Keeper(), session, activations="nvme")
        keeper.make = lambda: [session.get("input")]
        output = keeper()
        assert activation_bytes(session) == 0
        output.backward()
        assert torch.equal(keeper.seen[0], torch.arange(1000.0))

    def test_small_tensors_stay(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(saved_activations, "SMALL_BYTES", 4000)
        keeper = memd_client.offload(Keeper(), session, activations="nvme")
        keeper.make = lambda: [torch.zeros(999)]
        output = keeper()
        assert activation_bytes(session) == 0
        keeper.make = lambda: [torch.zeros(1000)]
        output = keeper() + output
        assert activation_bytes(session) == slot_bytes(4000)
        output.backward()

    def test_a_checkpoint_around_the_model_stores_nothing(self, session: Session) -> None:
        model = memd_client.offload(build(Mlp), session, activations="nvme")
        reference = build(Mlp)
        for each in (model, reference):
            checkpoint(each, batch(each), use_reentrant=False).sum().backward()
        assert not slot_names(session)
        assert_same_gradients(model, reference)

    def test_torch_compile_is_refused_in_one_sentence(
        self, stored_mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = stored_mlp
        with pytest.raises(memd_client.NotYet, match=r"torch\.compile with offloaded activations"):
            loss_of(compiled(model))
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_same_gradients(model, reference)
        assert activation_bytes(session) == 0

    def test_slots_belong_to_the_session(self, stored_mlp: tuple[Mlp, Mlp], job: Any) -> None:
        loss = loss_of(stored_mlp[0])
        with job() as other, pytest.raises(memd_client.InvalidArgument, match="memd's own"):
            other.put(f"{SCRATCH_PREFIX}1/0", torch.zeros(3))
        loss.backward()

    def test_bad_arguments_are_refused_and_nothing_changes(self, session: Session) -> None:
        module = Mlp()
        with pytest.raises(memd_client.InvalidArgument, match=r"activations.*'tape'"):
            memd_client.offload(module, session, activations="tape")
        with pytest.raises(memd_client.InvalidArgument, match="ReLU has none"):
            memd_client.offload(nn.ReLU(), session, activations="host")
        assert type(module.first.weight) is nn.Parameter
