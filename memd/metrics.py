"""Prometheus metrics and the probes `/healthz` and `/readyz`, on one HTTP server."""

from __future__ import annotations

import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from socketserver import TCPServer
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from memd import __version__
from memd_native import PROTOCOL_VERSION, STEP_SECONDS_BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from memd.peers import Peers
    from memd.service.call import Gate
    from memd_native import DeviceStatistics, JobStatistics, Server, ServerStatistics

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
        yield _histogram(
            "memd_step_seconds",
            "Duration of the optimizer's steps, from their call to their commit.",
            statistics.step_seconds_buckets,
            statistics.step_seconds_sum,
        )
        yield _histogram(
            "memd_commit_seconds",
            "Duration of commits: catalogue, superblock and both flushes.",
            statistics.commit_seconds_buckets,
            statistics.commit_seconds_sum,
        )

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
        rejections = CounterMetricFamily(
            "memd_admission_rejections", "Attach calls that were refused.", labels=["reason"]
        )
        for reason, count in {"capacity": 0, **self._gate.admission_rejections()}.items():
            rejections.add_metric([reason], count)
        yield rejections
        yield CounterMetricFamily(
            "memd_ring_protocol_errors",
            "Ring entries of clients that made no sense.",
            value=statistics.ring_protocol_errors,
        )
        yield CounterMetricFamily(
            "memd_checksum_failures",
            "Extents whose bytes did not match their checksum.",
            value=statistics.checksum_failures,
        )


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
    yield capacity
    yield used


def _about_devices(devices: Sequence[DeviceStatistics]) -> Iterator[Metric]:
    seconds = SummaryMetricFamily(
        "memd_io_seconds", "I/O operations, and the time they took.", labels=["device", "op"]
    )
    moved = CounterMetricFamily("memd_io_bytes", "Bytes moved.", labels=["device", "op"])
    errors = CounterMetricFamily("memd_io_errors", "I/O operations that failed.", labels=["device"])
    for device in devices:
        path = device.path
        seconds.add_metric([path, "read"], device.read_count, device.read_seconds)
        seconds.add_metric([path, "write"], device.write_count, device.write_seconds)
        seconds.add_metric([path, "sync"], device.sync_count, device.sync_seconds)
        moved.add_metric([path, "read"], device.read_bytes)
        moved.add_metric([path, "write"], device.write_bytes)
        errors.add_metric([path], device.error_count)
    yield seconds
    yield moved
    yield errors


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
    phases = SummaryMetricFamily(
        "memd_step_phase_seconds",
        "Steps, and the time they spent in each phase; phases overlap.",
        labels=["memd_job", "phase"],
    )
    for each in jobs:
        job = each.job
        used.add_metric([job.name, "host"], job.host_bytes_used)
        used.add_metric([job.name, "nvme"], job.nvme_bytes_used)
        quota.add_metric([job.name, "host"], job.host_bytes)
        quota.add_metric([job.name, "nvme"], job.nvme_bytes)
        committed.add_metric([job.name], job.committed_step)
        for phase, seconds in (
            ("read", each.step_read_seconds),
            ("update", each.step_update_seconds),
            ("write", each.step_write_seconds),
            ("commit", each.step_commit_seconds),
        ):
            phases.add_metric([job.name, phase], each.step_count, seconds)
    yield used
    yield quota
    yield committed
    yield phases
    for name, help_text, value in _JOB_COUNTERS:
        counter = CounterMetricFamily(name, help_text, labels=["memd_job"])
        for each in jobs:
            counter.add_metric([each.job.name], value(each))
        yield counter


def _gauge(name: str, help_text: str, labels: dict[str, str], value: float) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, help_text, labels=list(labels))
    gauge.add_metric(list(labels.values()), value)
    return gauge


def _histogram(
    name: str, help_text: str, counts: Sequence[int], sum_value: float
) -> HistogramMetricFamily:
    """`counts` are those of each bucket alone; Prometheus wants them with all below."""
    bounds = [*(f"{bound:g}" for bound in STEP_SECONDS_BOUNDS), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=sum_value)


class MetricsServer:
    """`/metrics`, `/healthz` (the process serves) and `/readyz` (it takes clients)."""

    def __init__(
        self, endpoint: str, collector: Collector, *, is_ready: Callable[[], bool]
    ) -> None:
        """OSError where nothing can listen there."""
        host, _, port = endpoint.rpartition(":")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._http = _HttpServer((host.strip("[]"), int(port)), registry, is_ready)
        self._thread = threading.Thread(
            target=self._http.serve_forever, name="memd-metrics", daemon=True
        )

    @property
    def url(self) -> str:
        host, port = self._http.server_address[:2]
        text = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{text}]' if ':' in text else text}:{port}/metrics"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    # A scraper that never reads its answer must not hold up the end of the daemon.
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], registry: CollectorRegistry, is_ready: Callable[[], bool]
    ) -> None:
        self.registry = registry
        self.is_ready = is_ready
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

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
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, encode(self.server.registry), content_type)
        elif path == "/healthz":
            self._answer(200, b"serving\n")
        elif path == "/readyz":
            ready = self.server.is_ready()
            self._answer(200 if ready else 503, b"ready\n" if ready else b"not ready\n")
        else:
            self._answer(404, b"there are /metrics, /healthz and /readyz\n")

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("http", extra={"request": format % args})
