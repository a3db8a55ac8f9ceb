"""`memd serve`: in which order the daemon starts, what it does while it runs, and how it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memd import __version__, attach, calibration
from memd import log as logs
from memd.config import RELOADABLE, SettingsError, shown
from memd.identity import CgroupIdentity, TokenIdentity, UidIdentity
from memd.keeper import find_keeper
from memd.metrics import DaemonCollector, MetricsServer
from memd.page.overview import Overview
from memd.peers import DESCRIPTORS_MAX, Peers
from memd.refusal import Refused, StatusCode
from memd.service.control import ControlServer
from memd.sizes import format_size
from memd.systemd import Notifier, listening_socket
from memd.watcher import Watcher
from memd_native import EXTENTS_ARE_HASHED, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memd.config import Configuration, Settings
    from memd.identity import Identity
    from memd.keeper import Keeper

log = logging.getLogger(__name__)

# From SIGTERM to the end of the process.
DRAIN_S = 30.0
# Calls that are under way get most of it; then the data plane makes everything durable.
_CALLS_S = 20.0
# How often the keeper and the volumes are looked after: nothing tells when one takes nothing any
# more.
_LOOK_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings from the daemon's starter, not from a configuration."""

    parent_pid: int | None = None  # drains when this process dies
    lock_required: bool = True  # False: a pool that cannot be locked is used unlocked


