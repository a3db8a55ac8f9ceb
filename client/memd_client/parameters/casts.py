"""Casts of parameters to another dtype, such as autocast makes of every weight, without their
bytes.

torch keeps a cast in two places. Autograd saves it for backward, and the cache of autocast has it
until the outermost context ends. The cache decides numbers: the gradients of all uses of one cast
add up in the low precision, those of several casts in fp32. So cache and graph stay torch's, and
memd takes the bytes alone. A cast is deterministic: made again from the same value it has the same
bits.

* A parameter that is put in place under autocast carries a dispatch key. All operations fall
  through it but one: the kernel for `aten::_to_copy` notes the result as a cast of that parameter.
* When the parameter is put away, a cast that only the cache refers to loses its memory. It gets it
  back when the parameter is put in place again, before anything can look into the cache.
* Autograd saves a cast as its recipe (`saved_tensors.py`).
* Before the value changes, a cast gets its bytes back for good, and is torch's alone from then on.

A cast that anybody else can reach is left alone: its user may change it, and torch would not
notice a change through `.data`. Reference counts tell, and one that is not understood means that
the bytes stay.
"""

from __future__ import annotations

import sys
import weakref
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memd_client.base.identity import ByIdentity
from memd_client.device import filled_memory
from memd_client.parameters.hole import make_without_memory
from memd_client.parameters.lazy import NOTED_KEY, LazyTensor, noted_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from memd_client.connection.shard import Shard

_data: Any = torch._C.TensorBase.data
_autocast_key: Any = torch._C._dispatch_key_parse("AutocastCPU")
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_storage_users = torch._C._storage_Use_Count
# torch's stub lacks these.
_tensor_users: Any = torch._C.TensorBase._use_count  # type: ignore[attr-defined]
_set: Any = torch._C.TensorBase.set_
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


def is_autocasting(device: torch.device) -> bool:
    """As `torch.is_autocast_enabled(device.type)`, on the CPU in less than half the time: every
    parameter that is put in place asks."""
    if device.type != "cpu":
        return torch.is_autocast_enabled(device.type)
    return not _is_excluded(_autocast_key)


class Source(Protocol):
    """The parameter: `residency.Residency`."""

    @property
    def shard(self) -> Shard: ...
    @property
    def write_count(self) -> int: ...
    def count_of(self, view: torch.Tensor) -> int: ...
    def reread(self) -> torch.Tensor: ...


