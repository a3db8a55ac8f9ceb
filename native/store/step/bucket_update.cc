#include "store/step/bucket_update.h"

#include <algorithm>
#include <utility>

#include "base/bulk_bytes.h"
#include "store/state/tile_update.h"

namespace memd {

BucketUpdate::BucketUpdate(const StepParts& parts,
                           const BucketUpdateParts& step,
                           Bucket& bucket,
                           const std::shared_ptr<SpeculativeBucket>& made)
    : parts_(parts),
      step_(step),
      bucket_(bucket),
      value_(*bucket.value),
      made_early_(bucket.tile_count()) {
  if (made != nullptr) adopt(*made);
  find_place();
}

void BucketUpdate::adopt(SpeculativeBucket& made) {
  add_work(*step_.report, *made.report);
  shadow_ = std::move(made.shadow);
  is_in_shadow_ = shadow_ != nullptr;
  was_in_place_ = is_in_shadow_ && made.is_in_place;
  for (size_t tile = 0; tile < bucket_.tile_count(); ++tile) {
    if (!made.tiles[tile]) continue;
    made_early_[tile] = true;
    // A fetch brings what is wanted of it, when it is wanted.
    is_away_ = is_away_ || (!is_in_shadow_ && !made.tiles[tile]->private_offset_bytes);
  }
  parts_.state.early().adopt(bucket_, made);
}

void BucketUpdate::find_place() {
  Residencies& residencies = parts_.job.residencies;
  in_place_ = value_.residency() == Residency::clean;
  if (in_place_ && (is_in_shadow_ || is_away_ || !parts_.job.table.take_away(value_))) {
    // A live view is never written: the new parameter goes elsewhere.
    residencies.move(value_, Residency::clean, Residency::absent);
    parts_.job.slots.retire(value_.take_slot());
    in_place_ = false;
  }
  if (in_place_) {
    residencies.move(value_, Residency::clean, Residency::filling);
  } else if (is_in_shadow_) {
    value_.place(std::move(shadow_));
    residencies.move(value_, Residency::absent, Residency::filling);
  }
}

BucketUpdate::Made BucketUpdate::made(size_t tile) const {
  if (made_early_[tile]) return Made::early;
  const MadeTile* const before = parts_.job.tiles.made(tile_key(value_.owner(), tile));
  if (before == nullptr) return Made::no;
  return before->is_whole ? Made::by_daemon_before : Made::half_by_daemon_before;
}

/// It was updated before; what is left is to publish it.
TileTask BucketUpdate::publish_task(size_t tile) const {
  TileTask task;
  task.entry = &value_;
  task.index = tile;
  task.bucket = &bucket_;
  task.reads_value = true;
  task.reads_rest = true;
  task.work = [](const TileBytes& bytes) {
    copy_bytes(bytes.arena_value, bytes.value, bytes.value_bytes);
  };
  task.report = step_.report;
  return task;
}

TileTask BucketUpdate::update_task(size_t tile) const {
  TileTask task;
  task.entry = &value_;
  task.index = tile;
  task.bucket = &bucket_;
  task.reads_value = true;
  task.value_in_arena = in_place_ || was_in_place_;
  task.writes_value = true;
  task.reads_rest = true;
  task.writes_rest = true;
  task.may_stay = step_.may_stay;
  task.gradient = bucket_.gradient;
  std::vector<TileSpan> spans;
  for (const uint32_t shard_id : bucket_.shards) {
    const AdamSettings* const settings = step_.settings_of(shard_id);
    if (settings == nullptr) continue;
    add_span(parts_.job.shards[shard_id], bucket_, tile, *settings, spans);
  }
  task.work = update_work(bucket_.dtype, std::move(spans));
  task.report = step_.report;
  return task;
}

void BucketUpdate::submit(Join& updated) {
  TileTasks& tasks = parts_.state.tasks();
  // When its first tile starts: by then the session is farther, and needs less of what is resident.
  const auto find_slot = [make_slot = step_.make_slot, &value = value_] { make_slot(value); };
  const bool is_unpublished = !in_place_ && !is_in_shadow_ && !is_away_;
  // Tiles that are made already do not start.
  const bool is_begun =
      parts_.job.tiles.has_made() ||
      std::find(made_early_.begin(), made_early_.end(), true) != made_early_.end();
  if (is_unpublished && is_begun) find_slot();

  uint64_t later_bytes = step_.later_bytes + bucket_.state_bytes();
  for (size_t tile = 0; tile < bucket_.tile_count(); ++tile) {
    later_bytes -= bucket_.tile_bytes(tile);
    const Made how = made(tile);
    if (how == Made::early || how == Made::by_daemon_before) {
      if (value_.slot() == nullptr || (how == Made::early && is_in_shadow_)) continue;
      TileTask task = publish_task(tile);
      task.done = updated.branch();
      tasks.submit(std::move(task));
      continue;
    }
    TileTask task = update_task(tile);
    task.later_bytes = later_bytes;
    if (tile == 0 && is_unpublished && !is_begun) task.starting = find_slot;
    task.done = updated.branch();
    // Making room for others would write out half of a step.
    const bool is_half_made = how == Made::half_by_daemon_before;
    is_half_made ? tasks.submit_first(std::move(task)) : tasks.submit(std::move(task));
  }
}

}  // namespace memd
