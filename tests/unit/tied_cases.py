"""A state_dict has tied parameters once, as in plain PyTorch: run as client_cases.py is."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.unit.client_cases import VOCABULARY, WIDTH, Gpt, Mlp, assert_same_state, build, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client import Session

TIED = ("embedding.weight", "head.weight")


class Twice(nn.Module):
    """One module under two names, and one parameter in two modules that share no other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp()
        self.second = self.first
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.bias = self.first.second.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.third(self.second(self.first(x)))
        return output


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file


def sharing(state: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names of which the tensors have one storage."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return sorted(names.values())


class TestTied:
    @pytest.mark.parametrize("make", [Gpt, Twice])
    def test_tied_entries_have_one_storage(
        self, session: Session, make: Callable[[], nn.Module]
    ) -> None:
        model, reference = memd_client.offload(build(make), session), build(make)
        assert sharing(model.state_dict()) == sharing(reference.state_dict())
        with memd_client.gather(model):
            assert sharing(model.state_dict()) == sharing(reference.state_dict())
        assert_same_state(model, reference)

    def test_torch_save_writes_them_once(self, session: Session) -> None:
        model, reference = memd_client.offload(build(Gpt), session), build(Gpt)
        once, plain = saved(model), saved(reference)
        assert once.getbuffer().nbytes < plain.getbuffer().nbytes + VOCABULARY * WIDTH * 4
        once.seek(0)
        loaded = torch.load(once)
        assert sharing(loaded) == sharing(reference.state_dict())
        model.load_state_dict(loaded)
        assert_same_state(model, reference)

    def test_a_state_dict_keeps_its_values_when_later_ones_are_made(self, session: Session) -> None:
        model: Any = memd_client.offload(build(Gpt), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        before = model.state_dict()
        value = before[TIED[0]].clone()
        loss_of(model).backward()
        optimizer.step()
        after = model.state_dict()
        for name in TIED:
            assert torch.equal(before[name], value)
            assert not torch.equal(after[name], value)
        assert before[TIED[0]].data_ptr() != after[TIED[0]].data_ptr()

    def test_a_dictionary_that_is_filled_again_has_the_new_values(self, session: Session) -> None:
        """Under other names, beside the old ones."""
        model: Any = memd_client.offload(build(Gpt), session)
        filled: dict[str, torch.Tensor] = {}
        model.state_dict(destination=filled, prefix="old.")
        with memd_client.gather(model, write=True), torch.no_grad():
            model.embedding.weight.zero_()
        model.state_dict(destination=filled, prefix="new.")
        for name in TIED:
            assert torch.count_nonzero(filled[f"old.{name}"]) > 0
            assert torch.count_nonzero(filled[f"new.{name}"]) == 0

    def test_what_hooks_of_others_made_of_an_entry_stays(self, session: Session) -> None:
        model: Any = build(Gpt)

        def halve(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].half()

        model.head.register_state_dict_post_hook(halve)
        memd_client.offload(model, session)
        state = model.state_dict()
        assert state["head.weight"].dtype == torch.float16
        assert torch.equal(state["head.weight"], state["embedding.weight"].half())
