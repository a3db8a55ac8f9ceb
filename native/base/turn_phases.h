// Which part of a turn of the server thread took how long.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

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

/// Splits a turn into its phases. By the wall: that clock costs a tenth of the one that counts a
/// thread's processor time, and a turn has nine of these reads.
class TurnPhases {
 public:
  void begin() {
    last_ = std::chrono::steady_clock::now();
    seconds_.fill(0);
  }
  /// The time since the phase before ended, or the turn began, was `phase`'s.
  void end(TurnPhase phase) {
    const auto now = std::chrono::steady_clock::now();
    seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  const TurnPhaseSeconds& seconds() const { return seconds_; }

 private:
  std::chrono::steady_clock::time_point last_{};
  TurnPhaseSeconds seconds_{};
};

}  // namespace memd
