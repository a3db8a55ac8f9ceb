"""The token of a service account, for a daemon that knows its users by these."""

from __future__ import annotations

import os
from pathlib import Path

from memd_client.errors import InvalidArgument

VARIABLE = "MEMD_TOKEN_FILE"


def credential() -> tuple[tuple[str, str], ...]:
    """Metadata of calls; empty where no file is named. Read anew for each connection: the kubelet
    exchanges a projected token before it expires."""
    path = os.environ.get(VARIABLE)
    if not path:
        return ()
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{VARIABLE}: {path} cannot be read as a token: {error}") from error
    if not token.isascii() or not token.isprintable():
        raise InvalidArgument(f"{VARIABLE}: {path} holds no token")
    return (("memd-credential", token),)
