"""Values by object, while it lives."""

from __future__ import annotations

import torch

from memd_client.base.identity import ByIdentity


def test_a_value_is_found_by_the_object_itself_and_not_by_an_equal_one() -> None:
    values: ByIdentity[torch.Tensor, str] = ByIdentity()
    one, other = torch.ones(2), torch.ones(2)
    values[one] = "one"
    assert values.get(one) == "one"
    assert values.get(other) is None
    values[one] = "another"
    assert values.get(one) == "another"
    assert len(values) == 1


def test_a_value_goes_with_its_object() -> None:
    values: ByIdentity[torch.UntypedStorage, str] = ByIdentity()
    for _ in range(100):  # most at the address of the one before
        storage = torch.ones(2).untyped_storage()
        assert values.get(storage) is None
        values[storage] = "one"
        del storage
        assert len(values) == 0


def test_a_storage_that_only_a_tensor_holds_keeps_its_value() -> None:
    values: ByIdentity[torch.UntypedStorage, str] = ByIdentity()
    tensor = torch.ones(2)
    values[tensor.untyped_storage()] = "one"
    view = tensor.view(2, 1)
    del tensor
    assert values.get(view.untyped_storage()) == "one"


def test_an_object_that_dies_late_takes_nothing_of_the_one_that_took_its_place() -> None:
    values: ByIdentity[torch.Tensor, str] = ByIdentity()
    tensor = torch.ones(2)
    values[tensor] = "one"
    first = values._found[id(tensor)][0]
    values[tensor] = "another"
    values._forget(first)
    assert values.get(tensor) == "another"
