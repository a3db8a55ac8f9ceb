#include "store/verify/extent_walk.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace memd {
namespace {

// Places looked at in one turn: most of a job without durability are named by no catalogue, and
// leases are not to wait for the walk over them.
constexpr int kPlacesInTurn = 1000;

bool same(const ExtentRecord& a, const ExtentRecord& b) {
  return a.address.device == b.address.device && a.address.offset_bytes == b.address.offset_bytes &&
         a.length_bytes == b.length_bytes && a.checksum == b.checksum;
}

using Kind = ExtentPlace::Kind;

}  // namespace

size_t ExtentPlaces::owner_count(const ExtentPlace& place) const {
  if (place.kind == Kind::catalogue) return 1;
  const auto job = jobs_.verified(place.job_id);
  if (!job) return 0;
  if (place.kind == Kind::bytes) return job->shards.entries().size();
  // Extents on disk of a job without durability are nobody's.
  return job->durable.undurable_since() != 0 ? 0 : job->durable.bucket_count();
}

size_t ExtentPlaces::index_count(const ExtentPlace& place) const {
  if (place.owner >= owner_count(place)) return 0;
  if (place.kind == Kind::catalogue) return commits_.catalogue(place.job_id).size();
  const VerifiedJob job = *jobs_.verified(place.job_id);
  if (place.kind != Kind::bytes) return job.durable.tile_count(place.owner);
  const Entry* const entry = job.shards.entry(place.owner);
  return entry == nullptr || entry->kind() != EntryKind::bytes ? 0 : entry->replicas().size();
}

std::optional<ExtentRecord> ExtentPlaces::find(const ExtentPlace& place) const {
  if (place.index >= index_count(place)) return std::nullopt;
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
  return now && same(*now, extent);
}

const Entry& ExtentPlaces::entry(const VerifiedJob& job, const ExtentPlace& place) {
  return place.kind == Kind::bytes ? *job.shards.entry(place.owner)
                                   : *job.shards.bucket(place.owner).value;
}

bool ExtentPlaces::is_being_replaced(const ExtentPlace& place) const {
  if (place.kind == Kind::catalogue) return false;
  const VerifiedJob job = *jobs_.verified(place.job_id);
  const Entry& value = entry(job, place);
  // The step has what it replaces in memory, or finds itself that it cannot be read.
  if (value.is_in_step()) return true;
  if (place.kind != Kind::bytes) {
    const Replica& now = place.kind == Kind::rest ? job.shards.bucket(place.owner).rest[place.index]
                                                  : value.replicas()[place.index];
    const bool is_dirty = job.tiles.is_dirty(tile_key(value.owner(), place.index));
    if (!same(now.extent(), *find(place)) || is_dirty) return true;
  }
  return place.kind != Kind::rest &&
         (value.residency() == Residency::dirty || value.residency() == Residency::draining);
}

std::string ExtentPlaces::part(const ExtentPlace& place) const {
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
  if (place.kind == Kind::catalogue) return part(place);
  const VerifiedJob job = *jobs_.verified(place.job_id);
  const std::string shard = job.shards.describe(entry(job, place), place.index);
  return place.kind == Kind::bytes ? concat("shard ", shard)
                                   : concat("shard ", shard, ", ", part(place));
}

std::vector<std::string> ExtentPlaces::shards(const ExtentPlace& place) const {
  if (place.kind == Kind::catalogue) return {};
  const VerifiedJob job = *jobs_.verified(place.job_id);
  return job.shards.names_in(entry(job, place), place.index);
}

void ExtentPlaces::lose(const ExtentPlace& place, const Status& why) const {
  if (place.kind == Kind::catalogue) return;
  const VerifiedJob job = *jobs_.verified(place.job_id);
  jobs_.lose(place.job_id, entry(job, place), place.index, why);
}

uint64_t ExtentPlaces::state_bytes(uint64_t job_id) const {
  const auto job = jobs_.verified(job_id);
  if (!job) return 0;
  uint64_t bytes = 0;
  for (const Entry* const each : job->shards.entries()) {
    if (each == nullptr || each->kind() != EntryKind::bytes) continue;
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
