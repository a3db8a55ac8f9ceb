#include "store/state/early_updates.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/state/tile_update.h"

namespace memd {
namespace {

// Half of what a job may have in flight: spills and fetches, which somebody waits for, share the
// tasks' queue with what nobody does.
constexpr uint32_t kEarlyTilesInFlight = kTilesInFlight / 2;

bool is_moving(const Entry& entry) {
  return entry.task_count() != 0 || entry.residency() == Residency::filling ||
         entry.residency() == Residency::draining;
}

}  // namespace

Status EarlyUpdates::expect(uint64_t session_id, const std::vector<StepGroup>& groups) {
  for (const StepGroup& group : groups) {
    for (const uint32_t shard_id : group.shard_ids) {
      if (parts_.shards.find_entry(shard_id, Part::gradient) != nullptr) continue;
      return error(StatusCode::not_found,
                   "job ",
                   parts_.job_name,
                   " has no parameter with shard id ",
                   shard_id);
    }
  }
  auto& expected = expected_[session_id];
  for (const StepGroup& group : groups) {
    for (const uint32_t shard_id : group.shard_ids) expected[shard_id] = group.settings;
  }
  return Status::ok();
}

void EarlyUpdates::gradient_is_final(uint64_t session_id, uint32_t shard_id) {
  const Entry* const gradient = parts_.shards.find_entry(shard_id, Part::gradient);
  if (gradient == nullptr) return;
  const Shard& shard = parts_.shards[shard_id];
  // The hint may come after the step that took the gradient, or after who dropped it.
  if (shard.contributors.only() != session_id) return;
  const bool is_written = gradient->slot() != nullptr &&
                          parts_.slots.pins(*gradient->slot(), shard.index_in_bucket).has_writers();
  if (is_written || !final_shards_.insert(shard_id).second) return;
  const uint32_t count = ++final_counts_[shard.bucket];
  if (count == parts_.shards.bucket(shard.bucket).shards.size()) ready_.push_back(shard.bucket);
}

// ---- Making -------------------------------------------------------------------------------------

uint64_t EarlyUpdates::session_of(const Bucket& bucket) const {
  return parts_.shards[bucket.shards.front()].contributors.only();
}

EarlyUpdates::Begin EarlyUpdates::check(const Bucket& bucket) const {
  const uint64_t session_id = session_of(bucket);
  const auto expected = expected_.find(session_id);
  if (expected == expected_.end()) return Begin::never;
  for (const uint32_t id : bucket.shards) {
    const Shard& shard = parts_.shards[id];
    const bool is_known = shard.written && shard.contributors.only() == session_id &&
                          expected->second.contains(id) && final_shards_.contains(id);
    if (!is_known) return Begin::never;
    // The step makes a place for the maximum, or is refused.
    const bool has_maximum = shard.keeps_maximum && bucket.keeps_maxima;
    if (expected->second.at(id).amsgrad && !has_maximum) return Begin::never;
  }
  const Entry& value = *bucket.value;
  const Entry& gradient = *bucket.gradient;
  // The step first merges what the user wrote with the disk.
  if (value.bytes() == 0 || value.residency() == Residency::dirty) return Begin::never;
  if (is_moving(value) || is_moving(gradient)) return Begin::later;
  return gradient.is_resident() || gradient.has_replica() ? Begin::now : Begin::never;
}

// N of a tile in memory alone cannot be returned to. And where commits are in memory, no step
// writes a tile that would stay there: made ahead of the step it would be written every time.
bool EarlyUpdates::is_left_to_the_step(const Bucket& bucket, size_t tile) const {
  const uint64_t key = tile_key(bucket.value->owner(), tile);
  if (bucket.is_host()) return true;
  if (parts_.tiles.is_dirty(key) || !bucket.value->replicas()[tile].exists()) return true;
  if (!parts_.admission.durability().is_in_memory()) return false;
  if (parts_.tiles.contains(key)) return true;
  const JobMemory& memory = *parts_.memory;
  const uint64_t with_it_bytes =
      tasks_.kept_bytes() + bucket.value->replica_bytes(tile) + bucket.rest_bytes(tile);
  return with_it_bytes + memory.working_bytes() <= memory.private_bytes_max();
}

// Room on disk that spilled gradients may need is not taken, nor what the step needs for the tiles
// that are left to it: without it all would be thrown away and made again.
bool EarlyUpdates::has_quota(const Bucket& bucket, size_t tile) const {
  // More where a tile of the job has maxima.
  const uint64_t state_bytes_max =
      std::max(kTileStateBytesMax, parts_.shards.declared().tile_bytes_max());
  uint64_t wanted_bytes = bucket.value->replica_bytes(tile) + bucket.rest_bytes(tile);
  // Those that were begun may have taken nothing yet.
  wanted_bytes += running_count_ * state_bytes_max;
  wanted_bytes += parts_.admission.gradient_bytes_to_spill();
  if (parts_.admission.durability().is_in_memory())
    wanted_bytes += kTilesInFlight * state_bytes_max;
  return parts_.space.has_room(SpaceUse::gradient, wanted_bytes);
}

bool EarlyUpdates::advance() {
  const bool may_begin = parts_.progress.stopped().is_ok() && parts_.lost.count() == 0 &&
                         !parts_.tiles.has_made() && parts_.extents.broken().is_ok();
  if (!may_begin) return false;
  const size_t running_before_count = running_count_;
  for (auto at = ready_.begin(); at != ready_.end() && running_count_ < kEarlyTilesInFlight;) {
    if (!advance_bucket(at)) break;
  }
  return running_count_ > running_before_count;
}

bool EarlyUpdates::advance_bucket(std::deque<uint32_t>::iterator& at) {
  Bucket& bucket = parts_.shards.bucket(*at);
  const auto found = by_bucket_.find(*at);
  std::shared_ptr<SpeculativeBucket> made = found != by_bucket_.end() ? found->second : nullptr;
  if (made == nullptr) {
    const Begin when = check(bucket);
    if (when != Begin::now) {
      at = when == Begin::later ? at + 1 : ready_.erase(at);
      return true;
    }
    made = begin(bucket);
  }
  if (made->running_count == 0) made->is_paused = false;
  // Between two of its tiles its gradient may have been spilled: what is on its way is neither in
  // the arena nor on disk.
  if (made->is_paused || bucket.gradient->residency() == Residency::draining) {
    ++at;
    return true;
  }
  begin_tiles(bucket, made);
  if (made->tile_next < bucket.tile_count()) return false;
  if (made->begun_count == 0) by_bucket_.erase(*at);
  at = ready_.erase(at);
  return true;
}

void EarlyUpdates::begin_tiles(Bucket& bucket, const std::shared_ptr<SpeculativeBucket>& made) {
  while (made->tile_next < bucket.tile_count() && running_count_ < kEarlyTilesInFlight) {
    const size_t tile = made->tile_next++;
    if (is_left_to_the_step(bucket, tile) || !has_quota(bucket, tile)) continue;
    begin_tile(bucket, made, tile);
  }
}

std::shared_ptr<SpeculativeBucket> EarlyUpdates::begin(Bucket& bucket) {
  auto made = std::make_shared<SpeculativeBucket>();
  made->value = bucket.value;
  made->session_id = session_of(bucket);
  made->tiles.resize(bucket.tile_count());
  const auto& expected = expected_.at(made->session_id);
  for (const uint32_t id : bucket.shards) {
    made->settings.push_back(expected.at(id));
    made->generations.push_back(parts_.shards[id].generation);
  }
  by_bucket_[bucket.value->owner()] = made;
  return made;
}

// N's own where nobody holds it: it is on disk, and with all of its gradients final backward has no
// use for it any more. A lease that wants it before the step fetches it.
void EarlyUpdates::find_slot(SpeculativeBucket& made) {
  Entry& value = *made.value;
  if (value.residency() == Residency::clean && value.has_replica()) {
    made.shadow = parts_.residencies.take_slot(value);
    made.is_in_place = made.shadow != nullptr;
  }
  if (made.shadow == nullptr) {
    made.shadow = parts_.slots.make(value.bytes(), parts_.shards.shard_count(value));
  }
  if (made.shadow != nullptr) parts_.policy.used(value.id(), EvictionPrice::clean);
}

void EarlyUpdates::begin_tile(Bucket& bucket,
                              const std::shared_ptr<SpeculativeBucket>& made,
                              size_t tile) {
  Entry& value = *bucket.value;
  if (made->begun_count == 0) {
    MEMD_FAILPOINT("early.begun");
    find_slot(*made);
  }
  std::vector<TileSpan> spans;
  for (size_t i = 0; i < bucket.shards.size(); ++i) {
    add_span(parts_.shards[bucket.shards[i]], bucket, tile, made->settings[i], spans);
  }
  TileTask task;
  task.entry = &value;
  task.index = tile;
  task.bucket = &bucket;
  task.reads_value = true;
  task.value_in_arena = value.residency() == Residency::clean;
  task.value_in_shadow = !task.value_in_arena && made->shadow != nullptr && made->is_in_place;
  task.writes_value = true;
  task.reads_rest = true;
  task.writes_rest = true;
  task.gradient = bucket.gradient;
  task.shadow = made->shadow.get();
  task.report = made->report;
  task.work = update_work(bucket.dtype, std::move(spans));
  task.keep = [this, made, tile](const SpeculativeTile& it) {
    if (made->is_discarded) return release_tile(it);
    made->tiles[tile] = it;
  };
  task.done = [this, made, &bucket](const Status& status) {
    parts_.residencies.end_task(*bucket.gradient);
    end_tile(bucket.value->owner(), *made, status);
  };
  parts_.residencies.begin_task(*bucket.gradient);
  ++made->begun_count;
  ++made->running_count;
  ++running_count_;
  tasks_.submit(std::move(task));
}

void EarlyUpdates::end_tile(uint32_t bucket, SpeculativeBucket& made, const Status& status) {
  MEMD_FAILPOINT("early.tile_ended");
  --made.running_count;
  --running_count_;
  // The pause's owner asks again.
  if (made.running_count == 0) parts_.residencies.note_changed(*made.value);
  if (made.is_discarded) return release(made);
  // The step meets the error again, where it is one that stays.
  if (!status.is_ok()) discard(bucket, EarlyDiscard::failed);
}

// ---- What becomes of it -------------------------------------------------------------------------

std::shared_ptr<SpeculativeBucket> EarlyUpdates::take(uint32_t bucket,
                                                      uint64_t session_id,
                                                      const SettingsOf& settings_of) {
  const auto found = by_bucket_.find(bucket);
  if (found == by_bucket_.end()) return nullptr;
  std::shared_ptr<SpeculativeBucket> made = found->second;
  const ShardIds& ids = parts_.shards.bucket(bucket).shards;
  std::optional<EarlyDiscard> why;
  if (made->session_id != session_id) why = EarlyDiscard::step;
  for (size_t i = 0; i < ids.size() && !why; ++i) {
    const AdamSettings* const settings = settings_of(ids[i]);
    if (settings == nullptr) {
      why = EarlyDiscard::step;
    } else if (*settings != made->settings[i] && !MEMD_PLANTED("early.settings_not_compared")) {
      why = EarlyDiscard::settings;
    } else if (parts_.shards[ids[i]].generation != made->generations[i]) {
      why = EarlyDiscard::state;
    }
  }
  if (why) {
    discard(bucket, *why);
    return nullptr;
  }
  MEMD_CHECK_EQ(made->running_count, 0u);
  by_bucket_.erase(found);
  std::erase(ready_, bucket);
  return made;
}

void EarlyUpdates::adopt(Bucket& bucket, SpeculativeBucket& made) {
  for (size_t tile = 0; tile < made.tiles.size(); ++tile) {
    if (!made.tiles[tile]) continue;
    const SpeculativeTile it = *std::exchange(made.tiles[tile], std::nullopt);
    MEMD_FAILPOINT("early.before_tile_adopted");
    parts_.space.replace(bucket.value->replica_place(tile), it.value, parts_.extents);
    parts_.space.replace(bucket.rest.place(tile), it.rest, parts_.extents);
    if (parts_.tiles.words() != nullptr) {
      parts_.log.note_tile(bucket, tile, parts_.progress.committed_step() + 1, std::nullopt);
    } else {
      parts_.log.note_rest(bucket, tile);
      parts_.log.note_value(*bucket.value, tile);
    }
    const uint64_t key = tile_key(bucket.value->owner(), tile);
    // Somebody may have read N's moments meanwhile.
    if (const auto cached = parts_.tiles.take(key)) {
      parts_.private_side().free(*cached);
    }
    if (it.private_offset_bytes) parts_.tiles.put(key, *it.private_offset_bytes);
    ++parts_.counters.early_tiles_adopted;
  }
  MEMD_FAILPOINT("early.adopted");
}

void EarlyUpdates::give_back(SpeculativeBucket& made, EarlyDiscard why) {
  MEMD_FAILPOINT("early.discarded");
  parts_.counters.early_tiles_discarded[static_cast<size_t>(why)] += made.begun_count;
  made.is_discarded = true;
  release(made);
}

void EarlyUpdates::discard(uint32_t bucket, EarlyDiscard why) {
  std::erase(ready_, bucket);
  const auto found = by_bucket_.find(bucket);
  if (found == by_bucket_.end() || MEMD_PLANTED("early.never_discarded")) return;
  const std::shared_ptr<SpeculativeBucket> made = found->second;
  by_bucket_.erase(found);
  give_back(*made, why);
}

void EarlyUpdates::forget_gradient(uint32_t shard_id) {
  const uint32_t bucket = parts_.shards[shard_id].bucket;
  if (final_shards_.erase(shard_id) != 0) --final_counts_[bucket];
  discard(bucket, EarlyDiscard::gradient);
}

void EarlyUpdates::forget_all() {
  for (auto& [bucket, made] : std::exchange(by_bucket_, {})) {
    made->is_discarded = true;
    release(*made);
  }
  ready_.clear();
  final_shards_.clear();
  final_counts_.clear();
}

bool EarlyUpdates::drop_memory() {
  for (const auto& [bucket, made] : by_bucket_) {
    for (auto& tile : made->tiles) {
      if (!tile || !tile->private_offset_bytes) continue;
      parts_.private_side().free(*std::exchange(tile->private_offset_bytes, std::nullopt));
      return true;
    }
  }
  return false;
}

void EarlyUpdates::pause(const Entry& value) {
  if (value.kind() != EntryKind::parameter) return;
  const auto found = by_bucket_.find(value.owner());
  if (found != by_bucket_.end()) found->second->is_paused = true;
}

const Slot* EarlyUpdates::slot_of(const Entry& value) const {
  if (value.kind() != EntryKind::parameter) return nullptr;
  const auto found = by_bucket_.find(value.owner());
  return found == by_bucket_.end() ? nullptr : found->second->shadow.get();
}

const Slot* EarlyUpdates::slot_to_spare(const Entry& value) const {
  const Slot* const slot = slot_of(value);
  if (slot == nullptr) return nullptr;
  // A worker may still write there.
  return by_bucket_.at(value.owner())->running_count == 0 ? slot : nullptr;
}

void EarlyUpdates::free_slot(const Entry& value) { free_slot(*by_bucket_.at(value.owner())); }

void EarlyUpdates::free_slot(SpeculativeBucket& made) {
  parts_.slots.free(std::move(made.shadow));
  if (!made.value->is_resident()) parts_.policy.forget(made.value->id());
}

// Buckets are in the order of declaration, which is about that of the forward: the last of them is
// needed last.
bool EarlyUpdates::free_extents() {
  for (auto it = by_bucket_.rbegin(); it != by_bucket_.rend(); ++it) {
    const SpeculativeBucket& made = *it->second;
    const bool has_any = std::any_of(
        made.tiles.begin(), made.tiles.end(), [](const auto& tile) { return tile.has_value(); });
    if (!has_any || made.running_count != 0) continue;
    discard(it->first, EarlyDiscard::room);
    return true;
  }
  return false;
}

void EarlyUpdates::release_tile(const SpeculativeTile& tile) {
  for (const ExtentRecord& extent : {tile.value, tile.rest}) {
    parts_.space.give_back(SpaceUse::state, extent.length_bytes);
    parts_.extents.release(extent);
  }
  if (tile.private_offset_bytes) {
    parts_.private_side().free(*tile.private_offset_bytes);
  }
}

void EarlyUpdates::release(SpeculativeBucket& made) {
  for (auto& tile : made.tiles) {
    if (tile) release_tile(*std::exchange(tile, std::nullopt));
  }
  parts_.waits.wake(WaitList::room);
  // A worker may still write there.
  if (made.running_count == 0 && made.shadow != nullptr) free_slot(made);
}

}  // namespace memd
