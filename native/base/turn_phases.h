// Which part of a turn of the server thread took how long.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/clock.h"

namespace memd {

/// In the order in which a turn has them.
enum class TurnPhase : uint8_t {
  commands,    // calls from other threads
  io,          // transfers that devices have finished, and those that they are given
  work,        // what update workers have finished
  serve,       // uses that clients noted, and requests from their rings
  tiles,       // tile tasks of steps
  leases,      // waiting leases that were woken
  prefetch,    // what the plans want next
  operations,  // steps, syncs and deletions that waited for something
  upkeep,      // stopped jobs, extents, scrub and checks
};

inline constexpr std::array<std::string_view, 9> kTurnPhaseNames{
    "commands", "io", "work", "serve", "tiles", "leases", "prefetch", "operations", "upkeep"};
static_assert(static_cast<size_t>(TurnPhase::upkeep) + 1 == kTurnPhaseNames.size());

/// Seconds by the wall, one for each phase.
using TurnPhaseSeconds = std::array<double, kTurnPhaseNames.size()>;

/// Splits a turn into its phases, by the wall: a read of the clock that counts a thread's processor
/// time costs 18 times as much. Only the parts that had something to do read it: an idle turn of
/// 20 parts took 0.5 µs for nothing else.
class TurnPhases {
 public:
  /// A turn begins, at SteadyClock's `now_ns`.
  void begin(uint64_t now_ns) {
    last_ns_ = now_ns;
    seconds_.fill(0);
  }
  /// A part had something to do: the time since the last one that had, or since the turn began, was
  /// `phase`'s.
  void end(TurnPhase phase) {
    const uint64_t now_ns = SteadyClock().now_ns();
    seconds_[static_cast<size_t>(phase)] += static_cast<double>(now_ns - last_ns_) * 1e-9;
    last_ns_ = now_ns;
  }
  const TurnPhaseSeconds& seconds() const { return seconds_; }

 private:
  uint64_t last_ns_ = 0;
  TurnPhaseSeconds seconds_{};
};

}  // namespace memd
