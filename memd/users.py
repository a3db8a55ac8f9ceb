"""Users by name."""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memd.peers import Peer


def user_name(uid: int) -> str:
    """The number where nobody has it: users of a container need not be known here. It may ask the
    network: never call it on a thread that others wait for."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def by_whom(peer: Peer) -> dict[str, object]:
    """The user of an event of the log, the process, and the tenant where there are some."""
    tenant = {"tenant": peer.owner.tenant} if peer.owner.tenant else {}
    return {**tenant, "user": user_name(peer.uid), "uid": peer.uid, "pid": peer.pid}
