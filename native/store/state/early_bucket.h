// What was made of a bucket for a step that nobody has closed yet.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arena/arena.h"
#include "optim/adam.h"
#include "store/cache/entry.h"
#include "store/format/extent_record.h"
#include "store/state/step_report.h"

namespace memd {

/// A tile as the step will leave it. No catalogue, ledger or tile word names it.
struct EarlyTile {
  ExtentRecord value;
  ExtentRecord rest;
  std::optional<uint64_t> private_offset_bytes;  // value and rest are there as well
};

/// Owned by its Job; changed on the server thread only. N stays what it is: this takes its place
/// when the step is closed with just these settings and gradients, or goes.
struct EarlyBucket {
  Entry* value = nullptr;
  uint64_t session_id = 0;
  /// Of the bucket's shards, in their order: what it was made with.
  std::vector<AdamSettings> settings;
  std::vector<uint64_t> generations;
  /// Where the new value will be published, if there was room; no lease shows it before. While it
  /// is there `value` stays in the policy's order, resident or not.
  std::unique_ptr<Slot> shadow;
  /// It was N's: of tiles that were not begun N's bytes are there still.
  bool is_in_place = false;
  /// By tile; nothing: not made, the step does it.
  std::vector<std::optional<EarlyTile>> tiles;
  size_t tile_next = 0;    // those before it were begun, or are left to the step
  size_t begun_count = 0;  // of tiles
  uint32_t running_count = 0;
  bool is_paused = false;  // until none is running
  bool is_discarded = false;
  std::shared_ptr<StepReport> report = std::make_shared<StepReport>();
};

/// Of one job.
struct EarlyBuckets {
  std::map<uint32_t, std::shared_ptr<EarlyBucket>> by_bucket;
  /// Buckets of which all gradients are final, and not all tiles are begun.
  std::deque<uint32_t> ready;
  /// Shards whose gradient their session writes no more before its step.
  std::unordered_set<uint32_t> final_shards;
  std::unordered_map<uint32_t, uint32_t> final_counts;  // of them, by bucket
  uint32_t running_count = 0;                           // tiles

  /// Frees the memory of one tile that is on disk as well; false: there is none.
  bool drop_memory(Arena& side) {
    for (const auto& [bucket, made] : by_bucket) {
      for (auto& tile : made->tiles) {
        if (!tile || !tile->private_offset_bytes) continue;
        side.free(*std::exchange(tile->private_offset_bytes, std::nullopt));
        return true;
      }
    }
    return false;
  }
};

}  // namespace memd