class Daemon:
    """Built by `run`, in order; each part needs only those before it."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        options: Options,
        environ: Mapping[str, str],
        reload: Callable[[], Configuration],
    ) -> None:
        self._settings = configuration.settings
        self._options = options
        self._environ = environ
        self._reload = reload
        self._notifier = Notifier(environ)
        self._is_ready = False
        self._server: Server | None = None
        self._has_served = False
        self._somebody_returns = True  # until the draining shows that nobody does
        self._began = time.monotonic()

    def run(self) -> None:
        """Serves until a signal or the parent's death ends it. StatusError, Refused and
        SettingsError say why it cannot start."""
        settings = self._settings
        log.info("starting", extra={"version": __version__, "pid": os.getpid(), **shown(settings)})
        _raise_descriptor_limit()
        with contextlib.ExitStack() as stack:
            parent = self._watched_parent()
            stack.enter_context(_socket_lock(settings.socket))
            attach_socket = self._attach_socket()
            stack.callback(_unlink, settings.attach_socket, attach_socket is None)
            _remove_stale(settings.socket)
            identity = self._identity()
            # A taken port is found out before a volume is formatted.
            metrics = self._bind_metrics()
            if metrics is not None:
                stack.callback(metrics.stop)
            keeper = stack.enter_context(self._keeper())
            server = self._server = self._start_server(keeper)
            stack.callback(server.stop, timeout_s=DRAIN_S - _CALLS_S)
            server.set_scrub_rate(self._settings.scrub)
            peers = Peers()
            listener = attach.AttachListener(
                attach_socket or attach.bind(settings.attach_socket),
                server=server,
                peers=peers,
                control_address=f"unix://{settings.socket}",
                identity=identity,
            )
            control = ControlServer(
                server,
                peers=peers,
                jobs_max=lambda: self._settings.max_jobs,
                identity=identity,
            )
            control.listen(settings.socket)
            stack.callback(_unlink, settings.socket)
            if metrics is not None:
                with self._told_of_metrics():
                    metrics.start(
                        DaemonCollector(server, peers=peers, gate=control.gate),
                        page=Overview(server, is_ready=self._takes_work).html,
                    )
                stack.callback(metrics.stop)
            self._adopt(server, listener)
            listener.start()
            stack.callback(listener.stop)
            stack.callback(self._look_who_returns, peers, server, has_keeper=keeper is not None)
            stack.callback(control.stop, grace_s=_CALLS_S)
            stack.callback(listener.stop_accepting)
            # A reader of the ready line may send a signal at once. When the draining begins, the
            # next one ends the process: what is on disk is complete at any moment.
            signal_fd = stack.enter_context(_signals())
            self._announce(server, metrics)
            self._wait(server, control, signal_fd=signal_fd, parent=parent, keeper=keeper)
            self._is_ready = False
        log.info("stopped")

    def _identity(self) -> Identity:
        settings = self._settings
        if settings.identity == "cgroup":
            return CgroupIdentity()
        if settings.identity == "token":
            return token_identity(settings)
        return UidIdentity()

    def _watched_parent(self) -> int | None:
        if self._options.parent_pid is None:
            return None
        try:
            return os.pidfd_open(self._options.parent_pid)
        except ProcessLookupError as error:
            raise Refused(
                StatusCode.UNAVAILABLE, f"the parent {self._options.parent_pid} has died already"
            ) from error

    def _attach_socket(self) -> socket.socket | None:
        """The one that systemd holds for us; or None, after a dead daemon's was removed."""
        expected = self._settings.attach_socket
        passed = listening_socket(self._environ, "attach")
        if passed is None:
            _remove_stale(expected)
            return None
        if passed.type != socket.SOCK_SEQPACKET or passed.getsockname() != str(expected):
            raise SettingsError(
                f"systemd passed the socket {passed.getsockname()!r}, and clients of "
                f"{self._settings.socket} look for {expected}; let ListenSequentialPacket= of "
                "memd.socket and the setting socket agree"
            )
        return passed

    @contextlib.contextmanager
    def _keeper(self) -> Iterator[Keeper | None]:
        """None for a private daemon, which ends with its parent."""
        if self._options.parent_pid is not None:
            yield None
            return
        keeper = find_keeper(
            self._settings.holder_socket,
            seconds=self._settings.holder_seconds,
            log_format=self._settings.log_format,
            environ=self._environ,
            notifier=self._notifier,
        )
        if keeper is None:
            log.info("no holder", extra={"reason": "holder_seconds is 0"})
            yield None
            return
        # If it does not start, what the daemon before left stays for the next one.
        is_needed = bool(keeper.kept)
        try:
            yield keeper
            is_needed = self._somebody_returns
        except BaseException:
            # If the end fails, not all that counts is on disk.
            is_needed = is_needed or self._has_served
            raise
        finally:
            if not is_needed:
                keeper.end()
            keeper.close()

    def _adopt(self, server: Server, listener: attach.AttachListener) -> None:
        sessions = server.kept_sessions()
        report = server.report()
        if sessions or report.pool.kept_bytes:
            log.info(
                "memory of the daemon before is taken over",
                extra={
                    "kept_bytes": report.pool.kept_bytes,
                    "jobs": report.job_count,
                    "sessions": len(sessions),
                },
            )
        listener.adopt(sessions)

    def _look_who_returns(self, peers: Peers, server: Server, *, has_keeper: bool) -> None:
        """At the end of the draining: without a living session all that counts is on disk, but for
        what lives in tier host."""
        in_host_tier = [job for job in server.jobs() if job.host_tier_bytes and job.host_bytes]
        self._somebody_returns = bool(in_host_tier) or any(peer.sessions for peer in peers.all())
        if has_keeper:
            return
        for job in in_host_tier:
            log.warning(
                "nobody keeps what lives in tier host: the job goes back to its last snapshot",
                extra={
                    "job": job.name,
                    "step": job.committed_step,
                    "snapshot_step": job.durable_step,
                    "snapshots": job.snapshot_count,
                },
            )

    def _start_server(self, keeper: Keeper | None) -> Server:
        settings = self._settings
        said = 0.0

        def progress(done_bytes: int, all_bytes: int) -> None:
            nonlocal said
            if time.monotonic() - said < 1:
                return
            said = time.monotonic()
            state = f"preparing {format_size(done_bytes)} of {format_size(all_bytes)}"
            # Twenty seconds more for the next second's work: a slow disk is no hanging daemon.
            self._notifier.notify(EXTEND_TIMEOUT_USEC=20_000_000, STATUS=state)
            log.info("preparing", extra={"done_bytes": done_bytes, "all_bytes": all_bytes})

        measured = {}
        volume_bytes = settings.nvme // len(settings.data)
        if settings.io_depth == 0 and any(
            calibration.worth_measuring(folder, volume_bytes=volume_bytes)
            for folder in settings.data
        ):
            longest_us = len(settings.data) * 20_000_000
            self._notifier.notify(EXTEND_TIMEOUT_USEC=longest_us, STATUS="calibrating")
            measured = calibration.measure_for_new_volumes(settings.data, volume_bytes=volume_bytes)
        limits = [self._limits(folder, measured.get(folder)) for folder in settings.data]
        # Superblocks are read before anything can give up waiting: of a device that does not answer
        # this is what is said.
        if not EXTENTS_ARE_HASHED:
            log.warning(
                "extents are not hashed: this build measures what checksums cost, nothing finds "
                "damage to its volumes, and no other build reads them"
            )
        log.info("opening the volumes", extra={"data": ",".join(map(str, settings.data))})
        with told_of_prefault(self._notifier, interval_s=1.0):
            server = Server(
                directories=[str(path) for path in settings.data],
                nvme_bytes=settings.nvme,
                host_bytes=settings.host,
                lock_required=self._options.lock_required,
                huge_pages=settings.huge_pages,
                io_engine=settings.io_engine,
                io_limits=limits,
                update_thread_count=settings.update_threads,
                # A private daemon serves one job, as a rule: it gets all there is.
                jobs_expected=1 if self._options.parent_pid is not None else 2,
                progress=progress,
                keeper_fd=keeper.server_fd() if keeper is not None else None,
                kept=keeper.take_kept() if keeper is not None else [],
            )
        calibration.keep_all(measured)
        report = server.report()
        if report.kept_note:
            log.warning("kept memory is not used", extra={"reason": report.kept_note})
        for note in report.load_notes:
            log.warning("a job's memory is not used", extra={"reason": note})
        if not report.pool.locked:
            log.warning(
                "the pool is not locked and may be swapped", extra={"note": report.pool.note}
            )
        elif report.pool.note:
            log.info("the pool is not as asked for", extra={"note": report.pool.note})
        if settings.huge_pages:
            log.warning(
                "reserved huge pages are not copied when a trainer writes to them: a write to a "
                "parameter through .data or a view changes it for everybody at once; without "
                "huge_pages it counts with the next step, or is refused"
            )
        if report.io_engine_reason:
            log.info("io_uring is not used", extra={"reason": report.io_engine_reason})
        return server

    def _limits(self, folder: Path, measured: calibration.Calibration | None) -> tuple[int, int]:
        """Depth and chunk size: how much the path of a data folder is given at a time."""
        if measured is not None:
            limits, origin = measured.limits, "measured"
        else:
            limits, origin = calibration.limits_in_use(folder, depth=self._settings.io_depth)
        log.info(
            "path",
            extra={
                "data": str(folder),
                "depth": limits.depth,
                "chunk_bytes": limits.chunk_bytes,
                "origin": origin,
            },
        )
        return limits.depth, limits.chunk_bytes

    def _bind_metrics(self) -> MetricsServer | None:
        if not self._settings.metrics:
            return None
        with self._told_of_metrics():
            return MetricsServer(self._settings.metrics, is_ready=self._takes_work)

    @contextlib.contextmanager
    def _told_of_metrics(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Refused(
                StatusCode.DEVICE,
                f"metrics cannot be served at {self._settings.metrics}: "
                f"{error.strerror or error}; choose another address with --metrics",
            ) from error

    def _takes_work(self) -> bool:
        """A daemon whose volumes are fenced lives, so that what it holds can be read, and is not
        ready for work."""
        if not self._is_ready or self._server is None:
            return False
        return not self._server.statistics().fence_reason

    def _announce(self, server: Server, metrics: MetricsServer | None) -> None:
        report = server.report()
        took_s = time.monotonic() - self._began
        line = ", ".join(
            (
                f"memd ready: unix://{self._settings.socket}",
                f"host {format_size(report.pool.bytes)}",
                f"nvme {format_size(sum(report.volume_bytes))}",
                report.io_engine,
                f"{report.job_count} jobs",
                f"metrics {metrics.url if metrics else 'off'}",
                f"started in {took_s:.2f} s",
            )
        )
        self._is_ready = self._has_served = True
        log.info(
            "ready",
            extra={
                "socket": str(self._settings.socket),
                "prefault_seconds": round(report.pool.prefault_seconds, 3),
                "gathered_bytes": report.pool.gathered_bytes,
                "format_seconds": round(report.format_seconds, 3),
                "start_seconds": round(took_s, 3),
            },
        )
        self._notifier.notify(READY=1, STATUS=line, MAINPID=os.getpid())
        # Last: whoever waits for this line finds in the log all that the start had to say.
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def _wait(
        self,
        server: Server,
        control: ControlServer,
        *,
        signal_fd: int,
        parent: int | None,
        keeper: Keeper | None,
    ) -> None:
        """Until SIGTERM, SIGINT or the parent's death."""
        interval_s = self._notifier.watchdog_s
        heartbeat = -1
        has_net = keeper is not None
        watcher = Watcher(server)
        pause_s = min(interval_s / 2 if interval_s else _LOOK_S, _LOOK_S)
        with selectors.DefaultSelector() as selector:
            selector.register(signal_fd, selectors.EVENT_READ, "signal")
            if parent is not None:
                selector.register(parent, selectors.EVENT_READ, "parent")
            if keeper is not None and keeper.is_holder:
                selector.register(keeper.connection, selectors.EVENT_READ, "holder")
            while True:
                for key, _ in selector.select(pause_s):
                    if key.data == "parent":
                        return self._begin_to_drain("the parent has died")
                    if key.data == "holder":
                        # Only its end makes the connection readable.
                        selector.unregister(key.fileobj)
                        has_net = False  # said once
                        log.warning(
                            "the holder has ended: what jobs have in memory will not outlive this "
                            "daemon; restart memd to have one"
                        )
                        continue
                    for number in os.read(signal_fd, 64):
                        if number != signal.SIGHUP:
                            return self._begin_to_drain(signal.Signals(number).name)
                        self._take_over(server)
                if has_net and not server.outlives_process:
                    has_net = False
                    log.warning(
                        "what keeps descriptors takes none any more: what jobs have in memory will "
                        "not outlive this daemon; restart memd to be safe again"
                    )
                control.look()
                watcher.look()
                # A data plane that hangs is restarted by systemd: its heartbeat has to grow.
                if interval_s and (beat := server.heartbeat()) != heartbeat:
                    heartbeat = beat
                    self._notifier.notify(WATCHDOG=1)

    def _begin_to_drain(self, reason: str) -> None:
        log.info("draining", extra={"reason": reason, "limit_seconds": DRAIN_S})
        self._notifier.notify(STOPPING=1, STATUS=f"draining: {reason}")

    def _take_over(self, server: Server) -> None:
        """SIGHUP: what can change in a running daemon does, and the rest is named."""
        try:
            new = self._reload().settings
        except SettingsError as error:
            log.error("settings are not reloaded", extra={"reason": str(error)})
            return
        names = [field.name for field in fields(new)]
        changed = [name for name in names if getattr(new, name) != getattr(self._settings, name)]
        taken = [name for name in changed if name in RELOADABLE]
        self._settings = replace(self._settings, **{name: getattr(new, name) for name in taken})
        logs.configure(log_format=self._settings.log_format, log_level=self._settings.log_level)
        server.set_scrub_rate(self._settings.scrub)
        waiting = [name for name in changed if name not in RELOADABLE]
        log.info(
            "settings reloaded",
            extra={"changed": ",".join(taken), "after_a_restart": ",".join(waiting)},
        )


def token_identity(settings: Settings) -> TokenIdentity:
    """Refused where the keys cannot be used, or what checks signatures is not installed."""
    try:
        from memd.tokens import TokenKeys
    except ModuleNotFoundError as error:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"identity = \"token\" needs the package {error.name}: pip install 'pyjwt[crypto]'",
        ) from error
    keys = TokenKeys(
        Path(settings.token_keys),
        issuer=settings.token_issuer,
        audience=settings.token_audience,
    )
    return TokenIdentity(keys, administrators=settings.administrators)


