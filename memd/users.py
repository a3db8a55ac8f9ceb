"""Users by name."""

from __future__ import annotations

import pwd


def user_name(uid: int) -> str:
    """The number where nobody has it: users of a container need not be known here. It may ask the
    network, so that a thread on which others wait must not call it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def by_whom(*, uid: int, pid: int) -> dict[str, object]:
    """The user of an event of the log, and the process."""
    return {"user": user_name(uid), "uid": uid, "pid": pid}
