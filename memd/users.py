"""Users by name."""

from __future__ import annotations

import pwd


def user_name(uid: int) -> str:
    """The number where nobody has it: users of a container need not be known here. It may ask the
    network: never call it on a thread that others wait for."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
