"""Values by object instead of by what it is equal to."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Key(weakref.ref[K]):
    __slots__ = ("key_id",)

    key_id: int


class ByIdentity(Generic[K, V]):
    """Values of objects, for as long as these live. As torch's WeakIdKeyDictionary, which makes an
    object of a Python class for every look, of which there are several for each tensor that
    autograd saves: 1.1 µs in place of 0.2, and several times that between computations that leave
    the caches cold.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[_Key[K], V]] = {}

    def get(self, key: object) -> V | None:
        found = self._found.get(id(key))
        return found[1] if found is not None and found[0]() is key else None

    def __setitem__(self, key: K, value: V) -> None:
        weak = _Key(key, self._forget)
        weak.key_id = id(key)
        self._found[weak.key_id] = weak, value

    def __len__(self) -> int:
        return len(self._found)

    def _forget(self, weak: weakref.ref[K]) -> None:
        assert isinstance(weak, _Key)
        found = self._found.get(weak.key_id)
        # The object of that address may be another one by now.
        if found is not None and found[0] is weak:
            del self._found[weak.key_id]
