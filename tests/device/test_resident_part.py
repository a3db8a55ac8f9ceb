"""Copies of values to the device, against the fewest bytes that anybody could copy."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_native import USE_LAST, USE_READ
from tests.device.offloaded import budget_bytes
from tests.device.offloaded_models import Checkpointed, Lora
from tests.device.sequence_models import EncoderDecoder, TiedGpt
from tests.device.timed_training import INPUTS, Blocks, TimedSteps, TimedTraining
from tests.device.trained import connected, least_bytes
from tests.numerics.fewest_bytes import Trace, fewest_mib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from tests.daemons import Daemon

log = logging.getLogger(__name__)

MIB = 1 << 20


def fewest_bytes(steps: TimedSteps, device_bytes: int, *, whole: bool = False) -> float:
    """One step's bytes. It changes values on the host, so the next one has to copy each of them,
    whatever was kept. The bound asks for less than modules do: it needs one value at a time, has no
    gaps in memory, and keeps parts of values unless they are `whole`."""
    shard_ids = sorted(set(steps.uses))
    last = {shard_id: place for place, shard_id in enumerate(steps.uses)}
    uses = [
        (
            shard_ids.index(shard_id),
            USE_LAST if place == last[shard_id] and shard_id not in steps.kept_ids else USE_READ,
        )
        for place, shard_id in enumerate(steps.uses)
    ]
    trace = Trace(
        uses=uses,
        item_mib=[steps.size_bytes[shard_id] / MIB for shard_id in shard_ids],
        state_mib=0,
        gradient_mib=0,
    )
    changed_bytes = sum(steps.size_bytes[each] for each in shard_ids if each not in steps.kept_ids)
    again_mib = fewest_mib(trace, cache_mib=device_bytes / MIB, writes_changes=True, whole=whole)
    return changed_bytes + again_mib * MIB


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    shares: Sequence[float]  # of the parameters; 0: what the largest module needs, and a quarter
    inputs: int = INPUTS
    whole_shares: Sequence[float] = ()
    """A value is a large part of what is kept there, or of what streams, so parts of values are
    fewer bytes than whole ones."""


def checkpointed() -> nn.Module:
    model = Blocks(12)
    for place, block in enumerate(model.blocks):
        model.blocks[place] = Checkpointed(block)
    return model


LORA_WIDTH = 128
CASES = (
    Case("blocks", partial(Blocks, 12), (0.0, 0.25, 0.5, 0.75)),
    Case("few blocks", partial(Blocks, 2), (), whole_shares=(0.0, 0.5, 0.75)),
    Case("checkpoints", checkpointed, (0.5, 0.75), whole_shares=(0.0,)),
    Case("gpt", partial(TiedGpt, 12), (0.0, 0.25, 0.5, 0.75)),
    Case("encoder-decoder", partial(EncoderDecoder, 6), (0.0, 0.25, 0.5)),
    # Most of it is frozen, and stays from step to step.
    Case(
        "lora",
        partial(Lora, 48, LORA_WIDTH),
        (0.0, 0.25, 0.5),
        inputs=LORA_WIDTH,
        whole_shares=(0.75,),
    ),
)


# The others are in `make test-more`.
_SHORT = (("blocks", 0.0), ("blocks", 0.5), ("checkpoints", 0.5), ("gpt", 0.5), ("lora", 0.25))


def _parameters() -> Iterator[Any]:
    for case in CASES:
        for whole, shares in ((False, case.shares), (True, case.whole_shares)):
            for share in shares:
                marks = () if (case.name, share) in _SHORT else (pytest.mark.more,)
                name = f"{case.name}-{share or 'least'}{'-whole' * whole}"
                yield pytest.param(case, share, whole, id=name, marks=marks)


@pytest.mark.parametrize(("case", "share", "whole"), list(_parameters()))
def test_a_step_copies_at_most_a_twentieth_more_than_the_bound(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, case: Case, share: float, whole: bool
) -> None:
    torch.manual_seed(0)
    model = case.build()
    with connected(daemon, monkeypatch) as session:
        device_bytes = max(budget_bytes(model, share) or 0, least_bytes(model, session))
        memd_client.offload(model, session, device="sim", device_bytes=device_bytes)
        found = TimedTraining(model, session, torch.randn(8, case.inputs)).time()
    fewest = fewest_bytes(found, device_bytes, whole=whole)
    log.info("%s, %g: copied / fewest %.4f", case.name, share, found.copied_bytes / fewest)
    assert 0.999 * fewest <= found.copied_bytes <= 1.05 * fewest