class Cast:
    """One cast: the recipe, and the tensor that torch has for as long as torch has it. It lives as
    long as that tensor, or as something that autograd has saved."""

    __slots__ = (
        *("__weakref__", "_arguments", "_cast", "_dropped_bytes", "_from", "_kept", "_keywords"),
        *("_source", "_stream", "_to", "_write_count"),
    )

    def __init__(
        self,
        source: Source,
        value: torch.Tensor,
        cast: torch.Tensor,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        self._source = source
        self._write_count = source.count_of(value)
        # A view of the parameter, which may be a part of it.
        self._from = value.size(), value.stride(), int(value.storage_offset())
        self._arguments, self._keywords = arguments, keywords
        self._cast = weakref.ref(cast)
        self._to = cast.size(), cast.stride(), cast.dtype
        self._dropped_bytes = 0  # of its storage, whose memory is freed
        self._kept: torch.Tensor | None = None
        self._stream = filled_memory.filling_stream(cast)  # that has filled it

    @property
    def source(self) -> Source:
        return self._source

    @property
    def dtype(self) -> torch.dtype:
        return self._to[2]

    @property
    def write_count(self) -> int:
        """Names the value that was cast."""
        return self._write_count

    @property
    def is_current(self) -> bool:
        """Made again, it has the same bits. Or its bytes were kept."""
        return self._kept is not None or self._source.write_count == self._write_count

    def may_be_saved(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, the cast or a view of it, can be made again. `saved_tensors.py: _pack`
        asks, with a tensor that it got from torch."""
        cast = self._cast()
        if cast is None or cast._version:
            return False
        is_view = tensor is not cast
        users = _storage_users(tensor.untyped_storage()._cdata)
        return (
            # The cast, the view, and the Python object of the storage.
            users == 2 + is_view
            # torch's own reference to the Python object, and ours.
            and (not is_view or sys.getrefcount(cast) == _LOCAL + 1)
            # The same, and those of `_pack` and of its caller.
            and sys.getrefcount(tensor) == (3 if is_view else 4) + _count_passed(object())
        )

    def drop(self) -> None:
        """Frees the memory, if only autocast's cache refers to it."""
        cast = self._cast()
        if cast is None or self._dropped_bytes:
            return
        storage = cast.untyped_storage()
        if (
            cast.requires_grad  # otherwise autocast does not cache it
            and cast._version == 0
            and _tensor_users(cast) == 2  # the cache, and the Python object
            and sys.getrefcount(cast) == _LOCAL + 1
            and _storage_users(storage._cdata) == 2
        ):
            self._dropped_bytes = storage.nbytes()
            storage.resize_(0)

    def refill(self, value: torch.Tensor) -> None:
        """`value` is in place, and the cache may be asked."""
        cast = self._cast()
        if cast is None or not self._dropped_bytes:
            return
        size, stride, dtype = self._to
        storage = cast.untyped_storage()
        storage.resize_(self._dropped_bytes)
        # A tensor of its own: a change would count in the version of the cast.
        torch.empty(0, dtype=dtype, device=cast.device).set_(storage, 0, size, stride).copy_(
            value.as_strided(*self._from)
        )
        self._dropped_bytes = 0
        self._stream = filled_memory.filling_stream(cast)

    def join(self) -> None:
        """A use of the parameter begins, perhaps on another stream than the one that has filled the
        cast. The program orders only what it knows of: the first use, which has made the cast."""
        cast = self._cast()
        if cast is not None and self._stream is not None and not self._dropped_bytes:
            filled_memory.join_stream(cast, self._stream)

    def hand_back(self, read: Callable[[], torch.Tensor] | None) -> None:
        """Before the value changes, which `read` returns; after a change in place it is None. What
        has its bytes keeps them, and the rest is made now, unless its value has gone already."""
        cast = self._cast()
        if cast is not None:
            if self._dropped_bytes and read is not None:
                self.refill(read())
            _casts.discard(cast.untyped_storage())
            self._kept = cast.detach()
        elif self._kept is None and read is not None and self.is_current:
            self._kept = self._make(read())

    def remake(self) -> torch.Tensor:
        """For backward."""
        if self._kept is None:
            value = self._source.reread()
            # It takes what was written to the memory since, before which casts are handed back.
            if self._kept is None:
                return self._make(value)
        return self._kept

    def _make(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(noted_keys):
            made: torch.Tensor = torch.ops.aten._to_copy.default(
                value.as_strided(*self._from), *self._arguments, **self._keywords
            )
            return made


class Casts:
    """The casts of one parameter. Its residency calls, under its own lock, and the kernel notes."""

    def __init__(self, source: Source) -> None:
        # Weak: the source owns this.
        self._source = weakref.ref(source)
        self._known: list[weakref.ref[Cast]] = []
        # The kernel has not the lock of the residency.
        self._lock = Lock()
        # A tensor with the key, which a parameter takes from it together with the bytes. torch has
        # no other way to give a key to a tensor that has bytes.
        self._carrier: torch.Tensor | None = None
        self._empty: torch.Tensor | None = None

    def put_in_place(self, parameter: torch.Tensor, lease: torch.Tensor) -> None:
        """As `parameter.data = lease`; from now on casts of `parameter` are noted."""
        carrier = self._carrier
        if carrier is None:
            # It outlives an inference mode in which it may be made.
            with torch.inference_mode(False):
                carrier = self._carrier = make_without_memory(
                    lease.shape, lease.dtype, noted_keys, lease.device
                )
                self._empty = torch.empty(0, dtype=lease.dtype, device=lease.device)
        _sources[lease.untyped_storage()] = self
        _set(carrier, lease)
        with torch._C._ExcludeDispatchKeyGuard(noted_keys):  # no kernel for this
            _data.__set__(parameter, carrier)
        _set(carrier, self._empty)

    def note(self, value: torch.Tensor, cast: torch.Tensor, arguments: Any, keywords: Any) -> None:
        source = self._source()
        if source is not None:
            noted = Cast(source, value, cast, arguments, keywords)
            _casts[cast.untyped_storage()] = noted
            with self._lock:
                self._known.append(weakref.ref(noted))

    def drop(self) -> None:
        for cast in self._living():
            cast.drop()

    def refill(self, value: torch.Tensor) -> None:
        for cast in self._living():
            cast.refill(value)
            cast.join()

    def join(self) -> None:
        for cast in self._living():
            cast.join()

    def hand_back(self, read: Callable[[], torch.Tensor] | None) -> None:
        for cast in self._living():
            cast.hand_back(read)

    def _living(self) -> list[Cast]:
        if not self._known:
            return []
        with self._lock:
            living = [(known, cast) for known in self._known if (cast := known()) is not None]
            self._known = [known for known, _ in living]
        return [cast for _, cast in living]


# By the storage of the lease that is in place, and by that of the cast.
_sources: ByIdentity[torch.UntypedStorage, Casts] = ByIdentity()
_casts: ByIdentity[torch.UntypedStorage, Cast] = ByIdentity()

# The cast whose bytes are in a storage, or None.
cast_of_storage = _casts.get


def _count_local() -> int:
    """The result of `sys.getrefcount` for an object that one local variable refers to."""
    alone = object()
    return sys.getrefcount(alone)


_LOCAL = _count_local()


def _count_passed(alone: object) -> int:
    """The same for an argument that nobody else refers to. While something is compiled, and for
    ever after torch.compile has refused something, Python evaluates frames by torch's function:
    then the caller keeps its arguments, one reference more for each call."""
    return sys.getrefcount(alone)


def _to_copy(value: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
    """The kernel. Autocast may hold the lock of its cache: nothing here may ask that cache."""
    with torch._C._ExcludeDispatchKeyGuard(noted_keys):
        cast: torch.Tensor = torch.ops.aten._to_copy.default(value, *arguments, **keywords)
    if not _is_wrapped(value) and not _is_wrapped(cast) and _is_plain_cast(value, cast):
        casts = _sources.get(value.untyped_storage())
        if casts is not None:
            casts.note(value, cast, arguments, keywords)
    return cast


def _is_plain_cast(value: torch.Tensor, cast: torch.Tensor) -> bool:
    return (
        type(cast) is torch.Tensor
        and type(value) is not LazyTensor
        and cast.device == value.device
        and cast.is_floating_point()
        and cast.dtype != value.dtype
        and cast.numel() > 0
    )


def _register() -> torch.library.Library:
    """torch forgets what was registered when the result is dropped."""
    kernel = torch.library.Library("aten", "IMPL", NOTED_KEY)
    kernel.impl("_to_copy", _to_copy)
    return kernel


_registered = _register()
