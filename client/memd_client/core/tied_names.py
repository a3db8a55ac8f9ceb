"""Further names that `state_dict()` has for a stored tensor: an export of a snapshot, in which no
model takes part, gives the tensor all of them.

Each is an empty blob, whose own name says both: it is part of the commits and snapshots, and there
is nothing to read.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

import torch

from memd_client.connection.shard import shard_spec
from memd_proto.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memd_client.core.job_store import JobStore

TIED_PREFIX = "@tied/"
_NAME_BYTES_MAX = 1024  # what the daemon takes


def store_tied_names(store: JobStore, names: Mapping[str, str]) -> None:
    """Makes these the names of a module's tensors, and leaves those of others. While the job has
    other sessions their names stay, since their models may be others. Warns of a name that is too
    long to be stored.

    Args:
        names: of each name the one that the tensor has in the job, which may be the same.
    """
    own = set(names.values())
    wanted = set()
    for further, name in names.items():
        blob_name = _blob_name(further, name)
        if further == name:
            continue
        if len(blob_name.encode()) > _NAME_BYTES_MAX:
            warnings.warn(
                f"job {store.job!r}: exports of snapshots will lack {further!r}, another name of "
                f"{name!r}: memd stores both together in at most {_NAME_BYTES_MAX} bytes",
                stacklevel=2,
            )
            continue
        wanted.add(blob_name)
    found = {each.spec.name for each in store.shards.list_all() if _name_in(each) in own}
    if missing := sorted(wanted - found):
        store.shards.declare(
            [
                shard_spec(
                    name, kind=types_pb2.SHARD_KIND_BLOB, dtype=torch.uint8, shape=torch.Size([0])
                )
                for name in missing
            ]
        )
    left = sorted(found - wanted)
    if left and store.other_session_count() <= 0:
        store.delete(left)


def _blob_name(further: str, name: str) -> str:
    return TIED_PREFIX + json.dumps([further, name], ensure_ascii=False)


def _name_in(shard: types_pb2.Shard) -> str | None:
    """The stored name that the blob says another one for; None: it says none."""
    blob_name = shard.spec.name
    if shard.spec.kind != types_pb2.SHARD_KIND_BLOB or not blob_name.startswith(TIED_PREFIX):
        return None
    try:
        names = json.loads(blob_name.removeprefix(TIED_PREFIX))
    except (ValueError, RecursionError):
        return None
    return str(names[-1]) if isinstance(names, list) and names else None
