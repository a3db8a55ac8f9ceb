"""The daemon's settings: from flags, `MEMD_*` variables, TOML files, defaults, in this order.

`MEMD_ADDRESS` names the daemon for scripts, command line and daemon alike. It stands between the
flag and `MEMD_SOCKET`, which scripts do not read.
"""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memd.sizes import exact_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_FILE = Path("/etc/memd/memd.toml")
# The folder beside the file, whose fragments of settings come after it.
_FRAGMENTS = "conf.d"
_ADDRESS = "MEMD_ADDRESS"
# The address; the file's place; the unit's word about systemd; the client's. No settings.
_OTHER_VARIABLES = {
    *(_ADDRESS, "MEMD_CONFIG", "MEMD_FDSTORE", "MEMD_REATTACH_SECONDS"),
    "MEMD_TOKEN_FILE",
}
# Kubernetes tells every container of a service named memd where it is.
_FOREIGN_PREFIXES = ("MEMD_SERVICE_", "MEMD_PORT")
# sun_path of sockaddr_un, with its end.
_SOCKET_PATH_BYTES_MAX = 107


class SettingsError(Exception):
    """A setting that cannot be used: where it was given, what is wrong, what to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The comment above a setting is what docs/reference.md says of it."""

    # The control socket; the path in MEMD_ADDRESS=unix:///path wins over MEMD_SOCKET. The attach
    # socket and the holder's lie beside it.
    socket: Path = Path("/run/memd/memd.sock")
    # One folder for each drive, on a file system that takes O_DIRECT.
    data: tuple[Path, ...] = (Path("/var/lib/memd"),)
    # Memory for all jobs, touched and locked at start.
    host: int = 1 << 30
    # Space on all drives together, allocated and written once.
    nvme: int = 10 << 30
    # host:port of the metrics and probes; empty: none.
    metrics: str = "127.0.0.1:9464"
    # text or json, one event a line, on stderr.
    log_format: str = "text"
    # debug, info, warning or error.
    log_level: str = "info"
    # io_uring, threads, or auto: io_uring where the kernel allows it.
    io_engine: str = "auto"
    # Chunks in flight on each path; "auto": as many as calibrated.
    io_depth: int = 0
    # Threads for Adam and checksums; 0: one a core.
    update_threads: int = 0
    # Use reserved pages of 2 MiB. Only where every user of the socket is trusted: a trainer can
    # take such a page away from the daemon, which ends it. A write to a parameter through `.data`
    # or a view changes it for everybody at once, also where it is refused.
    huge_pages: bool = False
    # uid, cgroup or token: what tells whose jobs a process uses. The kernel's uid; the pod, from
    # the process's control group, which needs the machine's PID namespace; or the token of a
    # service account, which the process names with MEMD_TOKEN_FILE.
    identity: str = "uid"
    # For identity = "token": a JWKS file with the public keys of the issuer, read anew when it
    # changes; `kubectl get --raw /openid/v1/jwks` writes a cluster's.
    token_keys: str = ""
    # The issuer that a token must name, such as https://kubernetes.default.svc.cluster.local.
    token_issuer: str = ""
    # The audience that a token must name.
    token_audience: str = "memd"
    # Service accounts, as NAMESPACE:NAME, and other subjects of tokens that administer all jobs.
    administrators: tuple[str, ...] = ()
    # How many jobs there may be.
    max_jobs: int = 64
    # How long a holder waits for the next daemon before it frees the memory; 0: no holder.
    holder_seconds: int = 600
    # Bytes a second that are read and compared in the background; 0: none.
    scrub: int = 16 << 20

    @property
    def attach_socket(self) -> Path:
        return self.socket.with_name("attach.sock")

    @property
    def holder_socket(self) -> Path:
        return self.socket.with_name("holder.sock")


# Settings that a running daemon takes over on SIGHUP.
RELOADABLE = ("log_format", "log_level", "max_jobs", "scrub")


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """Effective settings, and for each where its value came from."""

    settings: Settings
    origins: Mapping[str, str]


