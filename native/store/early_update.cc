#include "store/early_update.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/step_update.h"

namespace memd {
namespace {

// Half of what a job may have in flight: spills and fetches, which somebody waits for, share the
// tasks' queue with what nobody does.
constexpr uint32_t kEarlyTilesInFlight = kTilesInFlight / 2;

bool is_moving(const Entry& entry) {
  return entry.task_count != 0 || entry.residency() == Residency::filling ||
         entry.residency() == Residency::draining;
}

}  // namespace

Status EarlyUpdates::expect(Job& job, Session& session, const std::vector<StepGroup>& groups) {
  for (const StepGroup& group : groups) {
    for (const uint32_t shard_id : group.shard_ids) {
      if (job.shards().find_entry(shard_id, Part::gradient) != nullptr) continue;
      return error(
          StatusCode::not_found, "job ", job.name, " has no parameter with shard id ", shard_id);
    }
  }
  for (const StepGroup& group : groups) {
    for (const uint32_t shard_id : group.shard_ids) session.expected[shard_id] = group.settings;
  }
  return Status::ok();
}

void EarlyUpdates::gradient_is_final(Job& job, const Session& session, uint32_t shard_id) {
  const Entry* const gradient = job.shards().find_entry(shard_id, Part::gradient);
  if (gradient == nullptr) return;
  const Shard& shard = job.shards()[shard_id];
  // The hint may come after the step that took the gradient, or after who dropped it.
  if (shard.gradient_session != session.session_id) return;
  const bool is_written = gradient->slot != nullptr &&
                          job.slots().pins(*gradient->slot, shard.index_in_bucket).writers != 0;
  if (is_written || !job.early.final_shards.insert(shard_id).second) return;
  const uint32_t count = ++job.early.final_counts[shard.bucket];
  if (count == job.shards().bucket(shard.bucket).shards.size()) job.early.ready.push_back(shard.bucket);
}

// ---- Making -------------------------------------------------------------------------------------

const Session* EarlyUpdates::session_of(const Job& job, const Bucket& bucket) {
  const uint64_t session_id = job.shards()[bucket.shards.front()].gradient_session;
  const auto found =
      std::find_if(job.sessions.begin(), job.sessions.end(), [session_id](const auto& session) {
        return session->session_id == session_id;
      });
  return found == job.sessions.end() ? nullptr : found->get();
}

EarlyUpdates::Begin EarlyUpdates::check(const Job& job, const Bucket& bucket) const {
  const Session* const session = session_of(job, bucket);
  if (session == nullptr) return Begin::never;
  for (const uint32_t id : bucket.shards) {
    const Shard& shard = job.shards()[id];
    const bool is_known = shard.written && shard.gradient_session == session->session_id &&
                          session->expected.contains(id) && job.early.final_shards.contains(id);
    if (!is_known) return Begin::never;
  }
  const Entry& value = *bucket.value;
  const Entry& gradient = *bucket.gradient;
  // What the user wrote is merged with the disk first, by the step.
  if (value.bytes == 0 || value.residency() == Residency::dirty) return Begin::never;
  if (is_moving(value) || is_moving(gradient)) return Begin::later;
  return gradient.is_resident() || gradient.has_replica() ? Begin::now : Begin::never;
}

// N of a tile in memory alone cannot be returned to. And where commits are in memory, a tile that
// would stay there is written by no step: made ahead of it it would be, every time.
bool EarlyUpdates::is_left_to_the_step(Job& job, const Bucket& bucket, size_t tile) const {
  const uint64_t key = tile_key(bucket.value->owner, tile);
  if (job.tiles.is_dirty(key) || !bucket.value->replicas[tile].exists()) return true;
  if (!job.durability.is_in_memory()) return false;
  if (job.tiles.contains(key)) return true;
  const JobMemory& memory = *job.memory;
  const uint64_t with_it_bytes =
      tiles_.kept_bytes(job) + bucket.value->replica_bytes(tile) + bucket.rest_bytes(tile);
  return with_it_bytes + memory.working_bytes() <= memory.private_bytes_max();
}

// Room on disk that spilled gradients may need is not taken, nor what the step needs for the tiles
// that are left to it: without it all would be thrown away and made again.
bool EarlyUpdates::has_quota(const Job& job, const Bucket& bucket, size_t tile) {
  uint64_t wanted_bytes = bucket.value->replica_bytes(tile) + bucket.rest_bytes(tile);
  // Those that were begun may have taken nothing yet.
  wanted_bytes += job.early.running_count * kTileStateBytesMax;
  if (!job.gradients_fit()) wanted_bytes += job.shards().gradient_bytes();
  if (job.durability.is_in_memory()) wanted_bytes += kTilesInFlight * kTileStateBytesMax;
  return job.space.has_room(SpaceUse::gradient, wanted_bytes);
}

void EarlyUpdates::advance(Job& job) {
  std::deque<uint32_t>& ready = job.early.ready;
  const bool may_begin = job.progress.stopped().is_ok() && job.lost.count() == 0 &&
                         !job.tiles.has_made() && extents_.broken().is_ok();
  if (!may_begin) return;
  for (auto it = ready.begin();
       it != ready.end() && job.early.running_count < kEarlyTilesInFlight;) {
    Bucket& bucket = job.shards().bucket(*it);
    const auto found = job.early.by_bucket.find(*it);
    std::shared_ptr<EarlyBucket> early =
        found != job.early.by_bucket.end() ? found->second : nullptr;
    if (early == nullptr) {
      const Begin when = check(job, bucket);
      if (when == Begin::later) {
        ++it;
        continue;
      }
      if (when == Begin::never) {
        it = ready.erase(it);
        continue;
      }
      early = begin(job, bucket, *session_of(job, bucket));
    }
    if (early->running_count == 0) early->is_paused = false;
    // Between two of its tiles its gradient may have been spilled: what is on its way is neither in
    // the arena nor on disk.
    if (early->is_paused || bucket.gradient->residency() == Residency::draining) {
      ++it;
      continue;
    }
    while (early->tile_next < bucket.tile_count() &&
           job.early.running_count < kEarlyTilesInFlight) {
      const size_t tile = early->tile_next++;
      if (is_left_to_the_step(job, bucket, tile) || !has_quota(job, bucket, tile)) continue;
      begin_tile(job, bucket, early, tile);
    }
    if (early->tile_next < bucket.tile_count()) break;
    if (early->begun_count == 0) job.early.by_bucket.erase(*it);
    it = ready.erase(it);
  }
}

std::shared_ptr<EarlyBucket> EarlyUpdates::begin(Job& job, Bucket& bucket, const Session& session) {
  auto early = std::make_shared<EarlyBucket>();
  early->value = bucket.value;
  early->session_id = session.session_id;
  early->tiles.resize(bucket.tile_count());
  for (const uint32_t id : bucket.shards) {
    early->settings.push_back(session.expected.at(id));
    early->generations.push_back(job.shards()[id].generation);
  }
  job.early.by_bucket[bucket.value->owner] = early;
  return early;
}

// N's own where nobody holds it: it is on disk, and with all of its gradients final backward has no
// use for it any more. Whoever wants it before the step has it fetched.
void EarlyUpdates::find_slot(Job& job, EarlyBucket& early) {
  Entry& value = *early.value;
  if (value.residency() == Residency::clean && value.has_replica()) {
    early.shadow = job.residencies().take_slot(value);
    early.is_in_place = early.shadow != nullptr;
  }
  if (early.shadow == nullptr) early.shadow = job.slots().make(value.bytes, job.shards().shard_count(value));
  if (early.shadow != nullptr) job.policy().used(value.id, EvictionPrice::clean);
}

void EarlyUpdates::begin_tile(Job& job,
                              Bucket& bucket,
                              const std::shared_ptr<EarlyBucket>& early,
                              size_t tile) {
  Entry& value = *bucket.value;
  if (early->begun_count == 0) {
    MEMD_FAILPOINT("early.begun");
    find_slot(job, *early);
  }
  std::vector<TileSpan> spans;
  for (size_t i = 0; i < bucket.shards.size(); ++i) {
    add_span(job, bucket, tile, bucket.shards[i], early->settings[i], spans);
  }
  TileTask task;
  task.job = &job;
  task.entry = &value;
  task.index = tile;
  task.bucket = &bucket;
  task.reads_value = true;
  task.value_in_arena = value.residency() == Residency::clean;
  task.value_in_shadow = !task.value_in_arena && early->shadow != nullptr && early->is_in_place;
  task.writes_value = true;
  task.reads_rest = true;
  task.writes_rest = true;
  task.gradient = bucket.gradient;
  task.shadow = early->shadow.get();
  task.report = early->report;
  task.work = update_work(bucket.dtype, std::move(spans));
  task.keep = [this, &job, early, tile](const EarlyTile& made) {
    if (early->is_discarded) return release_tile(job, made);
    early->tiles[tile] = made;
  };
  task.done = [this, &job, early, &bucket](const Status& status) {
    --bucket.gradient->task_count;
    end_tile(job, bucket.value->owner, *early, status);
  };
  ++bucket.gradient->task_count;
  ++early->begun_count;
  ++early->running_count;
  ++job.early.running_count;
  tiles_.submit(std::move(task));
}

void EarlyUpdates::end_tile(Job& job, uint32_t bucket, EarlyBucket& early, const Status& status) {
  MEMD_FAILPOINT("early.tile_ended");
  --early.running_count;
  --job.early.running_count;
  if (early.is_discarded) return release(job, early);
  // The step meets the error again, where it is one that stays.
  if (!status.is_ok()) discard(job, bucket, EarlyDiscard::failed);
}

// ---- What becomes of it -------------------------------------------------------------------------

std::shared_ptr<EarlyBucket> EarlyUpdates::take(Job& job,
                                                uint32_t bucket,
                                                uint64_t session_id,
                                                const SettingsOf& settings_of) {
  const auto found = job.early.by_bucket.find(bucket);
  if (found == job.early.by_bucket.end()) return nullptr;
  std::shared_ptr<EarlyBucket> early = found->second;
  const ShardIds& ids = job.shards().bucket(bucket).shards;
  std::optional<EarlyDiscard> why;
  if (early->session_id != session_id) why = EarlyDiscard::step;
  for (size_t i = 0; i < ids.size() && !why; ++i) {
    const AdamSettings* const settings = settings_of(ids[i]);
    if (settings == nullptr) {
      why = EarlyDiscard::step;
    } else if (*settings != early->settings[i] && !MEMD_PLANTED("early.settings_not_compared")) {
      why = EarlyDiscard::settings;
    } else if (job.shards()[ids[i]].generation != early->generations[i]) {
      why = EarlyDiscard::state;
    }
  }
  if (why) {
    discard(job, bucket, *why);
    return nullptr;
  }
  MEMD_CHECK_EQ(early->running_count, 0u);
  job.early.by_bucket.erase(found);
  std::erase(job.early.ready, bucket);
  return early;
}

void EarlyUpdates::adopt(Job& job, Bucket& bucket, EarlyBucket& early) {
  for (size_t tile = 0; tile < early.tiles.size(); ++tile) {
    if (!early.tiles[tile]) continue;
    const EarlyTile made = *std::exchange(early.tiles[tile], std::nullopt);
    MEMD_FAILPOINT("early.before_tile_adopted");
    job.space.replace(bucket.value->replicas[tile], made.value, extents_);
    job.space.replace(bucket.rest[tile], made.rest, extents_);
    if (job.tiles.words() != nullptr) {
      job.note_tile(bucket, tile, job.progress.committed_step() + 1);
    } else {
      job.note_rest_extent(bucket, tile);
      job.note_value_extent(*bucket.value, tile);
    }
    const uint64_t key = tile_key(bucket.value->owner, tile);
    // Somebody may have read N's moments meanwhile.
    if (const auto cached = job.tiles.take(key)) job.memory->private_side().free(*cached);
    if (made.private_offset_bytes) job.tiles.put(key, *made.private_offset_bytes);
    ++job.counters.early_tiles_adopted;
  }
  MEMD_FAILPOINT("early.adopted");
}

void EarlyUpdates::give_back(Job& job, EarlyBucket& early, EarlyDiscard why) {
  MEMD_FAILPOINT("early.discarded");
  job.counters.early_tiles_discarded[static_cast<size_t>(why)] += early.begun_count;
  early.is_discarded = true;
  release(job, early);
}

void EarlyUpdates::discard(Job& job, uint32_t bucket, EarlyDiscard why) {
  std::erase(job.early.ready, bucket);
  const auto found = job.early.by_bucket.find(bucket);
  if (found == job.early.by_bucket.end() || MEMD_PLANTED("early.never_discarded")) return;
  const std::shared_ptr<EarlyBucket> early = found->second;
  job.early.by_bucket.erase(found);
  give_back(job, *early, why);
}

void EarlyUpdates::forget_gradient(Job& job, uint32_t shard_id) {
  const uint32_t bucket = job.shards()[shard_id].bucket;
  if (job.early.final_shards.erase(shard_id) != 0) --job.early.final_counts[bucket];
  discard(job, bucket, EarlyDiscard::gradient);
}

void EarlyUpdates::forget(Job& job) {
  for (auto& [bucket, early] : std::exchange(job.early.by_bucket, {})) {
    early->is_discarded = true;
    release(job, *early);
  }
  job.early.ready.clear();
  job.early.final_shards.clear();
  job.early.final_counts.clear();
}

void EarlyUpdates::pause(Job& job, const Entry& value) {
  if (value.kind != EntryKind::parameter) return;
  const auto found = job.early.by_bucket.find(value.owner);
  if (found != job.early.by_bucket.end()) found->second->is_paused = true;
}

const Slot* EarlyUpdates::slot_to_spare(const Job& job, const Entry& value) {
  const Slot* const slot = job.early_slot(value);
  if (slot == nullptr) return nullptr;
  // A worker may still write there.
  return job.early.by_bucket.at(value.owner)->running_count == 0 ? slot : nullptr;
}

void EarlyUpdates::free_slot(Job& job, const Entry& value) {
  free_slot(job, *job.early.by_bucket.at(value.owner));
}

void EarlyUpdates::free_slot(Job& job, EarlyBucket& early) {
  job.slots().free(std::move(early.shadow));
  if (!early.value->is_resident()) job.policy().forget(early.value->id);
}

// Buckets are in the order of declaration, which is about that of the forward: the last of them is
// needed last.
bool EarlyUpdates::free_extents(Job& job) {
  for (auto it = job.early.by_bucket.rbegin(); it != job.early.by_bucket.rend(); ++it) {
    const EarlyBucket& early = *it->second;
    const bool has_any = std::any_of(
        early.tiles.begin(), early.tiles.end(), [](const auto& tile) { return tile.has_value(); });
    if (!has_any || early.running_count != 0) continue;
    discard(job, it->first, EarlyDiscard::room);
    return true;
  }
  return false;
}

void EarlyUpdates::release_tile(Job& job, const EarlyTile& tile) {
  for (const ExtentRecord& extent : {tile.value, tile.rest}) {
    job.space.give_back(SpaceUse::state, extent.length_bytes);
    extents_.release(extent);
  }
  if (tile.private_offset_bytes) job.memory->private_side().free(*tile.private_offset_bytes);
}

void EarlyUpdates::release(Job& job, EarlyBucket& early) {
  for (auto& tile : early.tiles) {
    if (tile) release_tile(job, *std::exchange(tile, std::nullopt));
  }
  // A worker may still write there.
  if (early.running_count == 0 && early.shadow != nullptr) free_slot(job, early);
}

}  // namespace memd
