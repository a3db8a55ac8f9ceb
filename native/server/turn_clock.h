// How long the server thread's turns take.
#pragma once

#include <cstdint>

#include "base/turn_phases.h"
#include "store/job/statistics.h"

namespace memd {

/// Measures turns that had something to do, by the wall and by the thread's processor time. A read
/// of the latter costs 0.4 µs, as much as an idle turn, so there is one every 20 µs and one at the
/// end of a turn that took that long by the wall. A shorter turn has its time by the wall. What is
/// told is never too short, and too long by 20 µs at most, where a turn was interrupted. Owned and
/// called by the server thread.
class TurnClock {
 public:
  /// A turn begins now, which SteadyClock tells: after a sleep, or after one that found nothing.
  uint64_t begin();
  /// A turn that had something to do ends, and the next one begins, when it tells.
  uint64_t end();
  /// The code of each phase of the turn ends it here.
  TurnPhases& phases() { return phases_; }
  const TurnStatistics& statistics() const { return statistics_; }

 private:
  void begin_at(uint64_t now_ns);

  uint64_t began_ns_ = 0;
  // When the thread's processor time was read last, and what it was.
  uint64_t read_at_ns_ = 0;
  uint64_t cpu_ns_ = 0;
  TurnPhases phases_;
  TurnStatistics statistics_;
};

}  // namespace memd
