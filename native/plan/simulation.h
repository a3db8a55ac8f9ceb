// How many bytes a trace moves, without moving any.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace memd {

struct SimulationSettings {
  uint64_t cache_bytes = 0;
  /// Changed bytes are on disk at the end of their period anyway (durability "step"); otherwise
  /// only after an eviction.
  bool writes_changes = true;
  /// Whole periods: the first ones fill the memory, the others are measured.
  uint32_t warm_count = 4;
  uint32_t measured_count = 8;
};

struct BytesMoved {
  double read_bytes = 0;  // of one period, on average
  double written_bytes = 0;
};

/// The plan, again and again, with `item_bytes` for each item and every item fetched when it is
/// used: what eviction by farthest next use moves. An item that is larger than the memory goes
/// through it. tests/numerics/test_plan_bytes.py holds it against the lower bound.
BytesMoved simulate(const Plan& plan,
                    const std::vector<uint64_t>& item_bytes,
                    const SimulationSettings& settings);

}  // namespace memd
