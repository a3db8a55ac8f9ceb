// How long the server thread's turns take.
#pragma once

#include <cstdint>

#include "base/turn_phases.h"
#include "store/statistics.h"

namespace memd {

/// Measures turns that had something to do, by the thread's processor time and by the wall. Owned
/// and called by the server thread. A turn costs two clock reads, the end of one is the beginning
/// of the next, and those of its phases.
class TurnClock {
 public:
  /// A turn begins now: after a sleep, or after a turn that had nothing to do.
  void begin();
  /// A turn that had something to do ends, and the next one begins.
  void end();
  /// The code of each phase of the turn ends it here.
  TurnPhases& phases() { return phases_; }
  const TurnStatistics& statistics() const { return statistics_; }

 private:
  uint64_t cpu_ns_ = 0;
  uint64_t wall_ns_ = 0;
  TurnPhases phases_;
  TurnStatistics statistics_;
};

}  // namespace memd
