// A bucket as a step that nobody has closed yet would leave it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "optim/adam.h"
#include "store/cache/entry.h"
#include "store/format/extent_record.h"
#include "store/state/step_report.h"

namespace memd {

/// A tile as the step will leave it. No catalogue, ledger or tile word names it.
struct SpeculativeTile {
  ExtentRecord value;
  ExtentRecord rest;
  std::optional<uint64_t> private_offset_bytes;  // value and rest are there as well
};

/// Written by EarlyUpdates alone until a step takes it. Step N stays what it is: these values
/// replace it when the step is closed with exactly these settings and gradients; else they are
/// discarded.
struct SpeculativeBucket {
  Entry* value = nullptr;
  uint64_t session_id = 0;
  /// For the bucket's shards, in their order: the settings it was made with.
  std::vector<AdamSettings> settings;
  std::vector<uint64_t> generations;
  /// The slot for the new value, if there was room; no lease shows it before. While there is one,
  /// `value` stays in the policy's order, resident or not.
  std::unique_ptr<Slot> shadow;
  /// It was N's: of tiles that were not begun N's bytes are there still.
  bool is_in_place = false;
  /// By tile; nothing: not made, the step does it.
  std::vector<std::optional<SpeculativeTile>> tiles;
  size_t tile_next = 0;    // those before it were begun, or are left to the step
  size_t begun_count = 0;  // of tiles
  uint32_t running_count = 0;
  bool is_paused = false;  // until none is running
  bool is_discarded = false;
  std::shared_ptr<StepReport> report = std::make_shared<StepReport>();
};

}  // namespace memd
