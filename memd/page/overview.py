"""The page as a whole: pools, volumes, steps, jobs and their stalls. It reloads itself, without
scripts."""

from __future__ import annotations

import time
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from memd import __version__
from memd.owner import tenant_of
from memd.page.history import PHASES, History, growth, rates
from memd.page.pictures import COLORS, Part, bar, colored, legend, line
from memd.sizes import format_size
from memd.users import user_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memd.page.history import Sample
    from memd_native import DeviceStatistics, JobStatistics, Server, ServerStatistics

RELOAD_S = 2
# The page has no scripts and loads nothing, whatever a job may be called.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
# Jobs with most in a tier; the others are together.
_PARTS_MAX = len(COLORS) - 1

_STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


class Overview:
    def __init__(
        self,
        server: Server,
        *,
        is_ready: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._is_ready = is_ready
        self._clock = clock
        self._began_s = clock()
        self._history = History(clock)

    def html(self) -> str:
        statistics = self._server.statistics()
        samples = self._history.with_now(statistics)
        body = "".join(
            (
                self._about_the_daemon(statistics),
                _about_pools(statistics),
                _about_volumes(statistics.devices, samples),
                _about_steps(samples),
                _about_jobs(statistics.jobs, samples),
            )
        )
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="refresh" content="{RELOAD_S}">'
            '<meta name="viewport" content="width=device-width"><title>memd</title>'
            f"<style>{_STYLE}</style></head><body>{body}"
            f'<p class="dim">Every {RELOAD_S} s; rates since this page was first read, 10 minutes '
            'at most. <a href="/metrics">metrics</a> <a href="/readyz">readyz</a></p></body></html>'
        )

    def _about_the_daemon(self, statistics: ServerStatistics) -> str:
        report = self._server.report()
        up_s = int(self._clock() - self._began_s)
        state = "ready" if self._is_ready() else '<span class="bad">not ready</span>'
        lines = [
            f"<h1>memd {escape(__version__)}</h1>",
            f"<p>{state}, up {_duration(up_s)}, I/O by {escape(report.io_engine)}, "
            f"jobs {len(statistics.jobs)}, sessions {statistics.session_count}</p>",
        ]
        if statistics.fence_reason:
            reason = escape(statistics.fence_reason)
            lines.append(f'<p class="bad">not committing: {reason}</p>')
        return "".join(lines)


def _about_pools(statistics: ServerStatistics) -> str:
    host = [(each.job.name, each.job.host_bytes_used) for each in statistics.jobs]
    nvme = [(each.job.name, _disk_bytes(each)) for each in statistics.jobs]
    pools = (
        ("host", statistics.pool.bytes, statistics.pool_bytes_free, host, "reserved by jobs"),
        ("nvme", statistics.nvme_bytes, statistics.nvme_bytes_free, nvme, "snapshots and records"),
    )
    found = ["<h2>Pools</h2>"]
    for name, of_all, free, used, rest_name in pools:
        parts = _largest(used)
        rest = of_all - free - sum(size for _, size in used)
        if rest > 0:
            rest_text = format_size(rest)
            parts.append(Part(name=rest_name, value=rest, shown=rest_text, color="#a1a1aa"))
        text = f"{format_size(of_all - free)} of {format_size(of_all)} used"
        found.append(f"<p>{name}: {text}</p>")
        found.append(bar(parts, whole=of_all, label=f"{name}: {text}") + legend(parts))
    return "".join(found)


def _disk_bytes(job: JobStatistics) -> int:
    return job.job.nvme_bytes_used + job.job.metadata_bytes + job.job.snapshot_bytes


def _largest(used: Sequence[tuple[str, int]]) -> list[Part]:
    by_size = sorted(used, key=lambda each: (-each[1], each[0]))
    shown = [(name, size) for name, size in by_size[:_PARTS_MAX] if size]
    rest = sum(size for _, size in by_size[_PARTS_MAX:])
    parts = colored([(name, size, format_size(size)) for name, size in shown])
    if rest:
        parts.append(Part(name="other jobs", value=rest, shown=format_size(rest), color=COLORS[-1]))
    return parts


def _about_volumes(devices: Sequence[DeviceStatistics], samples: Sequence[Sample]) -> str:
    cards = []
    for device in devices:
        used = device.bytes - device.bytes_free
        text = f"{format_size(used)} of {format_size(device.bytes)} used"
        errors = sum(kind.error_count for kind in (device.read, device.write, device.sync))
        bad = [
            said
            for said, holds in (
                ("fenced", device.fenced),
                (f"{errors} I/O errors", errors),
                (f"{device.checksum_failures} checksum failures", device.checksum_failures),
            )
            if holds
        ]
        part = Part(name="used", value=used, shown=format_size(used), color=COLORS[0])
        cards.append(
            f'<div class="card"><h3>{escape(device.path)}</h3><p>{text}</p>'
            + bar([part], whole=device.bytes, label=f"{device.path}: {text}")
            + (f'<p class="bad">{", ".join(bad)}</p>' if bad else "")
            + '<div class="two">'
            + _flow(samples, device.path, "read")
            + _flow(samples, device.path, "written")
            + "</div></div>"
        )
    return f'<h2>Volumes</h2><div class="cards">{"".join(cards)}</div>'


