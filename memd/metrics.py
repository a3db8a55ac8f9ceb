"""Prometheus metrics and the probes `/healthz` and `/readyz`, on one HTTP server."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from socketserver import TCPServer
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from memd import __version__
from memd.page.overview import POLICY
from memd.service.answers import OK, SECONDS_BOUNDS
from memd_native import (
    IO_SECONDS_BOUNDS,
    PROTOCOL_VERSION,
    STEP_SECONDS_BOUNDS,
    TURN_SECONDS_BOUNDS,
    StatusError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from memd.peers import Peers
    from memd.service.answers import MethodAnswers
    from memd.service.call import Gate
    from memd_native import (
        DeviceStatistics,
        JobStatistics,
        SecondsHistogram,
        Server,
        ServerStatistics,
    )

log = logging.getLogger(__name__)


class DaemonCollector(Collector):
    """Reads one `statistics()` a scrape. Labels are bounded: jobs by `max_jobs`, devices by the
    configuration; `memd_job`, because Prometheus itself adds `job`."""

    def __init__(self, server: Server, *, peers: Peers, gate: Gate) -> None:
        self._server = server
        self._peers = peers
        self._gate = gate

    def describe(self) -> list[Metric]:
        # Else the registry would collect once at registration.
        return []

    def collect(self) -> Iterator[Metric]:
        statistics = self._server.statistics()
        yield from self._about_the_daemon(statistics)
        yield from _about_the_pool(statistics)
        yield from _about_devices(statistics.devices)
        yield from _about_jobs(statistics.jobs)
        yield from _about_steps(statistics)
        yield from _about_turns(statistics)
        yield from _about_the_scrub(statistics)
        yield from _about_exports(statistics)

    def _about_the_daemon(self, statistics: ServerStatistics) -> Iterator[Metric]:
        report = self._server.report()
        build = {"version": __version__, "protocol_version": str(PROTOCOL_VERSION)}
        yield _gauge("memd_build_info", "The daemon's version.", build, 1)
        engine = {"engine": report.io_engine, "reason": report.io_engine_reason}
        help_text = "How files are read and written, and why not through io_uring."
        yield _gauge("memd_io_engine_info", help_text, engine, 1)
        clients = statistics.session_count
        yield GaugeMetricFamily("memd_clients", "Sessions that are attached.", value=clients)
        reclaims = CounterMetricFamily(
            "memd_client_reclaims", "Clients whose sessions the daemon ended.", labels=["reason"]
        )
        for reason, count in {"process_died": 0, **self._peers.reclaims()}.items():
            reclaims.add_metric([reason], count)
        yield reclaims
        yield GaugeMetricFamily(
            "memd_client_reclaim_age_seconds",
            "How long the oldest session of a dead client has been ending; 0: all have ended.",
            value=self._peers.ending_s(),
        )
        rejections = CounterMetricFamily(
            "memd_admission_rejections", "Attach calls that were refused.", labels=["reason"]
        )
        for reason, count in {"capacity": 0, **self._gate.admission_rejections()}.items():
            rejections.add_metric([reason], count)
        yield rejections
        yield from _about_calls(self._gate.answers.by_method())
        yield CounterMetricFamily(
            "memd_ring_protocol_errors",
            "Ring entries of clients that made no sense.",
            value=statistics.ring_protocol_errors,
        )
        yield CounterMetricFamily(
            "memd_backpressure_seconds",
            "Time that leases waited for room in the host pool, rather than for the disk.",
            value=statistics.room_wait_seconds,
        )


def _about_calls(methods: Mapping[str, MethodAnswers]) -> Iterator[Metric]:
    calls = CounterMetricFamily(
        "memd_rpcs",
        "Calls of the control plane that were answered, by gRPC's status code.",
        labels=["method", "code"],
    )
    seconds = HistogramMetricFamily(
        "memd_rpc_seconds",
        "Time from a call to its answer, with what it waited for: of a step, its commit.",
        labels=["method"],
    )
    for method, answers in sorted(methods.items()):
        for code, count in {OK: 0, **answers.codes}.items():
            calls.add_metric([method, code], count)
        names = [*(f"{bound:g}" for bound in SECONDS_BOUNDS), "+Inf"]
        buckets = list(zip(names, answers.cumulative(), strict=True))
        seconds.add_metric([method], buckets, answers.seconds)
    yield calls
    yield seconds


def _about_the_pool(statistics: ServerStatistics) -> Iterator[Metric]:
    capacity = GaugeMetricFamily(
        "memd_pool_capacity_bytes", "Size of the host pool and of all volumes.", labels=["tier"]
    )
    used = GaugeMetricFamily(
        "memd_pool_bytes", "Bytes of the host pool and of all volumes.", labels=["tier", "state"]
    )
    for tier, bytes_all, bytes_free in (
        ("host", statistics.pool.bytes, statistics.pool_bytes_free),
        ("nvme", statistics.nvme_bytes, statistics.nvme_bytes_free),
    ):
        capacity.add_metric([tier], bytes_all)
        used.add_metric([tier, "free"], bytes_free)
        used.add_metric([tier, "used"], bytes_all - bytes_free)
    kept = GaugeMetricFamily(
        "memd_snapshots_kept_bytes",
        "Bytes on the volumes that snapshots alone keep: no job names them any more.",
        value=statistics.nvme_bytes_of_snapshots,
    )
    yield capacity
    yield used
    yield kept


def _about_devices(devices: Sequence[DeviceStatistics]) -> Iterator[Metric]:
    seconds = HistogramMetricFamily(
        "memd_io_seconds",
        "Duration of reads, writes and syncs, with their time in the queue.",
        labels=["device", "op"],
    )
    moved = CounterMetricFamily("memd_io_bytes", "Bytes moved.", labels=["device", "op"])
    errors = CounterMetricFamily(
        "memd_io_errors", "I/O operations that failed.", labels=["device", "op", "errno"]
    )
    mismatches = CounterMetricFamily(
        "memd_checksum_failures",
        "Reads whose bytes did not match their checksum.",
        labels=["device"],
    )
    fenced = GaugeMetricFamily(
        "memd_volume_fenced",
        "1 where nothing is committed any more until the daemon is restarted, because a write or "
        "sync failed, on this volume or another: all of a daemon's volumes are fenced together.",
        labels=["device"],
    )
    for device in devices:
        path = device.path
        mismatches.add_metric([path], device.checksum_failures)
        fenced.add_metric([path], device.fenced)
        moved.add_metric([path, "read"], device.read.bytes)
        moved.add_metric([path, "write"], device.write.bytes)
        for op, kind in (("read", device.read), ("write", device.write), ("sync", device.sync)):
            seconds.add_metric([path, op], *_buckets(kind.seconds, IO_SECONDS_BOUNDS))
            # A rate does not see a first error that comes with its series.
            for number, count in {errno.EIO: 0, **kind.error_count_by_errno}.items():
                name = errno.errorcode.get(number, str(number))
                errors.add_metric([path, op, name], count)
    yield seconds
    yield moved
    yield errors
    yield mismatches
    yield fenced


def _about_the_scrub(statistics: ServerStatistics) -> Iterator[Metric]:
    scrub = statistics.scrub
    yield CounterMetricFamily(
        "memd_scrub_bytes", "Bytes on disk that were verified in the background.", value=scrub.bytes
    )
    yield CounterMetricFamily(
        "memd_scrub_errors",
        "Extents that the background verification found damaged, in each pass anew.",
        value=scrub.errors,
    )
    ended = time.time() - scrub.last_pass_age_seconds if scrub.pass_count else 0
    yield GaugeMetricFamily(
        "memd_scrub_last_pass_timestamp_seconds",
        "When everything on disk had last been verified; 0 before the first pass has ended.",
        value=ended,
    )


def _about_exports(statistics: ServerStatistics) -> Iterator[Metric]:
    exports = statistics.exports
    yield GaugeMetricFamily(
        "memd_snapshot_exports", "Snapshots that are exported at this moment.", value=exports.count
    )
    yield CounterMetricFamily(
        "memd_snapshot_export_bytes",
        "Bytes on disk that were read and verified for exports of snapshots.",
        value=exports.bytes,
    )
    yield CounterMetricFamily(
        "memd_snapshot_export_errors",
        "Extents that ended an export: they were damaged, or could not be read.",
        value=exports.errors,
    )


def _about_steps(statistics: ServerStatistics) -> Iterator[Metric]:
    for name, help_text, histogram in (
        (
            "memd_step_seconds",
            "Duration of the optimizer's steps, from their call to their commit.",
            statistics.step_seconds,
        ),
        (
            "memd_commit_seconds",
            "Duration of commits: catalogue, superblock and both flushes.",
            statistics.commit_seconds,
        ),
    ):
        family = HistogramMetricFamily(name, help_text)
        family.add_metric([], *_buckets(histogram, STEP_SECONDS_BOUNDS))
        yield family
    phases = HistogramMetricFamily(
        "memd_step_phase_seconds",
        "Time that a step spent in a phase, one observation a step: summed over tiles, whose "
        "phases overlap.",
        labels=["phase"],
    )
    of = statistics.step_phases
    for phase, histogram in (
        ("read", of.read),
        ("update", of.update),
        ("write", of.write),
        ("commit", of.commit),
    ):
        phases.add_metric([phase], *_buckets(histogram, STEP_SECONDS_BOUNDS))
    yield phases


def _about_turns(statistics: ServerStatistics) -> Iterator[Metric]:
    turns = statistics.turns
    seconds = HistogramMetricFamily(
        "memd_server_turn_seconds",
        "Time of the server thread's turns that had something to do, on its processor and by the "
        "wall: while a turn lasts, all jobs wait for its decisions.",
        labels=["kind"],
    )
    longest = GaugeMetricFamily(
        "memd_server_turn_max_seconds",
        "The longest of these turns since the start.",
        labels=["kind"],
    )
    phases = GaugeMetricFamily(
        "memd_server_turn_max_phase_seconds",
        "Time that each phase took of the longest of these turns, by the wall.",
        labels=["kind", "phase"],
    )
    for kind, histogram, seconds_max, seconds_by_phase in (
        ("cpu", turns.cpu_seconds, turns.cpu_seconds_max, turns.phases_of_cpu_max),
        ("wall", turns.wall_seconds, turns.wall_seconds_max, turns.phases_of_wall_max),
    ):
        seconds.add_metric([kind], *_buckets(histogram, TURN_SECONDS_BOUNDS))
        longest.add_metric([kind], seconds_max)
        for phase, phase_seconds in seconds_by_phase.items():
            phases.add_metric([kind, phase], phase_seconds)
    yield from (seconds, longest, phases)


_JOB_COUNTERS: tuple[tuple[str, str, Callable[[JobStatistics], float]], ...] = (
    ("memd_lease_hits", "Leases of resident shards.", lambda job: job.lease_hits),
    (
        "memd_lease_misses",
        "Leases for which a shard had to be fetched or room to be made.",
        lambda job: job.lease_misses,
    ),
    (
        "memd_lease_wait_seconds",
        "Time that leases waited: the job's stall.",
        lambda job: job.lease_wait_seconds,
    ),
    ("memd_fetched_bytes", "Bytes brought up from disk.", lambda job: job.fetched_bytes),
    (
        "memd_prefetched_bytes",
        "Bytes that a plan fetched before a lease asked for them.",
        lambda job: job.prefetched_bytes,
    ),
    (
        "memd_prefetch_unused_bytes",
        "Bytes that a plan fetched and nobody used before they were evicted or the plan changed.",
        lambda job: job.prefetch_unused_bytes,
    ),
    (
        "memd_prefetch_hits",
        "Uses that found what a plan had brought up.",
        lambda job: job.prefetch_hits,
    ),
    (
        "memd_prefetch_late",
        "Leases that came while a plan was bringing their shard up.",
        lambda job: job.prefetch_late,
    ),
    (
        "memd_plan_uses_foreseen",
        "Uses by sessions that were the next of their plan.",
        lambda job: job.uses_foreseen,
    ),
    (
        "memd_plan_uses_unforeseen",
        "Uses by sessions without a plan, or that were not the next of it.",
        lambda job: job.uses_unforeseen,
    ),
    (
        "memd_plan_moved_bytes",
        "Bytes read and written by training steps that repeat, with their fetches and spills.",
        lambda job: job.plan_moved_bytes,
    ),
    (
        "memd_plan_necessary_bytes",
        "Bytes that those steps must move with the job's memory, by eviction of the farthest next "
        "use: at most 5 % above the least that is possible.",
        lambda job: job.plan_necessary_bytes,
    ),
    (
        "memd_early_tiles_adopted",
        "Tiles updated during backward that their step took over.",
        lambda job: job.early_tiles_adopted,
    ),
    ("memd_evicted_bytes", "Bytes dropped to make room.", lambda job: job.evicted_bytes),
    ("memd_spilled_bytes", "Bytes written to make room.", lambda job: job.spilled_bytes),
)


def _about_jobs(jobs: Sequence[JobStatistics]) -> Iterator[Metric]:
    used = GaugeMetricFamily(
        "memd_job_bytes", "Bytes that the job uses.", labels=["memd_job", "tier"]
    )
    quota = GaugeMetricFamily(
        "memd_job_quota_bytes", "Bytes that the job was admitted with.", labels=["memd_job", "tier"]
    )
    committed = GaugeMetricFamily(
        "memd_committed_step", "The step at which the job stands.", labels=["memd_job"]
    )
    durable = GaugeMetricFamily(
        "memd_durable_step",
        "The step that the job is at after a power cut: its last one on disk, or with parameters "
        "in tier host its last snapshot's; 0 where there is none.",
        labels=["memd_job"],
    )
    host_tier_bytes = GaugeMetricFamily(
        "memd_job_host_tier_bytes",
        "Bytes of parameters in tier host and their optimizer state, which are on disk only in "
        "snapshots.",
        labels=["memd_job"],
    )
    lost = GaugeMetricFamily(
        "memd_job_lost_shards",
        "Shards whose bytes on disk are gone: the job stays at its last commit.",
        labels=["memd_job"],
    )
    unreadable = GaugeMetricFamily(
        "memd_job_unreadable_shards",
        "Shards that the device could not read when they were last asked for; the next use tries "
        "again.",
        labels=["memd_job"],
    )
    snapshots = GaugeMetricFamily(
        "memd_job_snapshots", "Committed steps that the job keeps.", labels=["memd_job"]
    )
    snapshot_bytes = GaugeMetricFamily(
        "memd_job_snapshot_bytes",
        "The part of the job's disk quota that its snapshots take, as if each shared nothing.",
        labels=["memd_job"],
    )
    weight = GaugeMetricFamily(
        "memd_job_weight",
        "A job's part of what jobs share is its weight over the sum of all weights.",
        labels=["memd_job"],
    )
    for each in jobs:
        job = each.job
        weight.add_metric([job.name], job.weight)
        snapshots.add_metric([job.name], job.snapshot_count)
        snapshot_bytes.add_metric([job.name], job.snapshot_bytes)
        used.add_metric([job.name, "host"], job.host_bytes_used)
        nvme_bytes = job.nvme_bytes_used + job.metadata_bytes + job.snapshot_bytes
        used.add_metric([job.name, "nvme"], nvme_bytes)
        quota.add_metric([job.name, "host"], job.host_bytes)
        quota.add_metric([job.name, "nvme"], job.nvme_bytes)
        committed.add_metric([job.name], job.committed_step)
        durable.add_metric([job.name], job.durable_step)
        host_tier_bytes.add_metric([job.name], job.host_tier_bytes)
        lost.add_metric([job.name], len(job.lost_shards))
        unreadable.add_metric([job.name], len(job.unreadable_shards))
    waits = CounterMetricFamily(
        "memd_lease_wait_reason_seconds",
        "Time that leases waited, by what for: their bytes on disk, an update or a copy of "
        "their own shard, a step, the step that has the gradient's slot, room, a writer.",
        labels=["memd_job", "reason"],
    )
    for each in jobs:
        for reason, wait_s in each.lease_wait_reason_seconds.items():
            waits.add_metric([each.job.name, reason], wait_s)
    discarded = CounterMetricFamily(
        "memd_early_tiles_discarded",
        "Tiles updated during backward that their step could not use, by why: other settings, the "
        "gradient written again or dropped, the parameter or its state written, another step, a "
        "failed read or write.",
        labels=["memd_job", "reason"],
    )
    for each in jobs:
        for reason, count in each.early_tiles_discarded.items():
            discarded.add_metric([each.job.name, reason], count)
    yield discarded
    yield waits
    yield from _about_stalls(jobs)
    yield lost
    yield unreadable
    yield weight
    yield snapshots
    yield snapshot_bytes
    yield host_tier_bytes
    yield used
    yield quota
    yield committed
    yield durable
    for name, help_text, value in _JOB_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=["memd_job"])
        for each in jobs:
            counter.add_metric([each.job.name], value(each))
        yield counter


def _about_stalls(jobs: Sequence[JobStatistics]) -> Iterator[Metric]:
    """Stalls that the trainers count. There are 4 phases, at most 32 groups of a job, and 7
    reasons."""
    walls = CounterMetricFamily(
        "memd_step_wall_seconds",
        "Time from the end of a step to the end of the next, of all sessions of the job.",
        labels=["memd_job"],
    )
    phases = CounterMetricFamily(
        "memd_stall_seconds",
        "Time that threads of trainers stood still, by phase of the step and by what for: as "
        "memd_lease_wait_reason_seconds, and the ring.",
        labels=["memd_job", "phase", "reason"],
    )
    groups = CounterMetricFamily(
        "memd_stall_group_seconds",
        "The same by group of modules, such as h.*.attn, and by what for.",
        labels=["memd_job", "group", "reason"],
    )
    for each in jobs:
        walls.add_metric([each.job.name], each.step_wall_seconds)
        for family, parts in (
            (phases, each.stall_phase_seconds),
            (groups, each.stall_group_seconds),
        ):
            for part, waits in parts.items():
                for reason, stall_s in waits.items():
                    family.add_metric([each.job.name, part, reason], stall_s)
    yield walls
    yield phases
    yield groups


def _gauge(name: str, help_text: str, labels: dict[str, str], value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, help_text, labels=list(labels))
    gauge.add_metric(list(labels.values()), value)
    return gauge


def _buckets(
    histogram: SecondsHistogram, bounds: Sequence[float]
) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum: `counts` are those of each bucket alone; Prometheus wants them with all
    below."""
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    buckets: list[tuple[str, float]] = list(zip(names, accumulate(histogram.counts), strict=True))
    return buckets, histogram.sum_seconds


