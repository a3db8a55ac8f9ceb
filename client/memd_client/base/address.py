"""The daemon's address: a unix socket, or a private daemon in a child process."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from memd_client.base.sizes import parse_size
from memd_client.errors import InvalidArgument, NotYet

VARIABLE = "MEMD_ADDRESS"
DEFAULT = "unix:///run/memd/memd.sock"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnixAddress:
    """The control socket of a daemon that runs on this machine."""

    socket: Path

    @property
    def attach_socket(self) -> Path:
        return self.socket.with_name("attach.sock")

    def __str__(self) -> str:
        return f"unix://{self.socket}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedAddress:
    """A private daemon. Without `data` its files are in a temporary folder, which is removed at the
    end.
    """

    data: Path | None = None
    host_bytes: int | None = None
    nvme_bytes: int | None = None


Address = UnixAddress | EmbeddedAddress


def parse_address(text: str | None) -> Address:
    """`unix:///path`, `embedded:` or `embedded:/path?host=1GiB&nvme=100GiB`; None means
    MEMD_ADDRESS or the service's socket.
    """
    text = text if text is not None else os.environ.get(VARIABLE) or DEFAULT
    if text.startswith("unix:"):
        return _unix(text)
    if text.startswith("embedded:"):
        return _embedded(text)
    host, separator, port = text.rpartition(":")
    if separator and host and port.isdigit():
        raise NotYet(
            f"TCP with TLS comes with containers; use a unix socket on this machine: {text!r}"
        )
    raise InvalidArgument(
        f"an address is unix:///path, embedded: or embedded:/path, not {text!r}; the default is "
        f"{DEFAULT}"
    )


def _unix(text: str) -> UnixAddress:
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.startswith("//"):
        raise InvalidArgument(f"a unix address has an absolute path, such as {DEFAULT}: {text!r}")
    return UnixAddress(socket=Path(path))


def _embedded(text: str) -> EmbeddedAddress:
    path, _, query = text.removeprefix("embedded:").partition("?")
    sizes: dict[str, int] = {}
    try:
        settings = parse_qsl(query, strict_parsing=bool(query))
    except ValueError as error:
        raise InvalidArgument(f"settings after ? are name=value, joined by &: {text!r}") from error
    for name, value in settings:
        if name not in {"host", "nvme"}:
            close = difflib.get_close_matches(name, ("host", "nvme"), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgument(
                f"an embedded daemon has the settings host and nvme, not {name!r}{hint}"
            )
        sizes[name] = parse_size(value, name=name)
    if path and not path.startswith("/"):
        raise InvalidArgument(f"an embedded daemon's folder is an absolute path: {text!r}")
    return EmbeddedAddress(
        data=Path(unquote(path)) if path else None,
        host_bytes=sizes.get("host"),
        nvme_bytes=sizes.get("nvme"),
    )
