// How long a turn of the server thread may go on.
#pragma once

#include <cstdint>
#include <limits>

#include "base/clock.h"

namespace memd {

/// While a turn lasts, every job waits. Each part of a turn does one piece of work, asks
/// is_spent(), and leaves the rest to the next turn, which TurnCircle begins with the part that
/// follows: so a turn takes this long and at most one piece. Owned by the Engine; used by the
/// server thread.
class TurnBudget {
 public:
  /// With 15 µs, 1 to 2 % of the turns of a training with 60M parameters took more than 100 µs, and
  /// with 4 µs a half of that. What a turn costs beside its work is some 1 µs.
  static constexpr uint64_t kTurnNs = 5'000;

  /// Without bound for ever.
  TurnBudget() = default;
  /// Without bound until begin().
  explicit TurnBudget(const Clock& clock) : clock_(&clock) {}
  TurnBudget(const TurnBudget&) = delete;
  TurnBudget& operator=(const TurnBudget&) = delete;

  /// A turn begins.
  void begin() { begin(clock_ == nullptr ? 0 : clock_->now_ns()); }
  /// For a caller that has just read the clock.
  void begin(uint64_t now_ns) {
    end_ns_ = clock_ == nullptr ? kNoEnd : now_ns + kTurnNs;
    is_cut_ = false;
  }
  /// From here on there is no bound.
  void lift() {
    end_ns_ = kNoEnd;
    is_cut_ = false;
  }
  /// For a caller that has more to do. True: it leaves that to the next turn, which begins at once.
  bool is_spent() {
    if (end_ns_ == kNoEnd || clock_->now_ns() < end_ns_) return false;
    is_cut_ = true;
    return true;
  }
  /// Somebody left something to the next turn.
  bool is_cut() const { return is_cut_; }

 private:
  static constexpr uint64_t kNoEnd = std::numeric_limits<uint64_t>::max();

  const Clock* clock_ = nullptr;
  uint64_t end_ns_ = kNoEnd;
  bool is_cut_ = false;
};

}  // namespace memd
