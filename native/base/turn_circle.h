// The parts of a turn, which take turns in being the last of it.
#pragma once

#include <cstddef>

#include "base/turn_budget.h"

namespace memd {

/// A turn ends behind the part in which its time ran out, and the next one begins with the part
/// that follows: so a turn takes its time and one piece of one part, and each part gets on.
class TurnCircle {
 public:
  /// Calls `run(part)`, which does the pieces that the turn has time for and returns whether there
  /// were any, with each of `count` parts or until the turn is over. True where one had something
  /// to do.
  template <typename Run>
  bool run(size_t count, TurnBudget& turn, const Run& run) {
    bool progress = false;
    for (size_t done = 1; done <= count; ++done) {
      const size_t part = next_;
      next_ = (next_ + 1) % count;
      // A part that found nothing has taken no time.
      if (!run(part)) continue;
      progress = true;
      if (done < count && turn.is_spent()) break;
    }
    return progress;
  }

 private:
  size_t next_ = 0;
};

}  // namespace memd
