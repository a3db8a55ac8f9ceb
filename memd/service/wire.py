"""Messages of memd.v1 from and to the records of `memd_native`. The numbers of the enums agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memd.refusal import Refused, StatusCode
from memd_native import AdamSettings, ShardSpec
from memd_proto.v1 import job_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memd_native import (
        JobInfo,
        JobStatistics,
        Server,
        ShardInfo,
        SnapshotInfo,
        SnapshotShard,
    )
    from memd_proto.v1 import session_pb2

# A shard takes 1.5 KiB at most: below gRPC's 4 MiB.
SHARDS_IN_PAGE = 2048
_LOST_SHARDS_MAX = 100

_NAME_BYTES_MAX = 1024
_DIMENSIONS_MAX = 32


def native_spec(spec: types_pb2.ShardSpec) -> ShardSpec:
    """Refused where an enum is missing or unknown: a number out of range is no dtype."""
    name_bytes = len(spec.name.encode())
    if not 0 < name_bytes <= _NAME_BYTES_MAX:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"a shard's name has 1 to {_NAME_BYTES_MAX} bytes, not {name_bytes}",
        )
    for label, value, known in (
        ("kind", spec.kind, types_pb2.ShardKind.values()),
        ("dtype", spec.dtype, types_pb2.DType.values()),
        ("tier", spec.tier, types_pb2.Tier.values()),
    ):
        if value == 0 or value not in known:
            raise Refused(
                StatusCode.INVALID_ARGUMENT, f"shard {spec.name!r}: {value} is no {label}"
            )
    if len(spec.shape) > _DIMENSIONS_MAX:
        raise Refused(
            StatusCode.INVALID_ARGUMENT,
            f"shard {spec.name!r}: {len(spec.shape)} dimensions; at most {_DIMENSIONS_MAX}",
        )
    return ShardSpec(
        spec.name,
        spec.kind,
        spec.dtype,
        list(spec.shape),
        spec.tier,
        value_only=spec.value_only,
        keeps_maximum=spec.keeps_maximum,
    )


def spec_message(spec: ShardSpec) -> types_pb2.ShardSpec:
    return types_pb2.ShardSpec(
        name=spec.name,
        kind=types_pb2.ShardKind.Name(spec.kind),
        dtype=types_pb2.DType.Name(spec.dtype),
        shape=spec.shape,
        tier=types_pb2.Tier.Name(spec.tier),
        keeps_maximum=spec.keeps_maximum,
    )


def shard_message(shard: ShardInfo) -> types_pb2.Shard:
    return types_pb2.Shard(
        shard_id=shard.shard_id,
        spec=spec_message(shard.spec),
        generation=shard.generation,
        written=shard.written,
        bytes=shard.bytes,
        lost=shard.lost,
        unreadable=shard.unreadable,
    )


def shard_page(server: Server, job_id: int, *, first: int) -> tuple[list[types_pb2.Shard], int]:
    """In the order of their ids, from `first` on; and where the next page begins, or 0."""
    # One more than there is place for tells whether there is another page.
    shards = list(server.shards(job_id, first=first, count_max=SHARDS_IN_PAGE + 1))
    page = [shard_message(shard) for shard in shards[:SHARDS_IN_PAGE]]
    rest = shards[SHARDS_IN_PAGE:]
    return page, rest[0].shard_id if rest else 0


def job_messages(jobs: Sequence[JobInfo], statistics: Sequence[JobStatistics]) -> list[job_pb2.Job]:
    """`statistics` may be of other jobs too, or of fewer: one may have come since."""
    counters = {each.job.job_id: _counters_message(each) for each in statistics}
    return [_job_message(job, counters.get(job.job_id)) for job in jobs]


def _counters_message(statistics: JobStatistics) -> job_pb2.JobCounters:
    return job_pb2.JobCounters(
        fetched_bytes=statistics.fetched_bytes,
        spilled_bytes=statistics.spilled_bytes,
        step_wall_seconds=statistics.step_wall_seconds,
        stalls=[
            job_pb2.Stall(phase=phase, reason=reason, seconds=seconds)
            for phase, waits in statistics.stall_phase_seconds.items()
            for reason, seconds in waits.items()
            if seconds > 0
        ],
    )


def _job_message(job: JobInfo, counters: job_pb2.JobCounters | None) -> job_pb2.Job:
    return job_pb2.Job(
        counters=counters,
        job_id=job.job_id,
        name=job.name,
        uid=job.uid,
        committed_step=job.committed_step,
        durability=job.durability,
        durable_step=job.durable_step,
        weight=job.weight,
        session_count=job.session_count,
        host_bytes=job.host_bytes,
        host_bytes_used=job.host_bytes_used,
        nvme_bytes=job.nvme_bytes,
        nvme_bytes_used=job.nvme_bytes_used + job.metadata_bytes + job.snapshot_bytes,
        snapshot_count=job.snapshot_count,
        snapshot_bytes=job.snapshot_bytes,
        host_tier_bytes=job.host_tier_bytes,
        shard_count=job.shard_count,
        element_count=job.element_count,
        lease_count=job.lease_count,
        lost_shards=job.lost_shards[:_LOST_SHARDS_MAX],
        lost_shard_count=len(job.lost_shards),
        unreadable_shards=job.unreadable_shards[:_LOST_SHARDS_MAX],
    )


def snapshot_message(snapshot: SnapshotInfo) -> job_pb2.Snapshot:
    return job_pb2.Snapshot(
        name=snapshot.name,
        step=snapshot.step,
        created_s=snapshot.created_s,
        bytes=snapshot.bytes,
        is_lost=snapshot.is_lost,
        lost_shards=snapshot.lost_shards[:_LOST_SHARDS_MAX],
        lost_shard_count=len(snapshot.lost_shards),
        is_exported=snapshot.is_exported,
        exported_part=snapshot.exported_part,
    )


def snapshot_shard_message(shard: SnapshotShard) -> job_pb2.SnapshotShard:
    return job_pb2.SnapshotShard(
        spec=spec_message(shard.spec),
        generation=shard.generation,
        written=shard.written,
        has_moments=shard.has_moments,
    )


def native_adam(settings: session_pb2.AdamSettings) -> AdamSettings:
    return AdamSettings(
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        decoupled=settings.decoupled,
        maximize=settings.maximize,
        amsgrad=settings.amsgrad,
    )
