"""Lazy tensors, `p.grad` and `detach()` of a parameter that is away, against plain PyTorch: run as
client_cases.py is.
"""

from __future__ import annotations

import copy
import io
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import memd_client
from tests.unit.client_cases import (
    WIDTH,
    Gpt,
    Mlp,
    assert_same_gradients,
    assert_same_moments,
    assert_same_state,
    batch,
    build,
    leases_held,
    loss_of,
    train_one_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session
    from tests.unit.client_cases import OpenSession

    Use = Callable[[torch.Tensor], Any]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"tensor": tensor}, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)["tensor"]
    return loaded


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Over the memory itself."""
    return torch.empty(0).set_(tensor.untyped_storage()).view(tensor.shape).clone()


READS: dict[str, Use] = {
    "norm": torch.Tensor.norm,
    "vector_norm": torch.linalg.vector_norm,
    "clone": torch.clone,
    "add": lambda t: 1 + t,
    "matmul": lambda t: t @ t.T,
    "index": lambda t: t[3:7, ::2],
    "mask": lambda t: t[t > 0],
    "to float64": lambda t: t.to(torch.float64),
    "as it is": lambda t: t.float().cpu().contiguous(),
    "bfloat16": torch.Tensor.bfloat16,
    "bits": lambda t: t.view(torch.int32),
    "halves": lambda t: t[5:].view(torch.int16),
    "split": lambda t: torch.stack(t.split(8)[:2]),
    "iterate": lambda t: sum(row.sum() for row in t),
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t[0].tolist(),
    "bool": lambda t: bool((t > 0).any()),
    "finite": lambda t: torch.isfinite(t).all(),
    "repr": repr,
    "format": lambda t: f"{t.sum():.3f}",
    "torch.tensor": lambda t: torch.tensor(t),
    "as_tensor": lambda t: torch.as_tensor(t, dtype=torch.float64),
    "new_tensor": lambda t: torch.ones(1).new_tensor(t),
    "zeros_like": torch.zeros_like,
    "new_full": lambda t: t.new_full((2,), 3.0),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": saved,
    "numpy": lambda t: t.numpy().copy(),
    "numpy of a part": lambda t: t[2:, 3].numpy().copy(),
    "array": lambda t: np.array(t),
    "numpy's function": lambda t: np.abs(t).sum(),
    "dlpack": lambda t: torch.utils.dlpack.from_dlpack(t).clone(),
    "storage": shared,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "stack": lambda t: torch.stack([t, t.detach()]),
    "cat": lambda t: torch.cat([t.view(-1), t.data.flatten()]),
    "vector": lambda t: nn.utils.parameters_to_vector([t, t]),
    "vmap": lambda t: torch.vmap(torch.sum)(t),
    "functorch": lambda t: torch.func.grad(lambda x: (x * x).sum())(t),
    "foreach": lambda t: torch.stack(torch._foreach_norm([t, t[0]])),
    "histogram": lambda t: torch.histc(t, 4),
    "einsum": lambda t: torch.einsum("ij,ij->i", t, t),
    "out": lambda t: torch.mul(t, 2, out=torch.empty(t.shape)),
    "copy": lambda t: torch.empty(t.shape).copy_(t),
    "length": len,
    "hash": lambda t: hash(t) == id(t),
}
CHANGES: dict[str, Use] = {
    "add_": lambda t: t.add_(1),
    "zero_": torch.Tensor.zero_,
    "a row": lambda t: t.__setitem__(0, 1.0),
    "a mask": lambda t: t.__setitem__(t > 0, 0.5),
    "data": lambda t: t.data.mul_(2),
    "assigned data": lambda t: setattr(t, "data", torch.ones(t.shape)),
    "detach": lambda t: t.detach().mul_(2),
    "a part": lambda t: t.view(-1)[3:].fill_(4),
    "bits": lambda t: t.view(torch.int32)[1].bitwise_or_(1),
    "copy_": lambda t: t.copy_(torch.arange(t.numel()).view(t.shape)),
    "itself": lambda t: t.add_(t.data),
    "its transpose": lambda t: t[:4, :4].add_(t[:4, :4].T),
    "out": lambda t: torch.add(t, 1, out=t),
    "foreach": lambda t: torch._foreach_mul_([t, torch.ones(2)], 0.5),
    "foreach, scalars": lambda t: torch._foreach_add_([t, t.data], [1.0, 2.0]),
    "foreach, addcdiv": lambda t: torch._foreach_addcdiv_(
        [t, torch.ones(2)], [t.clone(), torch.ones(2)], [t + 9, torch.ones(2)], torch.tensor([1, 2])
    ),
    "apply_": lambda t: t.apply_(lambda x: x + 1),
    "numpy": lambda t: t.numpy().fill(2),
    "normal_": lambda t: nn.init.normal_(t, generator=torch.Generator().manual_seed(3)),
}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(other, np.ndarray):
        assert np.array_equal(one, other)
    else:
        assert one == other


class TestLazyGradients:
    @pytest.mark.parametrize("use", READS.values(), ids=READS)
    @pytest.mark.filterwarnings("ignore:To copy construct", "ignore:__array:DeprecationWarning")
    def test_a_gradient_is_read_as_torchs_and_holds_no_lease(
        self, mlp: tuple[Mlp, Mlp], session: Session, use: Use
    ) -> None:
        gradients = []
        for module in mlp:
            loss_of(module).backward()
            gradients.append(gradient_of(module.first.weight))
        found, expected = map(use, gradients)
        assert_same(found, expected)
        assert leases_held(session) == 0
        assert_same_gradients(*mlp)

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_a_gradient_is_changed_as_torchs_and_holds_no_lease(
        self, mlp: tuple[Mlp, Mlp], session: Session, change: Use
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for module in mlp:
            loss_of(module).backward()
            gradient = gradient_of(module.first.weight)
            version = gradient._version
            result = change(gradient)
            if isinstance(result, torch.Tensor) and result.shape == gradient.shape:
                assert (result is gradient) == (change not in {CHANGES["data"], CHANGES["detach"]})
            assert gradient._version >= version
        assert leases_held(session) == 0
        assert_same_gradients(model, reference)
        for each in (optimizer, torchs):
            each.step()
        assert_same_state(model, reference)

    def test_its_form_takes_no_lease(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        forms = []
        for module in mlp:
            loss_of(module).backward()
        before = session.statistics().lease_count
        for module in mlp:
            gradient = gradient_of(module.first.weight)
            views = (gradient, gradient[1:].T, gradient.data, gradient.view(-1).detach())
            forms.append(
                [
                    *((v.shape, v.dtype, v.device, v.stride(), v.storage_offset()) for v in views),
                    *(
                        gradient.requires_grad,
                        gradient.is_leaf,
                        gradient.grad_fn,
                        gradient.is_sparse,
                    ),
                    *(gradient.layout, gradient.numel(), gradient.element_size(), gradient.nbytes),
                    *(gradient.is_contiguous(), gradient.is_cpu, gradient.grad),
                    isinstance(gradient, torch.Tensor),
                ]
            )
        assert forms[0] == forms[1]
        assert session.statistics().lease_count == before

    def test_it_is_the_same_tensor_while_somebody_holds_it(self, mlp: tuple[Mlp, Mlp]) -> None:
        for module in mlp:
            weight = module.first.weight
            loss_of(module).backward()
            gradient = weight.grad
            assert weight.grad is gradient
            loss_of(module, 1).backward()
            assert weight.grad is gradient
            assert gradient_of(weight).detach_() is gradient
            weight.grad += 1  # type: ignore[operator, assignment]
            assert weight.grad is gradient
            weight.grad = gradient
            assert weight.grad is gradient
        assert_same_gradients(*mlp)

    @pytest.mark.parametrize("what", ["step()", "zero_grad()", "p.grad = None", "p.grad = ..."])
    @pytest.mark.parametrize("is_held", [False, True])
    def test_a_gradient_that_has_ended_keeps_its_value_and_so_do_its_views(
        self, mlp: tuple[Mlp, Mlp], session: Session, what: str, *, is_held: bool
    ) -> None:
        model, reference = mlp
        optimizers = (
            memd_client.AdamW(model.parameters(), lr=1e-2),
            torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True),
        )
        held: list[list[torch.Tensor]] = []
        for module, optimizer in zip(mlp, optimizers, strict=True):
            weight = module.first.weight
            loss_of(module).backward()
            gradient = gradient_of(weight)
            held.append([gradient[1:], gradient.detach().view(-1), *([gradient] * is_held)])
            del gradient
            if what == "step()":
                optimizer.step()
                optimizer.zero_grad()
            elif what == "zero_grad()":
                optimizer.zero_grad()
            else:
                weight.grad = None if what == "p.grad = None" else torch.ones_like(weight)
                assert weight.grad is not held[-1][-1]
            loss_of(module, 1).backward()
            held[-1][0].mul_(2)
        for one, other in zip(*held, strict=True):
            assert torch.equal(one, other)
        assert_same_gradients(model, reference)
        assert leases_held(session) == 0

    def test_one_that_is_assigned_to_another_parameter_is_that_one_until_one_changes(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)

        def assign(module: Mlp, index: int) -> None:
            loss_of(module, index).backward()
            module.first.bias.grad = gradient_of(module.second.weight)[0]

        for module, its in ((model, optimizer), (reference, expected)):
            for index in range(2):
                assign(module, index)
                its.step()
                its.zero_grad()
        assert_same_state(model, reference)
        bias, weight = model.first.bias, model.second.weight
        changes: list[Callable[[], object]] = [
            lambda: gradient_of(bias).mul_(2),
            lambda: gradient_of(weight).mul_(2),
            lambda: loss_of(model).backward(),
            lambda: optimizer.zero_grad(set_to_none=False),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        ]
        for change in changes:
            assign(model, 2)
            with pytest.raises(
                memd_client.MemdError, match=r"gradients of '.*' and '.*' are one.*clone\(\)"
            ):
                change()
            optimizer.zero_grad()
        for module, its in ((model, optimizer), (reference, expected)):
            assign(module, 3)
            module.second.weight.grad = None
            gradient_of(module.first.bias).mul_(2)
            its.step()
            its.zero_grad()
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("holds", ["nobody", "a view", "a buffer of all"])
    def test_a_change_of_what_was_assigned_counts_whoever_holds_it_then(
        self, mlp: tuple[Mlp, Mlp], session: Session, holds: str
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)

        def assign(module: Mlp) -> list[torch.Tensor]:
            parameters = list(module.parameters())
            buffer = torch.ones(sum(each.numel() for each in parameters))
            parts = buffer.split([each.numel() for each in parameters])
            given = [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]
            if holds != "a buffer of all":
                given = [each.clone() for each in given]
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient
            for number, gradient in enumerate(given):
                gradient.add_(number)
            return [given[0].view(-1)] if holds == "a view" else []

        for module, its in ((model, optimizer), (reference, expected)):
            for _ in range(2):
                held = assign(module)
                nn.utils.clip_grad_norm_(module.parameters(), 10.0)
                for each in held:
                    each.mul_(3)
                del held
                its.step()
                its.zero_grad()
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    @pytest.mark.parametrize("is_changed", [False, True])
    @pytest.mark.parametrize("buffers", [1, 2])
    def test_memory_that_was_assigned_ends_with_its_holders_once_memd_has_the_bytes(
        self, mlp: tuple[Mlp, Mlp], buffers: int, *, is_changed: bool
    ) -> None:
        weights = mlp[0].first.weight, mlp[0].second.weight

        def assign() -> list[ref[torch.UntypedStorage]]:
            memory = torch.ones(2, max(each.numel() for each in weights))
            rows = [row if buffers == 1 else row.clone() for row in memory]
            for weight, row in zip(weights, rows, strict=True):
                weight.grad = row[: weight.numel()].view_as(weight)
            if is_changed:
                for row in rows:
                    row.mul_(2)
            return [ref(row.untyped_storage()) for row in rows]

        storages = assign()
        for _ in range(2):
            for weight in weights:
                assert torch.all(gradient_of(weight) + 0 == 1 + is_changed)
        assert [storage() for storage in storages] == [None, None]

    @pytest.mark.parametrize("ends", ["p steps", "p = None"])
    def test_what_was_assigned_to_a_shared_gradient_is_the_other_parameters_too(
        self, mlp: tuple[Mlp, Mlp], session: Session, ends: str
    ) -> None:
        model, reference = mlp
        given = [torch.ones(WIDTH, 64) for _ in mlp]
        optimizers: list[list[torch.optim.Optimizer]] = []
        for module, tensor in zip(mlp, given, strict=True):
            kind = memd_client.AdamW if module is model else partial(torch.optim.AdamW, fused=True)
            optimizers.append([kind(layer.parameters()) for layer in (module.second, module.first)])
            module.second.weight.grad = tensor
            module.first.bias.grad = gradient_of(module.second.weight)[1]
        given[0].mul_(2)
        for use in (
            lambda: gradient_of(model.first.bias).norm(),
            lambda: optimizers[0][1].step(),
            lambda: optimizers[0][0].step(),
        ):
            with pytest.raises(memd_client.MemdError, match=r"are one tensor.*clone\(\)"):
                use()
        given[0].mul_(0.5)
        for optimizer in optimizers[0]:
            optimizer.zero_grad()
        for module, tensor, its in zip(mlp, given, optimizers, strict=True):
            module.second.weight.grad = tensor
            module.first.bias.grad = gradient_of(module.second.weight)[1]
            if ends == "p = None":
                module.second.weight.grad = None
            else:
                its[0].step()
                its[0].zero_grad()
            tensor.mul_(3)
            its[1].step()
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_zeros_that_are_due_are_shared_too(self, mlp: tuple[Mlp, Mlp]) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.first.bias.grad = gradient_of(model.second.weight)[0]
        with pytest.raises(memd_client.MemdError, match=r"are one tensor.*clone\(\)"):
            gradient_of(model.second.weight).add_(1)
        assert not gradient_of(model.first.bias).any()

    @pytest.mark.parametrize("take", ["numpy", "untyped_storage"])
    def test_a_gradient_whose_memory_is_held_is_not_shared(
        self, mlp: tuple[Mlp, Mlp], session: Session, take: str
    ) -> None:
        model, reference = mlp
        for module in mlp:
            loss_of(module).backward()
        memory = getattr(gradient_of(model.second.weight), take)()
        with pytest.raises(memd_client.MemdError, match=r"weight' is still held.*clone\(\)"):
            model.first.bias.grad = gradient_of(model.second.weight)[0]
        assert_same_gradients(model, reference)
        del memory
        model.first.bias.grad = gradient_of(model.second.weight)[0]
        assert leases_held(session) == 0

    def test_a_step_waits_for_a_thread_that_is_about_to_let_go_of_a_gradient(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        """As gloo's does, shortly after it has woken who waits for a collective."""
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for module in mlp:
            loss_of(module).backward()
        held = [gradient_of(model.second.weight).untyped_storage()]

        def let_go() -> None:
            time.sleep(0.05)
            held.clear()

        with ThreadPoolExecutor() as threads:
            letting_go = threads.submit(let_go)
            optimizer.step()
            letting_go.result()
        torchs.step()
        optimizer.zero_grad()
        assert_same_state(model, reference)
        assert leases_held(session) == 0

    def test_a_gradient_that_has_ended_is_assigned_only_as_a_clone(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, reference = mlp
        for module in mlp:
            loss_of(module).backward()
            kept = gradient_of(module.second.weight)
            module.second.weight.grad = None
            if module is model:
                for parameter, gradient in (
                    (model.first.bias, kept[0]),
                    (model.second.weight, kept),
                ):
                    with pytest.raises(
                        memd_client.MemdError, match=r"'layers\.2\.weight' has ended.*clone\(\)"
                    ):
                        parameter.grad = gradient
            module.first.bias.grad = kept[0].clone()
            kept.mul_(2)
        assert_same_gradients(model, reference)

    def test_a_gradient_that_is_assigned_to_its_own_parameter_stays(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        for module in mlp:
            loss_of(module).backward()
            bias = module.first.bias
            kept = gradient_of(bias)
            bias.grad = kept.detach()
            kept.mul_(2)
        assert_same_gradients(*mlp)

    def test_gradients_of_which_one_is_shared_are_clipped_all_or_none(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        for module in mlp:
            loss_of(module).backward()
            module.first.bias.grad = gradient_of(module.second.weight)[0]
        with pytest.raises(memd_client.MemdError, match=r"are one tensor.*clone\(\)"):
            optimizer.clip_grad_norm_(1e-3)
        assert_same_gradients(model, reference)

    def test_a_change_that_is_refused_holds_no_lease_though_the_error_is_kept(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        for module in mlp:
            loss_of(module).backward()
            module.first.bias.grad = gradient_of(module.second.weight)[0]
        with pytest.raises(memd_client.MemdError, match="are one tensor") as error:
            gradient_of(model.first.bias).numpy()
        assert leases_held(session) == 0
        optimizer.step()
        torchs.step()
        assert error.value.__traceback__ is not None
        assert_same_state(model, reference)

    def test_it_can_be_changed_inside_and_outside_of_inference_mode(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in mlp:
            loss_of(module).backward()
            with torch.inference_mode():
                gradient = gradient_of(module.first.weight)
                gradient.mul_(2)
                weight = module.first.weight.detach()
                norms = gradient.norm() + weight.norm()
            gradient.mul_(2)
            gradient[0] = norms
        assert_same_gradients(*mlp)
        assert leases_held(session) == 0

    def test_several_threads_read_a_gradient(self, mlp: tuple[Mlp, Mlp], session: Session) -> None:
        for module in mlp:
            loss_of(module).backward()
        expected = [gradient_of(p).norm() for p in mlp[1].parameters()]

        def norms(_: int) -> list[torch.Tensor]:
            return [gradient_of(p).norm() for p in mlp[0].parameters()]

        with ThreadPoolExecutor(4) as threads:
            for found in threads.map(norms, range(16)):
                assert found == expected
        assert leases_held(session) == 0

    def test_an_operation_that_fails_keeps_no_lease(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        loss_of(mlp[0]).backward()
        gradient = gradient_of(mlp[0].first.weight)
        for name in ("add_", "matmul"):
            with pytest.raises(RuntimeError, match=r"size|shape") as error:
                getattr(gradient, name)(torch.ones(7))
            assert leases_held(session) == 0
            assert error.value.__traceback__ is not None

    @pytest.mark.parametrize(
        "use",
        [
            lambda g: g.t_(),
            lambda g: g.resize_(3),
            lambda g: g.share_memory_(),
            lambda g: torch.empty(0).set_(g),
            lambda g: setattr(g, "data", torch.ones(3)),
            lambda g: g.view(torch.complex64).conj(),
        ],
        ids=["t_", "resize_", "share_memory_", "set_", "data", "conj"],
    )
    def test_what_needs_memory_of_its_own_is_refused_by_name(
        self, mlp: tuple[Mlp, Mlp], use: Use
    ) -> None:
        for module in mlp:
            loss_of(module).backward()
        with pytest.raises(memd_client.InvalidArgument, match=r"'layers\.0\.weight'.*clone"):
            use(gradient_of(mlp[0].first.weight))
        assert_same_gradients(*mlp)

    @pytest.mark.parametrize("convert", [nn.Module.cpu, nn.Module.float, lambda m: m.to("cpu")])
    def test_a_module_that_is_converted_to_itself_keeps_its_gradients(
        self, mlp: tuple[Mlp, Mlp], convert: Callable[[nn.Module], Any]
    ) -> None:
        """Lightning does so when a training ends, also with an error."""
        module, reference = mlp
        for each in mlp:
            loss_of(each).backward()
            convert(each)
        assert_same_gradients(module, reference)

    def test_a_raw_address_is_valid_until_the_step(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        for module in mlp:
            loss_of(module).backward()
        gradient = gradient_of(model.first.weight)
        assert gradient.data_ptr() == gradient.data_ptr() == gradient.numpy().ctypes.data
        assert leases_held(session) == 1
        with pytest.raises(RuntimeError, match="data"):
            torch._C._to_dlpack(gradient)
        optimizer.step()
        assert leases_held(session) == 0
        assert torch.equal(gradient, gradient_of(reference.first.weight))

    def test_backward_over_a_gradient_that_changed_since_is_torchs_error(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in mlp:
            x = torch.ones(64, 32, requires_grad=True)
            loss_of(module).backward()
            weight = module.first.weight
            unchanged = (x * gradient_of(weight)).sum()
            unchanged.backward()
            assert x.grad is not None
            assert torch.equal(x.grad, gradient_of(weight))
            in_place, by_backward = ((x * gradient_of(weight)).sum() for _ in range(2))
            assert leases_held(session) == 0
            loss_of(module, 1).backward()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                by_backward.backward()
            gradient_of(weight).detach().zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                in_place.backward()

    def test_lists_of_different_length_are_torchs_error(self, mlp: tuple[Mlp, Mlp]) -> None:
        for module in mlp:
            loss_of(module).backward()
            gradients = [gradient_of(p) for p in module.parameters()]
            with pytest.raises(RuntimeError, match=r"same (number of tensors|length)|must match"):
                torch._foreach_add_(gradients, gradients[:1])
        assert_same_gradients(*mlp)

    def test_gradients_of_tracked_sessions_keep_their_value_until_the_commit(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        session.track(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
        for module in mlp:
            loss_of(module).backward()
        gradients = [gradient_of(p) for p in model.parameters()]
        optimizer.step()
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            assert torch.equal(gradient, gradient_of(parameter))
        session.commit()
        assert leases_held(session) == 0


class TestDetached:
    def test_it_shows_the_value_of_each_time_and_holds_no_lease(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, reference = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        held = [[p.detach() for p in module.parameters()] for module in mlp]
        parts = [values[0][3:].T for values in held]
        assert leases_held(session) == 0
        train_one_step(model, optimizer, 0)
        train_one_step(reference, torchs, 0)
        for one, other in zip(*held, strict=True):
            assert torch.equal(one, other)
            assert np.array_equal(one.numpy(), other.numpy())
        assert torch.equal(*parts)
        assert leases_held(session) == 0

    def test_what_is_changed_through_it_is_kept(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        for module in mlp:
            module.first.weight.detach().mul_(2)
            module.first.weight.detach()[3].fill_(1)
            nn.init.ones_(module.second.bias.detach())
            torch._foreach_add_([p.detach() for p in module.parameters()], 0.5)
        assert leases_held(session) == 0
        assert_same_state(*mlp)

    def test_its_address_is_refused(self, mlp: tuple[Mlp, Mlp]) -> None:
        with pytest.raises(memd_client.NotResident, match="data_ptr"):
            mlp[0].first.weight.detach().data_ptr()
        assert_same_state(*mlp)

    @pytest.mark.parametrize("is_held", [False, True])
    def test_its_memory_may_be_written_though_torch_counts_nothing(
        self, mlp: tuple[Mlp, Mlp], session: Session, *, is_held: bool
    ) -> None:
        held: list[Any] = []

        def write(memory: Any, value: float) -> None:
            memory[0] = value
            if is_held:
                held.append(memory)

        twin = torch.optim.AdamW(mlp[1].parameters(), lr=1e-2, fused=True)
        optimizers = memd_client.AdamW(mlp[0].parameters(), lr=1e-2), twin
        gradients: list[torch.Tensor | None] = []
        for module, optimizer in zip(mlp, optimizers, strict=True):
            for index in range(3):
                write(module.first.weight.detach().numpy(), 0.5 * index)
                write(np.asarray(module.second.bias.data), 1.0)
                loss = loss_of(module, index)
                write(module.second.weight.detach().numpy(), 0.25)  # backward uses it
                loss.backward()
                gradients.append(gradient_of(module.first.weight).clone())
                write(torch.utils.dlpack.from_dlpack(module.first.bias.detach()), -1.0)
                module.second.bias.detach().untyped_storage()[0] = 7
                optimizer.step()
                optimizer.zero_grad()
            write(module.first.weight.detach().numpy(), 3.0)
        assert_same_state(*mlp)
        for ours, plain in zip(gradients[:3], gradients[3:], strict=True):
            assert ours is not None
            assert plain is not None
            assert torch.equal(ours, plain)
        half = len(held) // 2
        assert all(map(np.array_equal, held[:half], held[half:]))
        held.clear()
        assert leases_held(session) == 0

    def test_its_memory_may_be_written_after_a_cast_of_autocast(self, mlp: tuple[Mlp, Mlp]) -> None:
        """Autograd has saved the cast, and so the value from before."""
        gradients = []
        for module in mlp:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(module)
            module.second.weight.detach().numpy()[0] = 0.25
            loss.backward()
            gradients.append(gradient_of(module.first.weight).clone())
        assert torch.equal(*gradients)
        assert_same_state(*mlp)

    @pytest.mark.parametrize("is_inside", [False, True])
    def test_backward_over_a_value_that_changed_since_is_torchs_error(
        self, session: Session, *, is_inside: bool
    ) -> None:
        class Detaching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.child = nn.Linear(32, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.child.weight.detach()

        pair = build(Detaching), build(Detaching)
        memd_client.offload(pair[0], session)
        gradients = []
        for module in pair:
            weight = module.get_parameter("child.weight")
            x = torch.ones(4, 32, requires_grad=True)
            unchanged, changed = (
                (module(x) if is_inside else x @ weight.detach()).sum() for _ in range(2)
            )
            assert leases_held(session) == 0
            unchanged.backward()
            gradients.append(x.grad)
            with torch.no_grad():
                weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                changed.backward()
        assert gradients[0] is not None
        assert gradients[1] is not None
        assert torch.equal(gradients[0], gradients[1])

    def test_averages_of_parameters_have_torchs_bits(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        averages = [AveragedModel(module) for module in mlp]
        for step in range(3):
            for module, averaged in zip(mlp, averages, strict=True):
                with torch.no_grad():
                    module.first.weight.add_(step)
                averaged.update_parameters(module)
        assert_same_state(*averages)
        assert leases_held(session) == 0


class TestGraphsOfGradients:
    def test_a_gradient_with_a_graph_is_refused_by_name(self, session: Session) -> None:
        """p.grad lost the graph, and what was computed from it had no gradient."""
        model = memd_client.offload(Gpt(), session)
        with pytest.raises(memd_client.InvalidArgument, match=r"the gradient of '.*create_graph"):
            loss_of(model).backward(create_graph=True)
        model.zero_grad()
        loss_of(model).backward()
        assert leases_held(session) == 0


class TestHooksOfOthers:
    """Saved-tensor hooks of the user around a module's forward."""

    @pytest.mark.parametrize(
        "hooks",
        [
            save_on_cpu,
            lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
            lambda: saved_tensors_hooks(torch.clone, lambda t: t),
            lambda: saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.detach),
            lambda: saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy),
            lambda: saved_tensors_hooks(lambda t: pickle.dumps(t), pickle.loads),
        ],
        ids=["save_on_cpu", "as it is", "clone", "methods", "numpy", "pickle"],
    )
    def test_what_they_keep_holds_no_lease(
        self, session: Session, hooks: Callable[[], Any]
    ) -> None:
        class Plain(Gpt):
            """Tokens are integers, which numpy takes too."""

        pair = build(Plain), build(Plain)
        memd_client.offload(pair[0], session)
        for module in pair:
            with hooks():
                loss = loss_of(module)
            assert leases_held(session) == 0
            loss.backward()
        assert_same_gradients(*pair)

    def test_they_see_all_that_is_saved(self, session: Session) -> None:
        seen: list[list[torch.Tensor]] = []
        pair = build(Mlp), build(Mlp)
        memd_client.offload(pair[0], session)
        for module in pair:
            found: list[torch.Tensor] = []
            seen.append(found)

            def pack(tensor: torch.Tensor, found: list[torch.Tensor] = found) -> torch.Tensor:
                found.append(tensor.clone())
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                loss_of(module).backward()
        assert len(seen[0]) == len(seen[1])
        assert all(torch.equal(*both) for both in zip(*seen, strict=True))

    def test_backward_over_a_value_that_changed_since_is_an_error(
        self, mlp: tuple[Mlp, Mlp]
    ) -> None:
        model, _ = mlp
        with save_on_cpu():
            loss = loss_of(model)
        with torch.no_grad():
            model.second.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"layers\.2\.weight.*modified|modified.*layers\.2"):
            loss.backward()

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_checkpoints_inside_of_them_have_the_same_bits(
        self, mlp: tuple[Mlp, Mlp], session: Session, *, use_reentrant: bool
    ) -> None:
        for module in mlp:
            x = batch(module).requires_grad_()
            with save_on_cpu():
                output = checkpoint(module, x, use_reentrant=use_reentrant)
                loss = module(output).square().mean()
            assert leases_held(session) == 0
            loss.backward()
        assert_same_gradients(*mlp)


def scaled_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    index: int,
    *,
    overflows: bool = False,
    max_norm: float | None = None,
) -> None:
    factor = float("inf") if overflows else 1.0
    scaler.scale(loss_of(model, index) * factor).backward()
    if max_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


class TestGradScaler:
    # 3000 has no exact inverse: unscale_() multiplies by it, and torch's fused kernel divides.
    @pytest.mark.parametrize("init_scale", [65536.0, 3000.0])
    @pytest.mark.parametrize("max_norm", [None, 1e-4])
    @pytest.mark.parametrize("offloaded", [False, True])
    def test_steps_have_torchs_bits_and_one_with_infs_counts_and_changes_nothing(
        self, session: Session, init_scale: float, max_norm: float | None, *, offloaded: bool
    ) -> None:
        model, reference = build(Mlp), build(Mlp)
        if offloaded:
            memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.named_parameters(), lr=1e-2, session=session)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        scalers = [
            torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2) for _ in range(2)
        ]
        for step in range(5):
            for each, its, scaler in (
                (model, optimizer, scalers[0]),
                (reference, torchs, scalers[1]),
            ):
                scaled_step(each, its, scaler, step, overflows=step == 1, max_norm=max_norm)
            assert session.committed_step == step + 1
            assert_same_state(model, reference)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same_moments(optimizer.state_dict(), torchs.state_dict())
        assert leases_held(session) == 0

    def test_lightning_may_clip_gradients_between_unscaling_and_the_step(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        """It refuses to for optimizers that say that they unscale."""
        model, reference = mlp
        optimizers = (
            memd_client.AdamW(model.parameters(), lr=1e-2),
            torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True),
        )
        assert not optimizers[0]._step_supports_amp_scaling
        for module, optimizer in zip(mlp, optimizers, strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(2):
                scaled_step(module, optimizer, scaler, step, overflows=step == 0, max_norm=1e-3)
        assert session.committed_step == 2
        assert_same_state(model, reference)

    def test_a_first_step_with_infs_leaves_the_gradients(
        self, mlp: tuple[Mlp, Mlp], session: Session
    ) -> None:
        model, _ = mlp
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model) * float("inf")).backward()
        scaler.step(optimizer)
        assert session.committed_step == 1
        assert not torch.isfinite(gradient_of(model.first.weight)).all()
        optimizer.zero_grad()
        assert model.first.weight.grad is None
        assert not any(state["step"] for state in optimizer.state_dict()["state"].values())
        session.commit()
        assert session.committed_step == 1

    def test_a_tracked_scaler_is_resumed_with_the_steps_that_it_skipped(
        self, job: OpenSession
    ) -> None:
        reference = build(Mlp)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        its_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for end in (3, 6):  # two lives of the process
            with job() as session:
                model = memd_client.offload(build(Mlp), session)
                optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
                session.track(scaler=scaler)
                begin = session.resume()
                assert begin == end - 3
                for step in range(begin, end):
                    overflows = step in {2, 3}
                    scaled_step(model, optimizer, scaler, step, overflows=overflows)
                    assert session.committed_step == step
                    session.commit()
                    scaled_step(reference, torchs, its_scaler, step, overflows=overflows)
                assert session.committed_step == end
                assert scaler.state_dict() == its_scaler.state_dict()
                assert_same_state(model, reference)
                assert_same_moments(optimizer.state_dict(), torchs.state_dict())

    def test_without_tracking_a_loop_resumes_after_a_step_with_infs(self, job: OpenSession) -> None:
        reference = build(Mlp)
        torchs = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for end in (2, 4):
            with job() as session:
                model = memd_client.offload(build(Mlp), session)
                optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
                begin = session.resume()
                assert begin == end - 2
                for step in range(begin, end):
                    for each, its, scaler in (
                        (model, optimizer, scalers[0]),
                        (reference, torchs, scalers[1]),
                    ):
                        scaled_step(each, its, scaler, step, overflows=step == 1)
                assert_same_state(model, reference)
