#include "store/state/admission.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>

#include "base/memory_reserve.h"
#include "base/units.h"

namespace memd {
namespace {

// A JobRecord without its name, buckets and shards; catalogue_test.cc compares.
constexpr uint64_t kJobRecordBytes = 114;

constexpr uint64_t kRecordMemoryBytesMin = 16_MiB;

/// Memory that can be had in one piece can be had in many pieces a moment later, since only the
/// server thread allocates so much: nothing has to be undone half-way.
bool can_allocate(uint64_t bytes) {
  const WithoutReserve can_be_told;
  const std::unique_ptr<std::byte[]> piece(new (std::nothrow) std::byte[bytes]);
  return piece != nullptr;
}

}  // namespace

void Admission::restore(const JobRecord& record) {
  durability_ = Durability::of_code(record.durability);
  weight_ = JobWeight::of_code(record.weight);
  host_bytes_ = record.host_bytes;
  parts_.space.set_quota_bytes(record.nvme_bytes);
}

void Admission::write(JobRecord& record) const {
  record.host_bytes = host_bytes_;
  record.nvme_bytes = parts_.space.quota_bytes();
  record.durability = durability_.code();
  record.weight = weight_.code();
}

void Admission::take_terms(const Admission& other) {
  JobRecord terms;
  other.write(terms);
  restore(terms);
  reserve_metadata();
}

void Admission::set_weight(JobWeight weight) {
  weight_ = weight;
  parts_.durable.note_change();
  parts_.journal.note_layout();
}

uint64_t Admission::arena_bytes_max() const {
  return parts_.memory == nullptr ? std::numeric_limits<uint64_t>::max()
                                  : parts_.memory->arena_bytes_max();
}

Status Admission::check(const DeclaredSpace& wanted) const {
  // A job without memory is in nobody's use: it is being made from what was accepted before.
  if (parts_.memory == nullptr) return Status::ok();
  const SnapshotSpace& snapshots = parts_.space.snapshots();
  return check(wanted, snapshots, space_needed(wanted, snapshots));
}

Status Admission::check_snapshots(const SnapshotSpace& more) const {
  SnapshotSpace wanted = parts_.space.snapshots();
  wanted += more;
  const DeclaredSpace& declared = parts_.shards.declared();
  SpaceNeeded needed = space_needed(declared, wanted);
  if (parts_.memory == nullptr) {
    // Nobody has attached since the start: its arena will be what was admitted.
    const uint64_t arena_bytes = host_bytes_ - std::min(host_bytes_, kPrivateFloorBytes);
    needed.gradient_bytes = declared.needed(durability_, arena_bytes, 0).gradient_bytes;
  }
  return check(declared, wanted, needed);
}

void Admission::add_snapshots(const SnapshotSpace& more) {
  parts_.space.add_snapshots(more);
  reserve_metadata();
}

void Admission::remove_snapshots(const SnapshotSpace& less) {
  parts_.space.remove_snapshots(less);
  reserve_metadata();
}

Status Admission::check(const DeclaredSpace& wanted,
                        const SnapshotSpace& snapshots,
                        const SpaceNeeded& needed) const {
  if (needed.total() > parts_.space.quota_bytes()) {
    return error(StatusCode::capacity,
                 "job ",
                 parts_.job_name,
                 " would need more than its disk quota; declare less, drop snapshots (memd "
                 "snapshot list), or start it anew with a larger nvme_bytes: ",
                 needed.total(),
                 " bytes = ",
                 needed.text(),
                 "; nvme_bytes ",
                 parts_.space.quota_bytes());
  }
  // Records lie outside the pool: each job has room for a model of some ten thousand shards, and
  // more where it was admitted to more memory.
  const uint64_t memory_bytes_max = kRecordMemoryBytesMin + host_bytes_ / 2;
  const uint64_t memory_bytes = wanted.memory_bytes() + snapshots.memory_bytes;
  if (memory_bytes > memory_bytes_max) {
    return error(StatusCode::capacity,
                 "job ",
                 parts_.job_name,
                 " would have more shards, with those of its snapshots, than the daemon keeps "
                 "records of; make fewer and larger ones, drop snapshots, or start it anew with a "
                 "larger host_bytes: ",
                 memory_bytes,
                 " bytes of records, at most ",
                 kRecordMemoryBytesMin,
                 " + half of host_bytes (",
                 host_bytes_,
                 ")");
  }
  const uint64_t more_bytes = memory_bytes - std::min(memory_bytes,
                                                      parts_.shards.declared().memory_bytes() +
                                                          parts_.space.snapshots().memory_bytes);
  if (!can_allocate(more_bytes)) {
    return error(StatusCode::capacity,
                 "job ",
                 parts_.job_name,
                 ": the daemon has no memory for records of these shards; declare fewer, or give "
                 "its process more: ",
                 more_bytes,
                 " bytes");
  }
  return Status::ok();
}

Status Admission::check_maxima(const Bucket& bucket) const {
  DeclaredSpace wanted = parts_.shards.declared();
  if (!bucket.is_updated) wanted.begin_updates(bucket.dtype, bucket.element_count);
  wanted.begin_maxima(bucket.dtype, bucket.element_count);
  return check(wanted);
}

SpaceNeeded Admission::space_needed(const DeclaredSpace& declared,
                                    const SnapshotSpace& snapshots) const {
  SpaceNeeded needed = declared.needed(durability_, arena_bytes_max(), kTilesInFlight);
  needed.catalogue_bytes = 2 * catalogue_bytes(declared);
  needed.snapshot_bytes = snapshots.bytes;
  return needed;
}

SpaceNeeded Admission::space_needed() const {
  return space_needed(parts_.shards.declared(), parts_.space.snapshots());
}

uint64_t Admission::metadata_bytes() const {
  // After shards were deleted, the one on disk may be larger than the next.
  const uint64_t next_bytes = catalogue_bytes(parts_.shards.declared());
  return next_bytes + std::max(next_bytes, parts_.durable.catalogue_bytes_max());
}

void Admission::reserve_metadata() {
  const bool is_within = space_needed().total() <= parts_.space.quota_bytes();
  parts_.space.set_metadata_bytes(is_within ? metadata_bytes() : 0);
}

uint64_t Admission::catalogue_bytes(const DeclaredSpace& declared) const {
  const uint64_t bytes = kJobRecordBytes + parts_.job_name.size() + declared.catalogue_bytes();
  return align_up(bytes, kBlockBytes);
}

void Admission::begin_updates(Bucket& bucket, bool with_maxima) {
  if (parts_.shards.begin_updates(bucket, with_maxima)) reserve_metadata();
}

bool Admission::gradients_fit() const {
  if (parts_.memory == nullptr) return true;
  const ShardSums& sums = parts_.shards.sums();
  return sums.gradient_bytes() + sums.largest_gradient_bytes() <= parts_.memory->arena_bytes_max();
}

}  // namespace memd
