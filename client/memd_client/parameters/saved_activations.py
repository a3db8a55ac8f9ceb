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
from memd_client.parameters.views import is_same_bits

if TYPE_CHECKING:
    from memd_client.core.job import Job
    from memd_client.core.scratch import ScratchSlot

# Smaller ones stay: a slot costs two requests, and they add up to little.
SMALL_BYTES = 64 << 10
# Bytes that are asked for ahead of backward, and tensors that are looked at for that.
AHEAD_BYTES = 64 << 20
_AHEAD_COUNT = 16
_ALIGNMENT = 64
_DTYPES = FROZEN_DTYPES | {torch.float32, torch.bfloat16}
# An attribute of a storage: where its bytes are stored.
_STORED = "_memd_stored"

_tracing_state: Any = torch._C._get_tracing_state
_mode_of: Any = torch._C._get_dispatch_mode
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY  # of make_fx and torch.export
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


class _Stored:
    """Bytes of a storage, in a slot for as long as a graph needs them."""

    __slots__ = ("__weakref__", "_begin", "_end", "_is_asked", "_place", "_scratch", "_slot")

    def __init__(self, scratch: Scratch, slot: ScratchSlot, begin: int, end: int) -> None:
        self._scratch = scratch
        self._slot = slot
        self._begin, self._end = begin, end  # in the slot
        self._place = 0  # in the order of saving
        self._is_asked = False

    @untraced
    def __del__(self) -> None:
        self._scratch.give_back(self._slot)

    @property
    def size_bytes(self) -> int:
        return self._slot.size_bytes

    @property
    def scratch(self) -> Scratch:
        return self._scratch

    @property
    def place(self) -> int:
        return self._place

    @property
    def is_asked(self) -> bool:
        return self._is_asked

    def note_place(self, place: int) -> None:
        self._place = place

    def covers(self, begin: int, end: int) -> bool:
        return self._begin <= begin and end <= self._end

    def overwrite(self) -> torch.Tensor:
        return self._scratch.overwrite(self._slot)

    def prefetch(self) -> None:
        self._is_asked = True
        self._scratch.prefetch(self._slot)

    def lease(self) -> torch.Tensor:
        self._is_asked = False
        lease = self._scratch.read(self._slot)
        setattr(lease.untyped_storage(), _STORED, _Copy(ref(self), 0))
        return lease


@dataclass(slots=True)
class _Copy:
    """The bytes of a storage are in a slot, this far behind their place in the storage."""

    stored: ref[_Stored]
    shift: int


@dataclass(slots=True)
class _SavedActivation:
    """A tensor as autograd saved it. `marker` shares its version counter, and none of its bytes."""

    stored: _Stored
    marker: torch.Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int  # in the slot


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of a storage between a tensor's first and its last."""

    storage: torch.UntypedStorage
    begin: int
    end: int


def _grown(span: _Span) -> _Span:
    """The bytes to store for `span`: all of the storage if it is most of it, as other tensors show
    the rest."""
    whole_bytes = span.storage.nbytes()
    is_most = 2 * (span.end - span.begin) > whole_bytes
    return _Span(span.storage, 0, whole_bytes) if is_most else span


def _bytes_of(span: _Span) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        span.storage, span.begin, (span.end - span.begin,), (1,)
    )


class Activations(StoringHooks):
    """The pair of hooks for the modules of one model. Any thread may call."""

    def __init__(self, job: Job, tier: str) -> None:
        self._job = job
        self._scratch = Scratch(job, tier)
        self._is_prefetching = tier == "nvme"
        self._ahead_bytes = min(AHEAD_BYTES, job.host_bytes // 8)
        # In the order of saving. The last one lives, or is about to be taken off.
        self._saved: list[ref[_Stored]] = []

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
            span = _span_of(tensor)
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
            lease = stored.lease()
        except MemdError as error:
            raise retold(
                error,
                f"{error}; autograd needs a tensor of shape {list(saved.size)} that it has saved "
                "in memd: run backward before the session ends, and run this batch again",
            ) from error
        self._ask_before(stored)
        return torch.empty(0, dtype=marker.dtype, device="cpu").set_(
            lease.untyped_storage(),
            saved.offset_bytes // marker.dtype.itemsize,
            saved.size,
            saved.stride,
        )

    def _saved_activation(self, tensor: torch.Tensor, span: _Span) -> _SavedActivation:
        with torch.no_grad():
            copy = self._copy_of(span)
            stored = copy.stored() if copy is not None else None
            if copy is None or stored is None:
                stored, copy = self._store(_grown(span))
            marker = tensor.detach()
            marker.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return _SavedActivation(
            stored,
            marker,
            tensor._version,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()) * tensor.element_size() + copy.shift,
        )

    def _copy_of(self, span: _Span) -> _Copy | None:
        """The place where these bytes are stored already. They are compared: a program may have
        changed them by ways that count in no version."""
        copy: _Copy | None = getattr(span.storage, _STORED, None)
        stored = copy.stored() if copy is not None else None
        if copy is None or stored is None or stored.scratch is not self._scratch:
            return None
        begin, end = span.begin + copy.shift, span.end + copy.shift
        if not stored.covers(begin, end):
            return None
        there = stored.lease()
        if there.untyped_storage().data_ptr() + begin == span.storage.data_ptr() + span.begin:
            return copy  # a tensor that memd has given to backward
        return copy if is_same_bits(there[begin:end], _bytes_of(span)) else None

    def _store(self, span: _Span) -> tuple[_Stored, _Copy]:
        lead = (span.storage.data_ptr() + span.begin) % _ALIGNMENT
        end = lead + span.end - span.begin
        stored = _Stored(self._scratch, self._scratch.take(end), lead, end)
        stored.overwrite()[lead:end].copy_(_bytes_of(span))
        copy = _Copy(ref(stored), lead - span.begin)
        setattr(span.storage, _STORED, copy)
        self._note_saved(stored)
        return stored, copy

    # Ahead of backward

    def _note_saved(self, stored: _Stored) -> None:
        saved = self._saved
        while saved and saved[-1]() is None:
            saved.pop()
        stored.note_place(len(saved))
        saved.append(ref(stored))

    def _ask_before(self, stored: _Stored) -> None:
        """Asks for what was saved before `stored`, which backward needs next."""
        if not self._is_prefetching:
            return
        asked_bytes = 0
        for each in self._saved[max(0, stored.place - _AHEAD_COUNT) : stored.place][::-1]:
            before = each()
            if before is None:
                continue
            asked_bytes += before.size_bytes
            if asked_bytes > self._ahead_bytes:
                return
            if not before.is_asked:
                before.prefetch()


def _span_of(tensor: torch.Tensor) -> _Span | None:
    """None if the tensor stays: it is small, its bytes are not all that it is, or they are a
    buffer's or memd's own."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.dtype not in _DTYPES
        or tensor.device.type != "cpu"
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
    return _Span(storage, begin, begin + span_bytes)
