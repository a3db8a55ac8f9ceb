"""A loader of Accelerate that knows which batch of which pass is trained, and can go on there."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import SeedableRandomSampler, get_sampler, skip_first_batches

from memd_client.errors import InvalidArgument
from memd_client.random_states import random_state, set_random_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass(kw_only=True)
class _Pass:
    """One iteration over a loader, as far as it has come."""

    begin: dict[str, Any]  # what the order of batches depends on
    skipped: int  # batches at the beginning that the user has skipped
    batches: int  # those and the ones that were given out


class CountedLoader:
    """`prepare()` returns it for a loader: it is one, and counts. After `go_on` the next pass is
    the one that was interrupted: it has its order, and begins behind the batches that were trained.

    The order may depend on the random numbers of the process, on the `generator` of the loader or
    its sampler, and on `set_epoch()`.
    """

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared
        self._pass_count = 0
        self._running: _Pass | None = None
        self._to_go_on: dict[str, Any] | None = None
        self._random: dict[str, Any] | None = None  # where the interrupted pass goes on

    @property
    def __class__(self) -> Any:
        """As Accelerate's: `isinstance(loader, DataLoader)` is true."""
        return self._prepared.__class__

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise AttributeError(f"the class of a loader cannot be replaced by {kind}")

    def __getattr__(self, name: str) -> Any:
        if name == "_prepared":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._prepared, name)

    def __len__(self) -> int:
        return len(self._prepared)

    def __iter__(self) -> Iterator[Any]:
        return self.batches(0)

    @property
    def is_running(self) -> bool:
        """A pass has begun, or goes on next."""
        return self._pass is not None

    @property
    def place(self) -> tuple[int, int]:
        """Passes that are over, and batches of the next that were given out."""
        running = self._pass
        if running is None:
            return self._pass_count, 0
        return self._pass_count - 1, running["batches"]

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "passes": self._pass_count,
            "iteration": self._prepared.iteration,
            "running": self._pass,
        }

    @property
    def _pass(self) -> dict[str, Any] | None:
        return dict(vars(self._running)) if self._running is not None else self._to_go_on

    def go_on(self, state: dict[str, Any]) -> None:
        """From `state`, with the random numbers of now.

        Raises:
            InvalidArgument: the loader has other generators than then.
        """
        self.refuse_other_generators(state)
        running = state["running"]
        self._pass_count = state["passes"]
        self._prepared.iteration = state["iteration"]
        self._to_go_on = running
        self._random = random_state() if running is not None else None

    def refuse_other_generators(self, state: dict[str, Any]) -> None:
        """
        Raises:
            InvalidArgument: the loader has other generators than in `state`.
        """
        running = state["running"]
        if running is not None and len(running["begin"]["generators"]) != len(self._generators()):
            raise InvalidArgument(
                "the loader or its sampler has other generators than when the commit was made, so "
                "the order of its batches cannot be restored"
            )

    def forget(self) -> None:
        """The next pass is the first, and begins at its first batch."""
        self._to_go_on = self._random = None
        self._pass_count = self._prepared.iteration = 0

    def skipping(self, count: int) -> Any:
        """As `accelerator.skip_first_batches`.

        Raises:
            InvalidArgument: the next pass goes on elsewhere by itself.
        """
        if self._to_go_on is None:
            return _Skipping(self, count)
        if count != self._to_go_on["batches"]:
            raise InvalidArgument(
                f"the loader goes on behind batch {self._to_go_on['batches']} by itself, where "
                f"the commit or checkpoint was made, and {count} batches are to be skipped; "
                "iterate over the loader as it is"
            )
        return self

    def batches(self, count: int) -> Iterator[Any]:
        """A pass. The first `count` batches are skipped, unless one goes on."""
        again, self._to_go_on = self._to_go_on, None
        if again is None:
            self._pass_count += 1
            running = _Pass(begin=self._begin(), skipped=count, batches=count)
            loader = skip_first_batches(self._prepared, count) if count else self._prepared
            batches = iter(loader)
        else:
            running = _Pass(**again)
            batches = self._after(running)
        self._running = running
        try:
            for batch in batches:
                running.batches += 1
                yield batch
        finally:
            self._running = None
        if again is not None and not running.skipped:
            # Accelerate counts passes, and this one was over a copy.
            self._prepared.iteration += 1

    def _after(self, running: _Pass) -> Iterator[Any]:
        """The rest of an interrupted pass."""
        assert self._random is not None
        set_random_state(running.begin["random"])
        for generator, state in zip(self._generators(), running.begin["generators"], strict=True):
            generator.set_state(state)
        batches = iter(skip_first_batches(self._prepared, running.batches))
        # The sampler draws when the first batch is asked for.
        first = list(itertools.islice(batches, 1))
        set_random_state(self._random)
        self._random = None
        return itertools.chain(first, batches)

    def _begin(self) -> dict[str, Any]:
        return {
            "random": random_state(),
            "generators": [generator.get_state() for generator in self._generators()],
        }

    def _generators(self) -> list[torch.Generator]:
        sampler = get_sampler(self._prepared)
        # A SeedableRandomSampler seeds its own anew in each pass.
        is_seeded = isinstance(sampler, SeedableRandomSampler)
        holders = (self._prepared, None if is_seeded else sampler)
        found = (getattr(each, "generator", None) for each in holders)
        return list({id(each): each for each in found if each is not None}.values())


class _Skipping:
    """A loader without its first batches, for one pass or several."""

    def __init__(self, loader: CountedLoader, count: int) -> None:
        self._loader = loader
        self._count = count

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while a copy is made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader) - self._count

    def __iter__(self) -> Iterator[Any]:
        return self._loader.batches(self._count)
