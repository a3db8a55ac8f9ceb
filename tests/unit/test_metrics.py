"""Metrics and probes of a daemon around a data plane that is made up."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from memd.metrics import DaemonCollector, MetricsServer
from memd.page.overview import Overview
from memd.peers import Peers
from memd.refusal import StatusCode
from memd.service.call import Gate
from tests.unit.fake_native import FakeServer, as_server, status_error

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Scraped:
    server: FakeServer
    metrics: MetricsServer
    gate: Gate
    readiness: list[bool] = field(default_factory=lambda: [False])

    def get(self, path: str) -> tuple[int, str]:
        url = self.metrics.url.replace("/metrics", path)
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    server, peers, readiness = FakeServer(), Peers(), [False]
    gate = Gate(peers)
    collector = DaemonCollector(as_server(server), peers=peers, gate=gate)
    metrics = MetricsServer(
        "127.0.0.1:0",
        is_ready=lambda: readiness[0] and not server.statistics().fence_reason,
    )
    overview = Overview(as_server(server), is_ready=lambda: readiness[0])
    metrics.start(collector, page=overview.html)
    yield Scraped(server, metrics, gate, readiness)
    metrics.stop()


def samples(text: str) -> dict[str, float]:
    """Values by name and labels, as they stand in the text."""
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_figures_of_the_data_plane_are_exported(scraped: Scraped) -> None:
    job = scraped.server.open_job("gpt", uid=1)
    scraped.server.attach(job.job_id)
    status, text = scraped.get("/metrics")
    found = samples(text)
    assert status == 200
    assert found["memd_pool_capacity_bytes,tier=host"] == 64 << 20
    assert found["memd_pool_bytes,state=free,tier=host"] == 32 << 20
    assert found["memd_pool_bytes,state=used,tier=nvme"] == (1 << 30) * 3 // 4
    assert found["memd_clients"] == 1
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_open_fds"] > 3
    assert found["memd_committed_step,memd_job=gpt"] == 0
    assert found["memd_job_lost_shards,memd_job=gpt"] == 0
    assert found["memd_job_unreadable_shards,memd_job=gpt"] == 0
    assert found["memd_job_weight,memd_job=gpt"] == 1
    assert found["memd_job_host_tier_bytes,memd_job=gpt"] == 0
    assert found["memd_lease_wait_seconds_total,memd_job=gpt"] == 0.5
    assert found["memd_lease_wait_reason_seconds_total,memd_job=gpt,reason=room"] == 0.125
    stalls = "memd_stall_seconds_total,memd_job=gpt,phase=forward"
    assert (found[stalls + ",reason=disk"], found[stalls + ",reason=ring"]) == (0.5, 0.25)
    assert found["memd_stall_group_seconds_total,group=h.*.attn,memd_job=gpt,reason=disk"] == 0.5
    assert found["memd_step_wall_seconds_total,memd_job=gpt"] == 2
    assert found["memd_early_tiles_adopted_total,memd_job=gpt"] == 4
    assert found["memd_early_tiles_discarded_total,memd_job=gpt,reason=settings"] == 2
    assert found["memd_backpressure_seconds_total"] == 0.25
    assert found["memd_io_seconds_sum,device=/volume,op=sync"] == 0.75
    assert found["memd_io_bytes_total,device=/volume,op=read"] == 8192
    assert found["memd_client_reclaims_total,reason=process_died"] == 0
    assert found["memd_client_reclaim_age_seconds"] == 0
    assert found["memd_admission_rejections_total,reason=capacity"] == 0
    assert found["memd_scrub_bytes_total"] == 4096
    assert found["memd_scrub_errors_total"] == 1
    assert found["memd_snapshot_exports"] == 2
    assert found["memd_snapshot_export_bytes_total"] == 12288
    assert found["memd_snapshot_export_errors_total"] == 1
    ended = found["memd_scrub_last_pass_timestamp_seconds"]
    assert 60 <= time.time() - ended < 120


def test_what_fails_on_a_device_is_told_with_device_operation_and_errno(scraped: Scraped) -> None:
    found = samples(scraped.get("/metrics")[1])
    assert found["memd_checksum_failures_total,device=/volume"] == 2
    assert found["memd_volume_fenced,device=/volume"] == 0
    assert found["memd_io_errors_total,device=/volume,errno=ENOSPC,op=write"] == 3
    assert found["memd_io_errors_total,device=/volume,errno=EIO,op=write"] == 0
    assert found["memd_io_errors_total,device=/volume,errno=EIO,op=sync"] == 0


def test_histogram_buckets_count_everything_below_their_bound(scraped: Scraped) -> None:
    found = samples(scraped.get("/metrics")[1])
    assert found["memd_step_seconds_bucket,le=0.001"] == 1
    assert found["memd_step_seconds_bucket,le=0.002"] == 3
    assert found["memd_step_seconds_bucket,le=+Inf"] == 3
    assert found["memd_step_seconds_count"] == 3
    assert found["memd_step_seconds_sum"] == 0.75
    assert found["memd_io_seconds_bucket,device=/volume,le=6.25e-05,op=read"] == 1
    assert found["memd_io_seconds_bucket,device=/volume,le=2.048,op=read"] == 3
    for phase in ("read", "update", "write", "commit"):
        assert found[f"memd_step_phase_seconds_count,phase={phase}"] == 3
    for kind, longest in (("cpu", 0.001), ("wall", 0.002)):
        assert found[f"memd_server_turn_seconds_bucket,kind={kind},le=3.125e-06"] == 1
        assert found[f"memd_server_turn_seconds_bucket,kind={kind},le=0.1024"] == 3
        assert found[f"memd_server_turn_max_seconds,kind={kind}"] == longest
    assert found["memd_server_turn_max_phase_seconds,kind=cpu,phase=serve"] == 0.00075
    assert found["memd_server_turn_max_phase_seconds,kind=wall,phase=commands"] == 0.0015


def test_no_label_names_a_process_a_user_or_a_shard(scraped: Scraped) -> None:
    scraped.server.open_job("gpt", uid=1)
    text = scraped.get("/metrics")[1]
    names = {
        label
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for label in sample.labels
    }
    assert names == {
        "device",
        "engine",
        "errno",
        "group",
        "kind",
        "le",
        "memd_job",
        "op",
        "phase",
        "protocol_version",
        "reason",
        "state",
        "tier",
        "version",
    }


def test_calls_are_exported_by_method_and_code(scraped: Scraped) -> None:
    for code, seconds in (("ok", 0.001), ("ok", 0.003), ("deadline_exceeded", 100.0)):
        scraped.gate.answers.note("Step", code, seconds)
    found = samples(scraped.get("/metrics")[1])
    assert found["memd_rpcs_total,code=ok,method=Step"] == 2
    assert found["memd_rpcs_total,code=deadline_exceeded,method=Step"] == 1
    assert found["memd_rpc_seconds_bucket,le=0.001,method=Step"] == 1
    assert found["memd_rpc_seconds_bucket,le=0.004,method=Step"] == 2
    assert found["memd_rpc_seconds_bucket,le=32.768,method=Step"] == 2
    assert found["memd_rpc_seconds_bucket,le=+Inf,method=Step"] == 3
    assert found["memd_rpc_seconds_sum,method=Step"] == pytest.approx(100.004)


def test_promtool_finds_nothing_wrong(scraped: Scraped) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    scraped.server.open_job("gpt", uid=1)
    scraped.gate.answers.note("Step", "ok", 0.001)
    text = scraped.get("/metrics")[1]
    command = ["promtool", "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_readiness_follows_the_daemon_and_health_does_not(scraped: Scraped) -> None:
    assert scraped.get("/readyz") == (503, "not ready\n")
    assert scraped.get("/healthz") == (200, "serving\n")
    scraped.readiness[0] = True
    assert scraped.get("/readyz") == (200, "ready\n")


def test_where_the_data_plane_does_not_answer_nothing_is_said_of_it(
    scraped: Scraped, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statistics() -> NoReturn:
        raise status_error(StatusCode.DEADLINE, "counting is not done yet")

    scraped.readiness[0] = True
    monkeypatch.setattr(scraped.server, "statistics", statistics)
    for path in ("/metrics", "/readyz"):
        status, text = scraped.get(path)
        assert status == 503
        assert "counting is not done yet" in text
    assert scraped.get("/healthz")[0] == 200


def test_another_path_is_told_what_there_is(scraped: Scraped) -> None:
    assert scraped.get("/nowhere")[0] == 404
    assert "/metrics, /healthz and /readyz" in scraped.get("/nowhere")[1]