def _flow(samples: Sequence[Sample], path: str, what: str) -> str:
    def moved(sample: Sample) -> float | None:
        by_path = sample.read_bytes if what == "read" else sample.written_bytes
        return by_path.get(path)

    points = rates(samples, moved)
    shown = f"{format_size(int(points[-1][1]))}/s" if points else "…"
    return line(points, label=what, shown=shown, color=COLORS[0 if what == "read" else 2])


def _about_steps(samples: Sequence[Sample]) -> str:
    count = growth(samples, lambda sample: sample.step_count)
    if count < 1:
        return '<h2>Steps</h2><p class="dim">none was committed</p>'
    seconds = {phase: growth(samples, partial(_of_phase, phase=phase)) / count for phase in PHASES}
    parts = colored([(phase, each, _milliseconds(each)) for phase, each in seconds.items()])
    text = f"{count:.0f} steps: what each took, summed over tiles, whose phases overlap"
    whole = sum(seconds.values())
    return f"<h2>Steps</h2><p>{text}</p>{bar(parts, whole=whole, label=text)}{legend(parts)}"


def _about_jobs(jobs: Sequence[JobStatistics], samples: Sequence[Sample]) -> str:
    cards = "".join(_job(each, samples) for each in jobs)
    return f'<h2>Jobs</h2><div class="cards">{cards}</div>' if jobs else "<h2>Jobs</h2><p>none</p>"


def _job(job: JobStatistics, samples: Sequence[Sample]) -> str:
    info = job.job
    owner = tenant_of(info.name) or user_name(info.uid)
    bad = [
        f"{len(shards)} shards {how}"
        for shards, how in ((info.lost_shards, "lost"), (info.unreadable_shards, "unreadable"))
        if shards
    ]
    points = rates(samples, lambda sample: _of_job(sample, info.job_id, "step"))
    rate = f"{points[-1][1]:.2f}/s" if points else "…"
    return (
        f'<div class="card"><h3>{escape(info.name)}</h3>'
        f'<p class="dim">of {escape(owner)}, sessions {info.session_count}, weight '
        f"{info.weight:g}, durability {escape(info.durability)}</p>"
        + (f'<p class="bad">{", ".join(bad)}</p>' if bad else "")
        + f"<p>step {info.committed_step}, on disk {info.durable_step}</p>"
        + line(points, label="steps", shown=rate, color=COLORS[4])
        + _quota("host", info.host_bytes_used, info.host_bytes)
        + _quota("nvme", _disk_bytes(job), info.nvme_bytes)
        + _stalls(info.job_id, samples)
        + "</div>"
    )


def _of_job(sample: Sample, job_id: int, what: str) -> float | None:
    found = sample.jobs.get(job_id)
    return None if found is None else float(getattr(found, what))


def _quota(tier: str, used: int, quota: int) -> str:
    text = f"{tier}: {format_size(used)} of {format_size(quota)}"
    part = Part(name=tier, value=used, shown=format_size(used), color=COLORS[7])
    return f"<p>{text}</p>{bar([part], whole=quota, label=text)}"


def _stalls(job_id: int, samples: Sequence[Sample]) -> str:
    """The share of its steps' time that a training thread stood still, by what for."""
    wall_s = growth(samples, lambda sample: _of_job(sample, job_id, "wall_s"))
    if wall_s <= 0:
        return '<p class="dim">stalls: no step yet</p>'
    now = samples[-1].jobs[job_id]
    seconds = {
        reason: growth(samples, partial(_of_stalls, job_id=job_id, reason=reason))
        for reason in sorted(now.stalls_s)
    }
    parts = colored(
        [(reason, each, f"{each / wall_s:.0%}") for reason, each in seconds.items() if each > 0]
    )
    text = f"stalls: {sum(seconds.values()) / wall_s:.0%} of the steps' time"
    return f"<p>{text}</p>{bar(parts, whole=wall_s, label=text)}{legend(parts)}"


def _of_phase(sample: Sample, *, phase: str) -> float:
    return sample.phases_s.get(phase, 0.0)


def _of_stalls(sample: Sample, *, job_id: int, reason: str) -> float | None:
    found = sample.jobs.get(job_id)
    return None if found is None else found.stalls_s.get(reason, 0.0)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _duration(seconds: int) -> str:
    hours, rest = divmod(seconds, 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