class MetricsServer:
    """`/metrics`, `/healthz` (the process serves), `/readyz` (it takes clients and commits), and a
    page for people at `/`. Takes its port at once, and connections after start()."""

    def __init__(self, endpoint: str, *, is_ready: Callable[[], bool]) -> None:
        """OSError where nothing can listen there."""
        host, _, port = endpoint.rpartition(":")
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._http = _HttpServer((host.strip("[]"), int(port)), self._registry, is_ready)
        self._end: int | None = None  # an eventfd while the thread runs
        self._thread = threading.Thread(target=self._serve, name="memd-metrics", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._http.server_address[:2]
        text = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{text}]' if ':' in text else text}:{port}/metrics"

    def start(self, collector: Collector, *, page: Callable[[], str]) -> None:
        """OSError where another process listens there since."""
        self._http.page = page
        self._registry.register(collector)
        self._http.server_activate()
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread.start()

    def stop(self) -> None:
        if self._end is not None:
            os.eventfd_write(self._end, 1)
            self._thread.join()
            os.close(self._end)
            self._end = None
        self._http.server_close()

    def _serve(self) -> None:
        """Answers until stop(). serve_forever() polls for its end twice a second, and each restart
        of a daemon would wait for that."""
        assert self._end is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._http, selectors.EVENT_READ)
            selector.register(self._end, selectors.EVENT_READ)
            while all(key.fileobj is self._http for key, _ in selector.select()):
                self._http.handle_request()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    # A scraper that never reads its answer must not hold up the end of the daemon.
    block_on_close = False
    timeout = 0  # handle_request() waits for nothing: MetricsServer does

    def __init__(
        self, address: tuple[str, int], registry: CollectorRegistry, is_ready: Callable[[], bool]
    ) -> None:
        self.registry = registry
        self.page: Callable[[], str] = str  # until start()
        self.is_ready = is_ready
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except OSError:
            self.server_close()
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        log.exception("an HTTP request failed", extra={"client": client_address})

    def server_bind(self) -> None:
        # HTTPServer would ask the resolver for this machine's name, which can take seconds.
        TCPServer.server_bind(self)


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    server_version = "memd"
    timeout = 10  # seconds for a request to arrive

    def do_GET(self) -> None:
        try:
            self._get(self.path.partition("?")[0])
        except StatusError as error:
            # The data plane does not answer, or has ended: nothing is known, so nothing is said.
            self._answer(503, f"{error}\n".encode())

    def _get(self, path: str) -> None:
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, encode(self.server.registry), content_type)
        elif path == "/":
            body = self.server.page().encode()
            self._answer(200, body, "text/html; charset=utf-8", policy=POLICY)
        elif path == "/healthz":
            self._answer(200, b"serving\n")
        elif path == "/readyz":
            ready = self.server.is_ready()
            self._answer(200 if ready else 503, b"ready\n" if ready else b"not ready\n")
        else:
            self._answer(404, b"there are /, /metrics, /healthz and /readyz\n")

    def _answer(
        self, status: int, body: bytes, content_type: str = "text/plain", *, policy: str = ""
    ) -> None:
        self.send_response(status)
        if policy:
            self.send_header("Content-Security-Policy", policy)
            self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("http", extra={"request": format % args})
