#include "store/state/admission.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

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
  set_durability(Durability::of_code(record.durability));
  weight_ = JobWeight::of_code(record.weight);
  host_bytes_ = record.host_bytes;
  parts_.space.set_quota_bytes(record.nvme_bytes);
}

void Admission::write(JobRecord& record) const {
  record.host_bytes = host_bytes_;
  record.nvme_bytes = parts_.space.quota_bytes();
  record.durability = durability_asked_.code();
  record.weight = weight_.code();
}

void Admission::take_terms(const Admission& other) {
  JobRecord terms;
  other.write(terms);
  restore(terms);
  reserve_metadata();
}

void Admission::settle_host_tier() {
  const bool has_any = parts_.shards.declared().has_host_tier();
  durability_ = has_any ? Durability::of_code(Durability::kNone) : durability_asked_;
  std::vector<uint64_t> steps;
  if (has_any) {
    for (const KeptStep& each : parts_.space.snapshots().steps) steps.push_back(each.step);
  }
  parts_.progress.set_snapshot_steps(std::move(steps));
}

void Admission::set_weight(JobWeight weight) {
  weight_ = weight;
  parts_.durable.note_change();
  parts_.journal.note_terms();
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
    const uint64_t kept_bytes =
        kPrivateFloorBytes + host_needed(declared, kBlockBytes).host_side_bytes();
    const uint64_t arena_bytes = host_bytes_ - std::min(host_bytes_, kept_bytes);
    needed.gradient_bytes = declared.needed(durability_, arena_bytes, 0).gradient_bytes;
  }
  return check(declared, wanted, needed);
}

Status Admission::check_next_snapshot() const {
  const DeclaredSpace& declared = parts_.shards.declared();
  const SpaceNeeded once = declared.needed(durability_, arena_bytes_max(), 0);
  return check_snapshots({.count = 1,
                          .bytes = once.updated_once_bytes + once.kept_value_bytes +
                                   once.blob_bytes + declared.host_tier_bytes() +
                                   catalogue_bytes(declared),
                          .memory_bytes = 0,
                          .steps = {}});
}

void Admission::add_snapshots(const SnapshotSpace& more) {
  parts_.space.add_snapshots(more);
  settle_host_tier();
  reserve_metadata();
}

void Admission::remove_snapshots(const SnapshotSpace& less) {
  parts_.space.remove_snapshots(less);
  settle_host_tier();
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
                 parts_.space.quota_bytes())
        .about({"nvme_bytes", parts_.space.quota_bytes()});
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

// Places are given and taken in turn, so that beside all of them two find room.
uint64_t HostNeeded::host_side_bytes() const {
  return align_up(state_bytes + place_bytes, segment_bytes);
}

std::string HostNeeded::text() const {
  return concat(total_bytes(),
                " bytes = ",
                host_side_bytes(),
                " (parameters of tier host and their optimizer state, ",
                state_bytes,
                ", and places for two more tiles, in whole segments) + ",
                window_bytes,
                " (the largest parameter and its gradient) + ",
                floor_bytes,
                " (tiles in work)");
}

bool HostNeeded::fits(const JobMemory& memory) const {
  return total_bytes() <= memory.bytes() && host_side_bytes() <= memory.host_bytes_max();
}

HostNeeded Admission::host_needed(const DeclaredSpace& declared, uint64_t segment_bytes) {
  if (declared.host_tier_bytes() == 0) return {.segment_bytes = segment_bytes};
  return {.state_bytes = declared.host_tier_bytes(),
          .place_bytes = 2 * declared.host_tile_bytes_max(),
          .window_bytes = align_up(2 * declared.value_bytes_max(), segment_bytes),
          .floor_bytes = align_up(kPrivateFloorBytes, segment_bytes),
          .segment_bytes = segment_bytes};
}

void Admission::add_state(DeclaredSpace& wanted, const Bucket& bucket, bool with_maxima) {
  if (!bucket.is_updated) wanted.begin_updates(bucket.dtype, bucket.element_count, bucket.tier);
  if (with_maxima && !bucket.needs_maxima)
    wanted.begin_maxima(bucket.dtype, bucket.element_count, bucket.tier);
}

Status Admission::make_room_for_state(const Bucket& bucket, bool with_maxima) const {
  DeclaredSpace wanted = parts_.shards.declared();
  add_state(wanted, bucket, with_maxima);
  return make_room(wanted);
}

uint64_t Admission::bytes_of_maxima(const std::set<uint32_t>& buckets) const {
  DeclaredSpace wanted = parts_.shards.declared();
  for (const uint32_t index : buckets) add_state(wanted, parts_.shards.bucket(index), true);
  const uint64_t now_bytes = space_needed().total();
  const uint64_t wanted_bytes = space_needed(wanted, parts_.space.snapshots()).total();
  return wanted_bytes - std::min(wanted_bytes, now_bytes);
}

Status Admission::make_room(const DeclaredSpace& wanted) const {
  if (Status room = check(wanted); !room.is_ok()) return room;
  return reserve_host(wanted);
}

Status Admission::reserve_host(const DeclaredSpace& wanted) const {
  JobMemory* const memory = parts_.memory.get();
  if (memory == nullptr) return Status::ok();
  const HostNeeded needed = host_needed(wanted, memory->segment_bytes());
  const bool is_within = needed.total_bytes() <= memory->bytes();
  if (is_within && memory->reserve_host(needed.host_side_bytes())) return Status::ok();
  return error(StatusCode::capacity,
               "job ",
               parts_.job_name,
               is_within ? " keeps other shards where tier host would live; declare that first, or "
                           "start it anew with a larger host_bytes: "
                         : " would need more than its host quota; keep less in tier host, or start "
                           "it anew with a larger host_bytes: ",
               needed.text(),
               "; host_bytes ",
               memory->bytes(),
               ", free for tier host ",
               memory->host_bytes_max())
      .about({"host_bytes", memory->bytes()});
}

SpaceNeeded Admission::space_needed(const DeclaredSpace& declared,
                                    const SnapshotSpace& snapshots) const {
  SpaceNeeded needed = declared.needed(durability_, arena_bytes_beside(declared), kTilesInFlight);
  needed.catalogue_bytes = 2 * catalogue_bytes(declared);
  // While something is loaded no step needs a second copy: the job from before has that room. Two
  // parts of a tile may be loaded with a commit between them.
  const uint64_t second_copy_bytes = (needed.copies - 1) * needed.updated_once_bytes;
  if (snapshots.load_bytes != 0) needed.replaced_bytes = declared.replaced_bytes(kTilesInFlight);
  needed.snapshot_bytes = snapshots.bytes - std::min(snapshots.load_bytes, second_copy_bytes);
  // The job too has bytes that a snapshot wrote, until a step changes them: also of one that was
  // dropped.
  if (snapshots.count != 0 || parts_.space.has_host_extents())
    needed.host_tier_bytes = declared.host_tier_bytes();
  return needed;
}

uint64_t Admission::arena_bytes_beside(const DeclaredSpace& declared) const {
  if (parts_.memory == nullptr) return arena_bytes_max();
  const uint64_t host_bytes =
      host_needed(declared, parts_.memory->segment_bytes()).host_side_bytes();
  const uint64_t more_bytes =
      host_bytes - std::min(host_bytes, parts_.memory->host_side().capacity_bytes());
  return arena_bytes_max() - std::min(arena_bytes_max(), more_bytes);
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
