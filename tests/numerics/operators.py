"""Runs every operator of torch's own table with an offloaded parameter in place of a tensor, each
in a process of its own, and prints what became of each as JSON: a kernel that reads where no memory
is ends the process. Without a daemon: the fake one of the unit tests.

Run: python -m tests.numerics.operators [--every 5] [NAME…]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import memd_client
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS_MAX = 60  # one operator
SAMPLES_MAX = 3
INPUTS_MAX = 2  # of one sample
# Their results are memory that nobody has written.
UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


def arguments_with_parameters(op: Any) -> Iterator[tuple[Any, int]]:
    """The operator's sample inputs as trees of arguments, each with the number of a leaf that may
    be a parameter."""
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=False)
    for sample in itertools.islice(samples, SAMPLES_MAX):
        tree = (sample.input, sample.args, sample.kwargs)
        places = [
            index
            for index, leaf in enumerate(tree_leaves(tree))
            if type(leaf) is torch.Tensor
            and leaf.dtype is torch.float32
            and leaf.layout is torch.strided
            and leaf.numel()
            and leaf.is_contiguous()
        ]
        for index in places[:INPUTS_MAX]:
            yield tree, index


def called(op: Any, tree: Any, index: int, value: torch.Tensor) -> list[Any]:
    """The leaves of the result, with `value` as the leaf of this number."""
    leaves, form = tree_flatten(tree)
    leaves = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
    leaves[index] = value
    first, args, kwargs = tree_unflatten(leaves, form)
    torch.manual_seed(0)
    with torch.no_grad():
        return tree_leaves(op(first, *args, **kwargs))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.resolve_conj()
        .resolve_neg()
        .reshape(-1)
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
    )


def is_same(op: Any, got: list[Any], expected: list[Any]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        if not isinstance(other, torch.Tensor):
            return bool(one == other or one != one)
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if op.name in UNWRITTEN:
            return True
        if other.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        if torch.equal(bits(one), bits(other)):
            return True
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))

    return len(got) == len(expected) and all(map(equal, got, expected))


def outcome_of(op: Any) -> str:
    """The worst of its samples."""
    outcomes = {"has no float32 tensor"}
    for tree, index in arguments_with_parameters(op):
        value = tree_leaves(tree)[index].clone()
        try:
            expected = called(op, tree, index, nn.Parameter(value.clone(), requires_grad=False))
        except Exception:  # noqa: BLE001 # what plain PyTorch raises is no matter of memd
            outcomes.add("plain PyTorch raises")
            continue
        module = nn.Module()
        parameter = nn.Parameter(value, requires_grad=False)
        module.register_parameter("weight", parameter)
        memd_client.offload(module, FakeDaemon().session())
        try:
            got = called(op, tree, index, parameter)
        except memd_client.NotResident:
            outcomes.add("NotResident")
        except Exception as error:  # noqa: BLE001 # of any kind, it is this operator's outcome
            return f"{type(error).__name__}: {error}"[:300]
        else:
            if not is_same(op, got, expected):
                return "another result"
            outcomes.add("resident")
    order = ["NotResident", "resident", "plain PyTorch raises", "has no float32 tensor"]
    return min(outcomes, key=order.index)


def run_alone(op: Any) -> str:
    """`outcome_of` in a child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS_MAX)
        os.write(write, outcome_of(op).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return text if status == 0 else f"the process ended with status {status}"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="one of so many operators")
    parser.add_argument("names", nargs="*", help="of these names alone")
    wanted = parser.parse_args()
    outcomes = {
        f"{op.name}.{op.variant_test_name}".rstrip("."): run_alone(op)
        for op in op_db[:: wanted.every]
        if not wanted.names or op.name in wanted.names
    }
    json.dump(outcomes, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
