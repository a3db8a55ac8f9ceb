// Counters that a daemon keeps for one job.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ring/layout.h"

namespace memd {

/// Why what was made of a step ahead of it was thrown away. The names are labels of a metric.
enum class EarlyDiscard : uint8_t {
  settings,  // the step has others than were expected
  gradient,  // it was written again, or dropped
  state,     // somebody writes the parameter or its moments
  step,      // another session's, or one over other shards
  failed,    // a read or write did, or there was no room on disk
  room,      // somebody else needed its room on disk
};
inline constexpr size_t kEarlyDiscardCount = 6;
inline constexpr std::array<const char*, kEarlyDiscardCount> kEarlyDiscardNames{
    "settings", "gradient", "state", "step", "failed", "room"};

struct JobCounters {
  uint64_t lease_hits = 0;
  uint64_t lease_misses = 0;
  uint64_t lease_wait_ns = 0;
  /// By LeaseWait, also of leases that wait still or waited in vain; prefetches aside.
  std::array<uint64_t, kLeaseWaitCount> lease_wait_reason_ns{};
  uint64_t fetched_bytes = 0;
  uint64_t evicted_bytes = 0;
  uint64_t spilled_bytes = 0;
  /// The part of fetched_bytes that a plan brought up before anybody asked.
  uint64_t prefetched_bytes = 0;
  /// And what of that went without having been used.
  uint64_t prefetch_unused_bytes = 0;
  /// Uses that found what a plan had brought up, and those that came before it was there.
  uint64_t prefetch_hits = 0;
  uint64_t prefetch_late = 0;
  /// Uses by sessions that their plan foresaw, and others.
  uint64_t uses_foreseen = 0;
  uint64_t uses_unforeseen = 0;
  /// Read and written in the periods of plans that ended with a step, and what farthest next use
  /// moves of them with all of the job's memory but what tiles in flight take.
  uint64_t plan_moved_bytes = 0;
  uint64_t plan_necessary_bytes = 0;
  /// Tiles that were updated before their step was closed: those that it took over, and the others.
  uint64_t early_tiles_adopted = 0;
  std::array<uint64_t, kEarlyDiscardCount> early_tiles_discarded{};
};

}  // namespace memd