@contextlib.contextmanager
def told_of_prefault(notifier: Notifier, *, interval_s: float) -> Iterator[None]:
    """Asks systemd for more time for as long as the pool grows: 1 GiB of small pages takes 0.8 s or
    more, and the limit is the same for every size. A start that hangs is still ended."""
    is_over = threading.Event()

    def watch(seen: int) -> None:
        while not is_over.wait(interval_s):
            if (now := _shared_bytes()) > seen:
                seen = now
                state = f"pre-faulted {format_size(now)}"
                notifier.notify(EXTEND_TIMEOUT_USEC=20_000_000, STATUS=state)

    watcher = threading.Thread(target=watch, args=[_shared_bytes()], name="memd-start")
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _raise_descriptor_limit() -> None:
    """As far as this process may: what clients may take is bounded below that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < DESCRIPTORS_MAX:
        log.warning(
            "clients together may take more descriptors than this process has; raise its hard "
            "limit of open files",
            extra={"limit": most, "wanted": DESCRIPTORS_MAX},
        )


def _shared_bytes() -> int:
    """Shared bytes of this process, as they are counted while the pool's segments are touched."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values["RssShmem"].split()[0]) << 10


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor from which the numbers of the signals that arrive are read."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    signal.set_wakeup_fd(write_end)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    try:
        yield read_end
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.close(read_end)
        os.close(write_end)


@contextlib.contextmanager
def _socket_lock(path: Path) -> Iterator[None]:
    """One daemon a socket. The lock ends with the process, however that ends; its file stays."""
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Refused(
            StatusCode.DEVICE,
            f"the folder of the control socket {path} cannot be used: {error.strerror}; choose "
            "another with --socket",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise _taken(path) from error
    try:
        yield
    finally:
        os.close(lock)


def _remove_stale(path: Path) -> None:
    """Removes what a daemon that died has left; Refused where somebody listens."""
    if not path.is_socket():
        if path.exists():
            raise Refused(StatusCode.ALREADY_EXISTS, f"{path} is in the way and is no socket")
        return
    kind = socket.SOCK_SEQPACKET if path.name == "attach.sock" else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as probe:
        refused = probe.connect_ex(str(path))
    if refused == 0 or refused not in (errno.ECONNREFUSED, errno.ENOENT):
        raise _taken(path)
    path.unlink(missing_ok=True)


def _taken(path: Path) -> Refused:
    return Refused(
        StatusCode.ALREADY_EXISTS,
        f"another daemon serves {path}; stop it, or choose another socket with --socket",
    )


def _unlink(path: Path, ours: bool = True) -> None:
    if ours:
        path.unlink(missing_ok=True)
