#include "store/verify/extent_walk.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace memd {
namespace {

// Places looked at in one turn: most of a job without durability are named by no catalogue, and
// leases are not to wait for the walk over them.
constexpr int kPlacesInTurn = 1000;

using Kind = ExtentPlace::Kind;

/// Commits name its extents.
bool is_named(const Entry& entry) { return entry.kind() == EntryKind::bytes && !is_scratch(entry); }

size_t owner_count_in(const Snapshot& snapshot, Kind kind) {
  if (snapshot.record == nullptr) return 0;
  return kind == Kind::bytes ? snapshot.record->shards.size() : snapshot.record->buckets.size();
}

size_t index_count_in(const Snapshot& snapshot, const ExtentPlace& place) {
  if (place.kind == Kind::catalogue) return snapshot.entry.job.catalogue.size();
  return place.kind == Kind::bytes ? snapshot.record->shards[place.owner].extents.size()
                                   : snapshot.record->buckets[place.owner].tiles.size();
}

std::optional<ExtentRecord> extent_in(const Snapshot& snapshot, const ExtentPlace& place) {
  if (place.kind == Kind::catalogue) return snapshot.entry.job.catalogue[place.index];
  const JobRecord& record = *snapshot.record;
  if (place.kind == Kind::bytes) return record.shards[place.owner].extents[place.index];
  const TileRecord& tile = record.buckets[place.owner].tiles[place.index];
  const ExtentRecord& extent = place.kind == Kind::parameter ? tile.parameter : tile.rest;
  return extent.exists() ? std::optional(extent) : std::nullopt;
}

std::vector<std::string> shards_in(const Snapshot& snapshot, const ExtentPlace& place) {
  const JobRecord& record = *snapshot.record;
  if (place.kind == Kind::bytes) return {record.shards[place.owner].name};
  return names_in_tile(record, static_cast<uint32_t>(place.owner), place.index);
}

}  // namespace

const Snapshot* ExtentPlaces::snapshot(const ExtentPlace& place) const {
  const Snapshot* const found = snapshots_.find(place.snapshot_id);
  return found == nullptr || found->is_ending ? nullptr : found;
}

size_t ExtentPlaces::owner_count(const ExtentPlace& place) const {
  if (place.kind == Kind::catalogue) return 1;
  if (place.snapshot_id != 0) {
    const Snapshot* const found = snapshot(place);
    return found == nullptr ? 0 : owner_count_in(*found, place.kind);
  }
  const auto job = jobs_.verified(place.job_id);
  if (!job) return 0;
  if (place.kind == Kind::bytes) return job->shards.entries().size();
  // Extents on disk of a job without durability are nobody's.
  return job->durable.undurable_since() != 0 ? 0 : job->durable.bucket_count();
}

size_t ExtentPlaces::index_count(const ExtentPlace& place) const {
  if (place.owner >= owner_count(place)) return 0;
  if (place.snapshot_id != 0) {
    const Snapshot* const found = snapshot(place);
    return found == nullptr ? 0 : index_count_in(*found, place);
  }
  if (place.kind == Kind::catalogue) return commits_.catalogue(place.job_id).size();
  const VerifiedJob job = *jobs_.verified(place.job_id);
  if (place.kind != Kind::bytes) return job.durable.tile_count(place.owner);
  const Entry* const entry = job.shards.entry(place.owner);
  return entry == nullptr || !is_named(*entry) ? 0 : entry->replicas().size();
}

std::optional<ExtentRecord> ExtentPlaces::find(const ExtentPlace& place) const {
  if (place.index >= index_count(place)) return std::nullopt;
  if (place.snapshot_id != 0) return extent_in(*snapshot(place), place);
  if (place.kind == Kind::catalogue) return commits_.catalogue(place.job_id)[place.index];
  const VerifiedJob job = *jobs_.verified(place.job_id);
  if (place.kind == Kind::bytes) {
    const Replica& replica = job.shards.entry(place.owner)->replicas()[place.index];
    if (!job.space.is_referenced(replica) || !replica.exists()) return std::nullopt;
    return replica.extent();
  }
  const TileRecord tile = job.durable.tile(place.owner, place.index);
  const ExtentRecord& extent = place.kind == Kind::parameter ? tile.parameter : tile.rest;
  return extent.exists() ? std::optional(extent) : std::nullopt;
}

bool ExtentPlaces::names(const ExtentPlace& place, const ExtentRecord& extent) const {
  const auto now = find(place);
  return now == extent;
}

const Entry& ExtentPlaces::entry(const VerifiedJob& job, const ExtentPlace& place) {
  return place.kind == Kind::bytes ? *job.shards.entry(place.owner)
                                   : *job.shards.bucket(place.owner).value;
}

bool ExtentPlaces::is_being_replaced(const ExtentPlace& place) const {
  if (place.kind == Kind::catalogue || place.snapshot_id != 0) return false;
  const VerifiedJob job = *jobs_.verified(place.job_id);
  const Entry& value = entry(job, place);
  // The step has what it replaces in memory, or finds itself that it cannot be read.
  if (value.is_in_step()) return true;
  if (place.kind != Kind::bytes) {
    const Replica& now = place.kind == Kind::rest ? job.shards.bucket(place.owner).rest[place.index]
                                                  : value.replicas()[place.index];
    const bool is_dirty = job.tiles.is_dirty(tile_key(value.owner(), place.index));
    if (now.extent() != *find(place) || is_dirty) return true;
  }
  return place.kind != Kind::rest &&
         (value.residency() == Residency::dirty || value.residency() == Residency::draining);
}

