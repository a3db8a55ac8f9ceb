"""An offloaded model that several threads use: see `client_cases.py`."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memd_client
from memd_client.parameters import old_users
from tests.unit.client_cases import Mlp, assert_same_state, batch, leases_held, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memd_client import Session

# A thread that waits longer waits for ever.
_DEADLOCK_S = 20.0


class Call:
    """A module call in a thread of its own, which has the first layer in place until `end`."""

    def __init__(self, model: Mlp, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._is_inside, self._may_end = threading.Event(), threading.Event()
        self._hook = model.first.register_forward_pre_hook(self._wait)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_inside.wait(_DEADLOCK_S)
        self._hook.remove()

    def _wait(self, *_: Any) -> None:
        self._is_inside.set()
        assert self._may_end.wait(_DEADLOCK_S)

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 handed to the test
            self.error = error

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(_DEADLOCK_S)
        assert not self._thread.is_alive()


class EndMeanwhile(TorchDispatchMode):
    """The other thread's call ends after this one's operation has begun, and before its kernel
    reads the bytes."""

    def __init__(self, call: Call) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._call.end()
        with torch._C.DisableTorchFunctionSubclass():  # a kernel does not ask for it either
            return func(*args, **(kwargs or {}))


@contextmanager
def gathered_elsewhere(parameters: Any, *, write: bool = False) -> Iterator[Callable[[], None]]:
    """Another thread has `parameters` gathered, until the result is called."""
    is_inside, may_leave = threading.Event(), threading.Event()

    def gather() -> None:
        with memd_client.gather(parameters, write=write):
            is_inside.set()
            may_leave.wait(_DEADLOCK_S)

    thread = threading.Thread(target=gather, daemon=True)
    thread.start()
    assert is_inside.wait(_DEADLOCK_S)
    try:
        yield may_leave.set
    finally:
        may_leave.set()
        thread.join(_DEADLOCK_S)


class TestThreads:
    def test_a_change_of_the_value_from_before_a_step_is_refused(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        """It would replace the value that the step has made."""
        model, reference = mlp
        optimizers = (
            memd_client.AdamW(model.parameters(), lr=1e-2),
            torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True),
        )
        is_inside, may_change = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def change() -> None:
            try:
                with memd_client.gather(model), torch.no_grad():
                    is_inside.set()
                    assert may_change.wait(_DEADLOCK_S)
                    model.first.weight.mul_(2)
            except memd_client.MemdError as error:
                errors.append(error)

        thread = threading.Thread(target=change, daemon=True)
        loss_of(model).backward()
        loss_of(reference).backward()
        thread.start()
        assert is_inside.wait(_DEADLOCK_S)
        for optimizer in optimizers:
            optimizer.step()
        may_change.set()
        thread.join(_DEADLOCK_S)
        assert not thread.is_alive()
        assert len(errors) == 1
        assert "'layers.0.weight' was changed by a thread" in str(errors[0])
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("use", ["linear", "detach", "state_dict"])
    def test_a_use_outside_of_calls_keeps_what_another_thread_s_call_puts_away(
        self, mlp: tuple[Mlp, Mlp], session: Session, use: str
    ) -> None:
        def used(model: Mlp) -> torch.Tensor:
            if use == "linear":
                return functional.linear(x, model.first.weight, model.first.bias)
            if use == "detach":
                return model.first.weight.detach().clone()
            value: torch.Tensor = model.first.state_dict()["weight"]
            return value

        model, reference = mlp
        x = batch(model)
        call = Call(model, lambda: loss_of(model))
        with EndMeanwhile(call), torch.no_grad():
            found = used(model)
        assert torch.equal(found, used(reference))
        assert torch.equal(call.result, loss_of(reference))
        del call
        assert leases_held(session) == 0

    def test_a_thread_that_does_not_use_a_parameter_gets_no_memory_of_it(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, reference = mlp
        call = Call(model, lambda: loss_of(model))
        data = model.first.weight.data
        assert torch.equal(data, reference.first.weight)
        for raw in (data.data_ptr, model.first.weight.data_ptr):
            with pytest.raises(
                memd_client.NotResident, match=r"are in memd, and .* needs them in place"
            ):
                raw()
        assert model.first.weight.shape == (64, 32)
        call.end()

    def test_what_one_thread_gathers_is_in_place_for_all(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        with gathered_elsewhere(model):
            assert torch.equal(model.first.weight.data, reference.first.weight.data)
            assert model.first.weight.data_ptr() == model.first.weight.data.data_ptr()
            assert torch.equal(loss_of(model), loss_of(reference))
        assert leases_held(session) == 0

    def test_a_step_while_another_thread_evaluates_changes_what_comes_after_it(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        loss_of(model).backward()
        loss_of(reference).backward()
        x = batch(model)
        with torch.no_grad():
            before = reference.first(x)

        def evaluate() -> torch.Tensor:
            with torch.no_grad():
                output: torch.Tensor = model.first(x)
                return output

        call = Call(model, evaluate)
        ours.step()
        torchs.step()
        # It begins after the step: it may not join those that use the old value.
        after: list[torch.Tensor] = []
        later = threading.Thread(target=lambda: after.append(loss_of(model)), daemon=True)
        later.start()
        later.join(0.05)
        call.end()
        later.join(_DEADLOCK_S)
        assert torch.equal(call.result, before)
        assert torch.equal(after[0], loss_of(reference))
        after.clear()
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_backward_of_what_was_computed_with_the_value_before_a_step_is_an_error(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        """torch's words: the operation saves after the step, but what it saves is older."""
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        x = batch(model).requires_grad_()
        call = Call(model, lambda: model.first(x).sum())
        optimizer.step()
        call.end()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call.result.backward()

    def test_a_thread_that_was_using_parameters_before_a_step_does_not_wait(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        """Two that waited for each other would wait for ever."""
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        before = reference.first.weight.detach().clone()
        loss_of(model).backward()
        call = Call(model, lambda: model.first(batch(model)))
        found: list[torch.Tensor] = []
        is_inside, may_go_on = threading.Event(), threading.Event()

        def read() -> None:
            with memd_client.gather(model.second.bias):
                is_inside.set()
                assert may_go_on.wait(_DEADLOCK_S)
                found.append(model.first.weight.detach().clone())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert is_inside.wait(_DEADLOCK_S)
        optimizer.step()
        may_go_on.set()
        reader.join(_DEADLOCK_S)
        assert torch.equal(found[0], before), "the value that the other thread still uses"
        call.end()
        assert not torch.equal(model.first.weight.detach(), before)

    def test_a_value_that_another_thread_does_not_leave_after_a_step_is_an_error_in_the_end(
        self, mlp: tuple[Mlp, Mlp], session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, reference = mlp
        monkeypatch.setattr(old_users, "_LEAVE_S", 0.1)
        ours = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        loss_of(model).backward()
        loss_of(reference).backward()
        with gathered_elsewhere(model):
            ours.step()
            with pytest.raises(
                memd_client.MemdError, match=r"'layers\.0\..*' is still in use by another thread"
            ):
                loss_of(model)
        torchs.step()
        assert torch.equal(loss_of(model), loss_of(reference))
        assert leases_held(session) == 0

    def test_a_step_refuses_what_its_own_thread_uses_or_another_changes(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        with (
            memd_client.gather(model),
            pytest.raises(memd_client.MemdError, match="is in use; leave gather"),
        ):
            optimizer.step()
        is_changed, may_leave = threading.Event(), threading.Event()

        def change() -> None:
            with memd_client.gather(model.first.weight, write=True), torch.no_grad():
                is_changed.set()
                may_leave.wait(_DEADLOCK_S)

        writer = threading.Thread(target=change, daemon=True)
        writer.start()
        assert is_changed.wait(_DEADLOCK_S)
        with pytest.raises(memd_client.MemdError, match="is in use; leave gather"):
            optimizer.step()
        may_leave.set()
        writer.join(_DEADLOCK_S)
        optimizer.step()
