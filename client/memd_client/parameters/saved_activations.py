"""Tensors that autograd saves go to memd, and come back for backward.

The pair of hooks saves parameters by name, as `saved_tensors.py` does. It copies the bytes of other
tensors to a slot of the job; a record stays in the graph, and torch frees the tensor when the
program lets go of it. Unpacking leases the slot and shows the bytes as the tensor showed them: at
the same distance from a 64-byte boundary, since kernels round differently on others.

The bytes belong to the storage, so tensors that share one are stored once: query, key and value of
one product, or what three layers save of their input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from memd_client.base.dtypes import FROZEN_DTYPES
from memd_client.base.dynamo import untraced
from memd_client.base.kept_memory import is_kept_in_place
from memd_client.core.backward import is_in_backward
from memd_client.core.scratch import Scratch
from memd_client.device import activation_copies
from memd_client.device.activation_copies import ActivationCopies
from memd_client.errors import MemdError, retold
from memd_client.parameters.residency import residency_of_storage
from memd_client.parameters.saved_tensors import (
    SavedCast,
    SavedTensor,
    StoringHooks,
    cast_of,
    refuse_modified_tensor,
    saved_view,
    unpack_by_name,
)
from memd_client.parameters.stored_bytes import (
    Span,
    StoredBytes,
    StoredCopy,
    StoredFromDevice,
    note_stored,
    stored_copy,
)

if TYPE_CHECKING:
    from memd_client.core.job import Job

# Smaller ones stay: a slot costs two requests, and they add up to little.
SMALL_BYTES = 64 << 10
# Bytes that are asked for ahead of backward, and tensors that are looked at for that.
AHEAD_BYTES = 64 << 20
_AHEAD_COUNT = 16
_ALIGNMENT = 64
_DTYPES = FROZEN_DTYPES | {torch.float32, torch.bfloat16}

_tracing_state: Any = torch._C._get_tracing_state
_mode_of: Any = torch._C._get_dispatch_mode
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY  # of make_fx and torch.export
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


@dataclass(slots=True)
class _SavedActivation:
    """A tensor as autograd saved it. `marker` shares its version counter, and none of its bytes."""

    stored: StoredBytes
    marker: torch.Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int  # in the slot


class Activations(StoringHooks):
    """The pair of hooks for the modules of one model. Any thread may call."""

    def __init__(self, job: Job, tier: str, device: torch.device | None) -> None:
        """
        Args:
            device: where they are computed; None: on the CPU.
        """
        self._job = job
        self._scratch = Scratch(job, tier)
        self._device = device or torch.device("cpu")
        self._copies = None
        if device is not None:
            leases = job.unordered_leases
            self._copies = ActivationCopies(leases.registration, device, job=job.name)
            leases.devices.close_too(self._copies)
        ahead_bytes = AHEAD_BYTES if device is None else activation_copies.WINDOW_BYTES // 2
        self._ahead_bytes = min(ahead_bytes, job.host_bytes // 8)
        # In the order of saving. The last one lives, or is about to be taken off.
        self._saved: list[ref[StoredBytes]] = []

    @property
    def job(self) -> Job:
        return self._job

    @property
    def may_store(self) -> bool:
        """Not in a backward, where a checkpoint computes again what is used at once; nor where
        operations are recorded, and copies would be."""
        return not is_in_backward() and _tracing_state() is None and _mode_of(_PROXY) is None

    # As `saved_tensors.py: _pack`, whose frames `Cast.may_be_saved` counts: it must be asked here.
    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        view = saved_view(tensor)
        if view is not None:
            return view
        cast = cast_of(tensor)
        if cast is not None and cast.may_be_saved(tensor):
            return SavedCast(cast, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        if cast is None and self.may_store:
            span = _span_of(tensor, self._device)
            if span is not None:
                return self._saved_activation(tensor, span)
        return SavedTensor(tensor.detach(), tensor._version)

    @untraced
    def unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _SavedActivation):
            return unpack_by_name(saved)
        marker, stored = saved.marker, saved.stored
        refuse_modified_tensor(saved.size, marker._version, saved.version)
        try:
            shown = stored.shown()
        except MemdError as error:
            raise retold(
                error,
                f"{error}; autograd needs a tensor of shape {list(saved.size)} that it has saved "
                "in memd: run backward before the session ends, and run this batch again",
            ) from error
        self._ask_before(stored)
        return torch.empty(0, dtype=marker.dtype, device=self._device).set_(
            shown.storage,
            (shown.begin + saved.offset_bytes) // marker.dtype.itemsize,
            saved.size,
            saved.stride,
        )

    def _saved_activation(self, tensor: torch.Tensor, span: Span) -> _SavedActivation:
        with torch.no_grad():
            marker = tensor.detach()
            marker.data = torch.empty(0, dtype=tensor.dtype, device=self._device)
            copy = self._copy_of(span, tensor)
            stored = copy.stored() if copy is not None else None
            if copy is None or stored is None:
                stored, copy = self._store(span.grown(), marker)
        return _SavedActivation(
            stored,
            marker,
            tensor._version,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()) * tensor.element_size() + copy.shift,
        )

    def _copy_of(self, span: Span, tensor: torch.Tensor) -> StoredCopy | None:
        """The place where these bytes are stored already."""
        copy = stored_copy(span.storage)
        stored = copy.stored() if copy is not None else None
        if copy is None or stored is None or stored.scratch is not self._scratch:
            return None
        is_there = stored.covers(span.begin + copy.shift, span.end + copy.shift)
        return copy if is_there and stored.is_copy(copy, span, tensor) else None

    def _store(self, span: Span, marker: torch.Tensor) -> tuple[StoredBytes, StoredCopy]:
        lead = (span.storage.data_ptr() + span.begin) % _ALIGNMENT
        end = lead + span.end - span.begin
        scratch, copies = self._scratch, self._copies
        slot = scratch.take(end)
        stored = (
            StoredBytes(scratch, slot, lead, end)
            if copies is None
            else StoredFromDevice(scratch, slot, lead, end, copies)
        )
        stored.fill(span.bytes())
        copy = StoredCopy(ref(stored), lead - span.begin, marker, marker._version)
        note_stored(span.storage, copy)
        self._note_saved(stored)
        return stored, copy

    # Ahead of backward

    def _note_saved(self, stored: StoredBytes) -> None:
        saved = self._saved
        while saved and saved[-1]() is None:
            saved.pop()
        stored.note_place(len(saved))
        saved.append(ref(stored))

    def _ask_before(self, stored: StoredBytes) -> None:
        """Asks for what was saved before `stored`, which backward needs next."""
        if self._copies is None and not self._scratch.may_spill:
            return
        asked_bytes = 0
        for each in self._saved[max(0, stored.place - _AHEAD_COUNT) : stored.place][::-1]:
            before = each()
            if before is None:
                continue
            asked_bytes += before.size_bytes
            is_one = asked_bytes == before.size_bytes
            if asked_bytes > self._ahead_bytes and not (is_one and self._copies is not None):
                return
            before.prefetch()


def _span_of(tensor: torch.Tensor, device: torch.device) -> Span | None:
    """None if the tensor stays: it is small, its bytes are not all that it is, or they are a
    buffer's or memd's own."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.dtype not in _DTYPES
        or tensor.device != device
        or _is_wrapped(tensor)
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
        or tensor.numel() == 0
    ):
        return None
    element_bytes = tensor.element_size()
    begin = int(tensor.storage_offset()) * element_bytes
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    span_bytes = (sum((size - 1) * stride for size, stride in steps) + 1) * element_bytes
    if span_bytes < SMALL_BYTES:
        return None
    storage = tensor.untyped_storage()
    is_aligned = storage.data_ptr() % element_bytes == 0
    if not is_aligned or is_kept_in_place(storage) or residency_of_storage(storage) is not None:
        return None
    return Span(storage, begin, begin + span_bytes)