std::string ExtentPlaces::snapshot_name(const ExtentPlace& place) const {
  const Snapshot* const found = snapshot(place);
  return found == nullptr ? "" : found->entry.name;
}

uint64_t ExtentPlaces::next_snapshot(uint64_t job_id, uint64_t snapshot_id) const {
  for (const Snapshot* const each : snapshots_.of_job(job_id)) {
    if (each->id > snapshot_id) return each->id;
  }
  return 0;
}

std::string ExtentPlaces::part(const ExtentPlace& place) const {
  if (place.kind == Kind::catalogue && place.snapshot_id != 0) return "the snapshot's catalogue";
  switch (place.kind) {
    case Kind::catalogue:
      return place.job_id == 0 ? "the list of jobs" : concat("the catalogue of job ", place.job_id);
    case Kind::bytes:
      return concat("bytes from ", place.index * uint64_t{kBlobExtentBytes});
    case Kind::parameter:
      return concat("parameter of tile ", place.index);
    case Kind::rest:
      return concat("optimizer state of tile ", place.index);
  }
  return "";
}

std::string ExtentPlaces::describe(const ExtentPlace& place) const {
  if (place.snapshot_id != 0) {
    std::string names;
    for (const std::string& name : shards(place)) names += (names.empty() ? "" : ", ") + name;
    return concat(
        "snapshot ", snapshot_name(place), ", ", names, names.empty() ? "" : ", ", part(place));
  }
  if (place.kind == Kind::catalogue) return part(place);
  const VerifiedJob job = *jobs_.verified(place.job_id);
  const std::string shard = job.shards.describe(entry(job, place), place.index);
  return place.kind == Kind::bytes ? concat("shard ", shard)
                                   : concat("shard ", shard, ", ", part(place));
}

std::vector<std::string> ExtentPlaces::shards(const ExtentPlace& place) const {
  if (place.kind == Kind::catalogue) return {};
  if (place.snapshot_id != 0) return shards_in(*snapshot(place), place);
  const VerifiedJob job = *jobs_.verified(place.job_id);
  std::vector<std::string> names;
  for (const uint32_t shard_id : job.shards.shards_in(entry(job, place), place.index))
    names.emplace_back(job.shards[shard_id].name());
  return names;
}

void ExtentPlaces::lose(const ExtentPlace& place, const Status& why) const {
  if (place.snapshot_id != 0) return snapshots_.lose(place.snapshot_id, shards(place));
  if (place.kind == Kind::catalogue) return;
  const VerifiedJob job = *jobs_.verified(place.job_id);
  jobs_.lose(place.job_id, entry(job, place), place.index, why);
}

uint64_t ExtentPlaces::state_bytes(uint64_t job_id) const {
  const auto job = jobs_.verified(job_id);
  if (!job) return 0;
  uint64_t bytes = 0;
  for (const Snapshot* const each : snapshots_.of_job(job_id)) {
    bytes += each->space.bytes;
    for (const ExtentRecord& extent : each->entry.job.catalogue) bytes -= extent.length_bytes;
  }
  for (const Entry* const each : job->shards.entries()) {
    if (each == nullptr || !is_named(*each)) continue;
    for (const Replica& replica : each->replicas()) {
      if (job->space.is_referenced(replica)) bytes += replica.length_bytes();
    }
  }
  const DurableJob& durable = job->durable;
  if (durable.undurable_since() != 0) return bytes;
  for (size_t bucket = 0; bucket < durable.bucket_count(); ++bucket) {
    for (size_t index = 0; index < durable.tile_count(bucket); ++index) {
      const TileRecord tile = durable.tile(bucket, index);
      bytes += tile.parameter.length_bytes + tile.rest.length_bytes;
    }
  }
  return bytes;
}

void ExtentWalk::begin(std::optional<std::set<uint64_t>> only) {
  only_ = std::move(only);
  cursor_ = {};
  at_end_ = false;
  // If the root is not asked for, the first job is met at the end of this empty place.
  if (only_) cursor_.index = std::numeric_limits<size_t>::max() - 1;
}

std::optional<ExtentWalk::Found> ExtentWalk::next() {
  for (int looked = 0; looked < kPlacesInTurn && !at_end_; ++looked) {
    const ExtentPlace place = cursor_;
    const auto extent = places_.find(place);
    at_end_ = !go_on();
    if (extent) return Found{.place = place, .extent = *extent};
  }
  return std::nullopt;
}

/// Within its owner, else to the next owner, kind or job.
bool ExtentWalk::go_on() {
  if (++cursor_.index < places_.index_count(cursor_)) return true;
  cursor_.index = 0;
  if (++cursor_.owner < places_.owner_count(cursor_)) return true;
  cursor_.owner = 0;
  if (cursor_.job_id != 0 && cursor_.kind != Kind::rest) {
    cursor_.kind = static_cast<Kind>(static_cast<uint8_t>(cursor_.kind) + 1);
    return true;
  }
  cursor_.kind = Kind::catalogue;
  cursor_.snapshot_id = places_.next_snapshot(cursor_.job_id, cursor_.snapshot_id);
  if (cursor_.snapshot_id != 0) return true;
  uint64_t next = std::numeric_limits<uint64_t>::max();
  for (const uint64_t job_id : places_.jobs().ids()) {
    const bool is_asked_for = !only_ || only_->contains(job_id);
    if (is_asked_for && job_id > cursor_.job_id) next = std::min(next, job_id);
  }
  if (next == std::numeric_limits<uint64_t>::max()) return false;
  cursor_.job_id = next;
  return true;
}

}  // namespace memd
