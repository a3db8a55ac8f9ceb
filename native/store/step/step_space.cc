#include "store/step/step_space.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>
#include <vector>

namespace memd {

void StepSpace::take_speculative(uint64_t session_id) {
  const auto settings = [this](uint32_t shard_id) { return shards_.settings_of(shard_id); };
  for (const uint32_t index : shards_.buckets()) {
    auto made = parts_.state.early().take(index, session_id, settings);
    if (made != nullptr) speculative_[index] = std::move(made);
  }
}

Status StepSpace::promise() {
  Status room = try_promise();
  if (room.is_ok() || speculative_.empty()) return room;
  for (auto& [bucket, made] : std::exchange(speculative_, {})) {
    parts_.state.early().give_back(*made, EarlyDiscard::failed);
  }
  return try_promise();
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

Status StepSpace::try_promise() const {
  const StateParts& job = parts_.job;
  const uint64_t needed_bytes = bytes_needed();
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
               "holds becomes free, or raise nvme_bytes: ",
               job.space.used_bytes(),
               " of ",
               job.space.quota_bytes(),
               " bytes used, ",
               needed_bytes,
               " more needed");
}

uint64_t StepSpace::bytes_needed() const {
  const StateParts& job = parts_.job;
  const std::vector<uint64_t> dirty_keys = job.tiles.dirty_keys();
  std::set<uint64_t> keys(dirty_keys.begin(), dirty_keys.end());
  for (const uint32_t index : shards_.buckets()) {
    for (size_t tile = 0; tile < job.shards.bucket(index).tile_count(); ++tile)
      keys.insert(tile_key(index, tile));
  }
  uint64_t needed_bytes = 0;
  uint64_t replaced_count = 0;
  uint64_t replaced_bytes_max = 0;
  for (const uint64_t key : keys) {
    const Bucket& bucket = job.shards.bucket(bucket_of(key));
    const uint32_t tile = tile_of(key);
    // It has its new extents already.
    const auto made = speculative_.find(bucket_of(key));
    if (made != speculative_.end() && made->second->tiles[tile]) continue;
    bool is_replaced = job.tiles.is_dirty(key);
    const auto need = [&](const Replica& replica, uint64_t bytes) {
      const bool is_own = replica.exists() && !job.space.is_referenced(replica);
      is_replaced = is_replaced || is_own;
      if (!is_own) needed_bytes += bytes;
      return bytes;
    };
    const uint64_t bytes = need(bucket.value->replicas()[tile], bucket.value->replica_bytes(tile)) +
                           need(bucket.rest[tile], bucket.rest_bytes(tile));
    // The new extents come before the old ones go, one tile after the other.
    if (!is_replaced) continue;
    ++replaced_count;
    replaced_bytes_max = std::max(replaced_bytes_max, bytes);
  }
  return needed_bytes + std::min<uint64_t>(replaced_count, kTilesInFlight) * replaced_bytes_max;
}

}  // namespace memd
