"""How much of a device's memory the copies of one model take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memd_client.device.space import aligned

# So many rounds in a row have needed no more memory than those before them when the copies get
# more. A loop shows its longest batches and its evaluation in some of them.
_STEADY_ROUNDS = 8
# A size that the program has chosen comes back earlier.
_STEADY_ROUNDS_CHOSEN = 1
# Copies get all but a twentieth of what rounds leave once so many have needed no more memory than
# those before them, and all but a quarter until then: of n batches in any order, the last is the
# longest with a chance of one in n.
_CALM_ROUNDS = 64
# The most steady rounds, however often memory has run out.
_STEADY_ROUNDS_MAX = 1 << 10


@dataclass(frozen=True, slots=True)
class _Reading:
    """Torch's statistics of a device's memory."""

    reserved_bytes: int
    freed_count: int  # segments that the driver has got back
    refused_count: int

    @staticmethod
    def of(device: torch.device) -> _Reading:
        found = torch.accelerator.memory_stats(device)
        return _Reading(
            reserved_bytes=found.get("reserved_bytes.all.current", 0),
            freed_count=found.get("num_device_free", 0),
            refused_count=found.get("num_ooms", 0),
        )


class DeviceBudget:
    """The size of the range that copies have. The leases' lock serialises.

    It is what the program has chosen, and otherwise grows from the least in steps, each after some
    steady rounds, and leaves a quarter of what others have not needed, or a twentieth once they
    have needed no more for long. Where the program uses more parameters at once than the least
    holds, it grows at once. When memory runs out it is the least and grows again, each time after
    twice as many steady rounds.

    Once the copies have all that they may have, half of what others have not needed is lent to sums
    of gradients, after as many steady rounds.

    Others need what torch has reserved beside both when a step is made. Within a
    round that only rises, unless torch gives memory back to the driver: then the round tells
    nothing. The peaks that torch counts do not help, since a program may reset them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        least_bytes: int,
        most_bytes: int,
        chosen_bytes: int | None,
    ) -> None:
        """
        Args:
            most_bytes: with more, no copy would stay longer.
        """
        self._device = device
        self._least_bytes = least_bytes
        self._is_chosen = chosen_bytes is not None
        self._wanted_bytes = most_bytes if chosen_bytes is None else min(chosen_bytes, most_bytes)
        self._size_bytes = least_bytes if chosen_bytes is None else self._wanted_bytes
        self._rounds_needed = _STEADY_ROUNDS if chosen_bytes is None else _STEADY_ROUNDS_CHOSEN
        self._steady_rounds = 0  # since it has grown
        self._calm_rounds = 0  # since others have needed more than before
        self._others_bytes = 0  # the most that was reserved beside copies and sums
        self._lent_bytes = 0
        # The count when this round began; None between rounds.
        self._freed_count: int | None = None
        self._refused_count = _Reading.of(device).refused_count
        self._is_after_refusal = False

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def lent_bytes(self) -> int:
        """The memory that sums of gradients may have beside the copies."""
        return self._lent_bytes

    def note_use(self) -> None:
        """The round begins, perhaps once more."""
        reading = self._read()
        if self._freed_count is None:
            self._freed_count = reading.freed_count

    def note_refusals(self) -> None:
        """If memory has run out since the last call, the size is the least."""
        self._read()

    def note_step(self, *, held_bytes: int, kept_bytes: int, sum_bytes: int) -> None:
        """The uses of a step are all queued. If there were none of this model, nothing of it was
        measured.

        Args:
            held_bytes: of all ranges.
            kept_bytes: of those that somebody uses, which a new range does not get.
            sum_bytes: the most that sums of gradients have had. torch keeps such memory reserved.
        """
        reading = self._read()
        freed_count, self._freed_count = self._freed_count, None
        if freed_count is None:
            return
        if self._is_after_refusal:
            # The batch for which memory ran out has left more in torch's cache than others need.
            self._is_after_refusal = False
            torch.accelerator.empty_cache()
            return
        others_bytes = reading.reserved_bytes - held_bytes - sum_bytes
        is_steady = reading.freed_count == freed_count and others_bytes <= self._others_bytes
        self._others_bytes = max(self._others_bytes, others_bytes)
        self._steady_rounds = self._steady_rounds + 1 if is_steady else 0
        self._calm_rounds = self._calm_rounds + 1 if is_steady else 0
        has_waited = self._steady_rounds >= self._rounds_needed
        if self._size_bytes < self._wanted_bytes:
            if has_waited:
                self._steady_rounds = 0
                self._grow(reading, kept_bytes)
        elif has_waited or self._lent_bytes:
            free_bytes, _ = torch.accelerator.get_memory_info(self._device)
            room_bytes = free_bytes + reading.reserved_bytes - held_bytes - self._others_bytes
            self._lent_bytes = max(room_bytes // 2, 0)

    def note_need(self, needed_bytes: int) -> bool:
        """The program uses so much at once. Returns whether the size has grown; one that the
        program has chosen stays."""
        # Doubled, as the next parameter that is used at once needs more again.
        size_bytes = min(max(2 * self._size_bytes, aligned(needed_bytes)), self._wanted_bytes)
        if self._is_chosen or size_bytes <= self._size_bytes:
            return False
        self._size_bytes = size_bytes
        return True

    def note_size(self, size_bytes: int) -> None:
        """That of the range, where it was to have another."""
        # If it could not grow. What was refused then was refused to memd.
        self._size_bytes = max(min(self._size_bytes, size_bytes), self._least_bytes)
        refused_count = _Reading.of(self._device).refused_count
        if refused_count > self._refused_count:
            self._wait_longer()
        self._refused_count = refused_count

    def _grow(self, reading: _Reading, kept_bytes: int) -> None:
        free_bytes, _ = torch.accelerator.get_memory_info(self._device)
        room_bytes = free_bytes + reading.reserved_bytes - self._others_bytes - kept_bytes
        if self._is_chosen and room_bytes >= self._wanted_bytes:
            self._size_bytes = self._wanted_bytes
            return
        left_bytes = room_bytes // (4 if self._calm_rounds < _CALM_ROUNDS else 20)
        more_bytes = min(self._wanted_bytes, room_bytes - left_bytes) - self._size_bytes
        if more_bytes < self._size_bytes // 8:  # all copies are made anew
            return
        if more_bytes > self._size_bytes // 2:
            more_bytes //= 2
        self._size_bytes = min(self._size_bytes + aligned(more_bytes), self._wanted_bytes)

    def _read(self) -> _Reading:
        reading = _Reading.of(self._device)
        has_run_out = reading.refused_count > self._refused_count
        self._refused_count = reading.refused_count  # fewer, if the program has reset the count
        if has_run_out:
            if self._size_bytes > self._least_bytes or self._lent_bytes:
                self._wait_longer()
            self._size_bytes, self._lent_bytes = self._least_bytes, 0
            self._steady_rounds = self._calm_rounds = self._others_bytes = 0
            self._is_after_refusal = True
        return reading

    def _wait_longer(self) -> None:
        """Before it grows the next time: all copies are made anew."""
        self._rounds_needed = min(2 * self._rounds_needed, _STEADY_ROUNDS_MAX)
