#include "store/step/step_space.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

namespace memd {
namespace {

constexpr size_t kTilesLookedAtMax = 16;  // in one turn: some 2 µs

}  // namespace

void StepSpace::take_speculative(uint64_t session_id) {
  const auto settings = [this](uint32_t shard_id) { return shards_.settings_of(shard_id); };
  for (const uint32_t index : shards_.buckets()) {
    auto made = parts_.state.early().take(index, session_id, settings);
    if (made != nullptr) speculative_[index] = std::move(made);
  }
}

void StepSpace::promise(Done done) {
  count_need(std::make_shared<Need>(), [this, done = std::move(done)](uint64_t needed_bytes) {
    const Status room = try_promise(needed_bytes);
    if (room.is_ok() || speculative_.empty()) return done(room);
    for (auto& [bucket, made] : std::exchange(speculative_, {})) {
      parts_.state.early().give_back(*made, EarlyDiscard::failed);
    }
    promise(done);
  });
}

std::shared_ptr<SpeculativeBucket> StepSpace::take(uint32_t bucket) {
  const auto made = speculative_.extract(bucket);
  return made.empty() ? nullptr : made.mapped();
}

void StepSpace::begin_update() const { parts_.job.space.begin_update(); }

void StepSpace::roll_back() const { parts_.job.space.roll_back(parts_.job.extents); }

void StepSpace::end() const {
  parts_.job.space.end_update();
  parts_.job.space.end_promise();
}

Status StepSpace::try_promise(uint64_t needed_bytes) const {
  const StateParts& job = parts_.job;
  // Speculative tiles of other buckets give up what this step needs.
  while (!job.space.has_room(SpaceUse::state, needed_bytes) &&
         parts_.state.early().free_extents()) {
  }
  job.space.promise(needed_bytes);
  // A step that an earlier daemon began had its room then.
  if (job.tiles.has_made() || job.space.has_room(SpaceUse::state, needed_bytes))
    return Status::ok();
  return error(StatusCode::capacity,
               "job ",
               job.job_name,
               " has no room on disk for its next step; sync, so that what the last commit on disk "
               "holds becomes free, or start it anew with a larger nvme_bytes: ",
               job.space.used_bytes(),
               " of ",
               job.space.quota_bytes(),
               " bytes used, ",
               needed_bytes,
               " more needed")
      .about({"nvme_bytes", job.space.quota_bytes()});
}

struct StepSpace::Need {
  uint64_t key_next = 0;
  uint64_t bytes = 0;
  uint64_t replaced_count = 0;
  uint64_t replaced_bytes_max = 0;
};

void StepSpace::count_need(const std::shared_ptr<Need>& need,
                           std::function<void(uint64_t)> then) const {
  for (size_t count = 0; count < kTilesLookedAtMax; ++count) {
    const auto key = next_tile(need->key_next);
    if (!key) {
      const uint64_t at_once = std::min<uint64_t>(need->replaced_count, kTilesInFlight);
      return then(need->bytes + at_once * need->replaced_bytes_max);
    }
    add_tile(*key, *need);
    need->key_next = *key + 1;
  }
  parts_.job.conditions.go_on(
      [this, need, then = std::move(then)]() mutable { count_need(need, std::move(then)); });
}

std::optional<uint64_t> StepSpace::next_tile(uint64_t key) const {
  const auto dirty = parts_.job.tiles.next_dirty(key);
  const std::set<uint32_t>& buckets = shards_.buckets();
  for (auto at = buckets.lower_bound(bucket_of(key)); at != buckets.end(); ++at) {
    const uint64_t own = std::max(key, tile_key(*at, 0));
    if (tile_of(own) >= parts_.job.shards.bucket(*at).tile_count()) continue;
    return dirty ? std::min(own, dirty->key) : own;
  }
  return dirty ? std::optional(dirty->key) : std::nullopt;
}

void StepSpace::add_tile(uint64_t key, Need& needed) const {
  const StateParts& job = parts_.job;
  const Bucket& bucket = job.shards.bucket(bucket_of(key));
  const uint32_t tile = tile_of(key);
  // It stays in its place.
  if (bucket.is_host()) return;
  // It has its new extents already.
  const auto made = speculative_.find(bucket_of(key));
  if (made != speculative_.end() && made->second->tiles[tile]) return;
  bool is_replaced = job.tiles.is_dirty(key);
  const auto need = [&](const Replica& replica, uint64_t bytes) {
    const bool is_own = replica.exists() && !job.space.is_referenced(replica);
    is_replaced = is_replaced || is_own;
    if (!is_own) needed.bytes += bytes;
    return bytes;
  };
  const uint64_t bytes = need(bucket.value->replicas()[tile], bucket.value->replica_bytes(tile)) +
                         need(bucket.rest[tile], bucket.rest_bytes(tile));
  // The new extents come before the old ones go, one tile after the other.
  if (!is_replaced) return;
  ++needed.replaced_count;
  needed.replaced_bytes_max = std::max(needed.replaced_bytes_max, bytes);
}

}  // namespace memd