def load(
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Path | None = None,
    needs_daemon: bool = True,
) -> Configuration:
    """`flags` holds what the command line gave; without `file`, the default one where it exists.
    Fragments beside the file win over it, and a later one, by name, over those before.
    Without `needs_daemon` nobody will use the socket, so MEMD_ADDRESS may be of another kind.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_PARSERS, "default")
    sources = [_from_file(found) for found in _files(file, environ)]
    sources.append(_from_environment(environ))
    if needs_daemon and "socket" not in flags:
        sources.append(_from_address(environ))
    sources.append({name: (value, _flag_name(name)) for name, value in flags.items()})
    for source in sources:
        for name, (raw, origin) in source.items():
            try:
                values[name] = _PARSERS[name](raw)
            except ValueError as error:
                raise SettingsError(f"{origin}: {name}: {error}") from None
            origins[name] = origin
    settings = Settings(**values)
    for path in (settings.socket, settings.attach_socket, settings.holder_socket):
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
            raise SettingsError(
                f"{origins['socket']}: socket: a unix socket's path has at most "
                f"{_SOCKET_PATH_BYTES_MAX} bytes, choose a shorter folder: {path}"
            )
    if settings.identity == "token" and not (settings.token_keys and settings.token_issuer):
        raise SettingsError(
            f'{origins["identity"]}: identity: "token" needs token_keys, a JWKS file, and '
            "token_issuer, the issuer that tokens must name"
        )
    return Configuration(settings=settings, origins=origins)


def shown(settings: Settings) -> dict[str, str]:
    """Each setting as one would write it, with its unit."""
    texts = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name == "scrub" and value == 0:
            texts[field.name] = "0"
        elif field.name in ("host", "nvme", "scrub"):
            texts[field.name] = exact_size(value)
        elif field.name == "data":
            texts[field.name] = os.pathsep.join(str(path) for path in value)
        elif field.name == "io_depth" and value == 0:
            texts[field.name] = "auto"
        elif isinstance(value, tuple):
            texts[field.name] = ",".join(value)
        elif isinstance(value, bool):
            texts[field.name] = str(value).lower()
        else:
            texts[field.name] = str(value)
    return texts


def log_format_wanted(
    *, flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> str:
    """The format in which to say that these settings cannot be used."""
    raw = flags.get("log_format") or environ.get("MEMD_LOG_FORMAT")
    try:
        if raw is None:
            raw = _last_said("log_format", _files(file, environ))
        return str(_PARSERS["log_format"](raw))
    except (SettingsError, ValueError):
        return Settings().log_format


def _last_said(name: str, files: list[Path]) -> Any:
    return next((table[name] for file in reversed(files) if name in (table := _table(file))), None)


def _files(file: Path | None, environ: Mapping[str, str]) -> list[Path]:
    """The file and its fragments, in the order in which they count."""
    if file is None and "MEMD_CONFIG" in environ:
        file = Path(environ["MEMD_CONFIG"])
    if file is not None:
        return [file, *_fragments_beside(file)]
    first = [DEFAULT_FILE] if DEFAULT_FILE.exists() else []
    return first + _fragments_beside(DEFAULT_FILE)


def _fragments_beside(file: Path) -> list[Path]:
    folder = file.with_name(_FRAGMENTS)
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SettingsError(f"{folder}: cannot be read: {error.strerror}") from error
    # Editors keep hidden files beside those that they have open.
    fragments = [path for path in paths if path.suffix == ".toml" and path.name[0] != "."]
    for path in [folder, *fragments] if fragments else []:
        _refuse_others(path)
    return fragments


def _refuse_others(path: Path) -> None:
    """A fragment counts for its place, without being named: others must not put it there."""
    found = path.stat()
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & stat.S_IWOTH:
        raise SettingsError(
            f"{path}: others can change it; fragments of settings and their folder have to belong "
            "to root or to the user of the daemon, and others may not write them: use chown and "
            "chmod o-w, or move the file of settings elsewhere"
        )


def _from_file(file: Path) -> dict[str, tuple[Any, str]]:
    table = _table(file)
    for name in table:
        if name not in _PARSERS:
            raise SettingsError(f"{file}: {_unknown(name, list(_PARSERS))}")
    return {name: (value, str(file)) for name, value in table.items()}


def _table(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: is not TOML: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    variables = {f"MEMD_{name.upper()}": name for name in _PARSERS}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith("MEMD_") or variable in _OTHER_VARIABLES:
            continue
        if variable in variables:
            found[variables[variable]] = (value, variable)
        elif not variable.startswith(_FOREIGN_PREFIXES):
            raise SettingsError(f"environment: {_unknown(variable, list(variables))}")
    return found


def _from_address(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """The same rules as `memd_client.base.address`."""
    address = environ.get(_ADDRESS)
    if not address:
        return {}
    path = address.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not address.startswith("unix:") or not path.startswith("/") or path.startswith("//"):
        raise SettingsError(
            f"{_ADDRESS}: {address!r} is no unix socket of this machine, unix:///path; give "
            "--socket PATH, or unset it for this command"
        )
    return {"socket": (path, _ADDRESS)}


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"no setting is called {name!r}; {advice}"


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a text; put it between quotes")
    return raw


def _path(raw: object) -> Path:
    text = os.fspath(raw) if isinstance(raw, Path) else _text(raw)
    if not text:
        raise ValueError("is empty; write a path")
    return Path(text).absolute()


def _paths(raw: object) -> tuple[Path, ...]:
    items = raw.split(os.pathsep) if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not items:
        raise ValueError(f"{raw!r} is not a list of folders; write ['/var/lib/memd']")
    paths = tuple(_path(item) for item in items)
    if len(set(paths)) < len(paths):
        raise ValueError(f"names a folder twice: {os.pathsep.join(map(str, paths))}")
    return paths


def _size(raw: object) -> int:
    # A bare TOML number gets the same answer as a text without a unit.
    return parse_size(raw if isinstance(raw, str) else str(raw))


def _size_or_none(raw: object) -> int:
    return 0 if str(raw).strip() == "0" else _size(raw)


def _integer(*, least: int, most: int) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        if isinstance(raw, str) and raw.strip().isdecimal():
            raw = int(raw)
        if isinstance(raw, bool) or not isinstance(raw, int) or not least <= raw <= most:
            raise ValueError(f"{raw!r} is not a whole number from {least} to {most}")
        return raw

    return parse


def _depth(raw: object) -> int:
    if raw == "auto":
        return 0
    try:
        return _integer(least=1, most=1024)(raw)
    except ValueError as error:
        raise ValueError(f"{error}, or 'auto'") from None


def _choice(*names: str) -> Callable[[object], str]:
    def parse(raw: object) -> str:
        if raw not in names:
            raise ValueError(f"{raw!r} is none of {', '.join(names)}")
        return str(raw)

    return parse


def _switch(raw: object) -> bool:
    words = {"true": True, "false": False}
    if isinstance(raw, bool):
        return raw
    if not isinstance(raw, str) or raw not in words:
        raise ValueError(f"{raw!r} is neither true nor false")
    return words[raw]


def _endpoint(raw: object) -> str:
    text = _text(raw)
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is not host:port, such as '127.0.0.1:9464'; empty is off")
    return text


def _names(raw: object) -> tuple[str, ...]:
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        raise ValueError(f"{raw!r} is not a list of names; write ['team:admin']")
    return tuple(_text(item).strip() for item in items if item)


_PARSERS: dict[str, Callable[[object], Any]] = {
    "socket": _path,
    "data": _paths,
    "host": _size,
    "nvme": _size,
    "metrics": _endpoint,
    "log_format": _choice("text", "json"),
    "log_level": _choice("debug", "info", "warning", "error"),
    "io_engine": _choice("auto", "io_uring", "threads"),
    "io_depth": _depth,
    "update_threads": _integer(least=0, most=1024),
    "huge_pages": _switch,
    "identity": _choice("uid", "cgroup", "token"),
    "token_keys": _text,
    "token_issuer": _text,
    "token_audience": _text,
    "administrators": _names,
    "max_jobs": _integer(least=1, most=10_000),
    "holder_seconds": _integer(least=0, most=86_400),
    "scrub": _size_or_none,
}
