// A store's parts of a turn of the server thread.
#pragma once

#include <cstdint>
#include <functional>

#include "base/turn_budget.h"
#include "base/turn_circle.h"
#include "base/turn_phases.h"
#include "store/job/jobs.h"
#include "store/space/commit.h"
#include "store/space/extent_store.h"
#include "store/verify/live_check.h"
#include "store/verify/scrub.h"

namespace memd {

/// The parts of a turn, and whose turn it is next in each. Owned by the ShardStore; used by the
/// server thread.
class TurnParts {
 public:
  /// References, and calls into the store, which live as long as it.
  struct Uses {
    Jobs& jobs;
    Commits& commits;
    ExtentStore& extents;
    Scrub& scrub;
    LiveCheck& live_check;
    TurnBudget& turn;
    std::function<bool()> serve_sessions;
    std::function<bool()> end_unused_jobs;
  };
  explicit TurnParts(Uses uses) : uses_(std::move(uses)) {}

  /// As ShardStore::advance().
  bool advance(TurnPhases& phases);
  /// As ShardStore::grant_filled().
  bool grant_filled();

 private:
  // True where there was something to do.
  bool serve_sessions() { return uses_.serve_sessions(); }
  bool start_tiles();
  bool advance_leases();
  bool look_ahead();
  bool advance_conditions();
  bool advance_early_updates();
  bool end_unused_jobs() { return uses_.end_unused_jobs(); }
  bool encode_memory_commits();
  bool advance_commits() { return uses_.commits.advance(uses_.turn); }
  bool advance_extents() { return uses_.extents.advance(); }
  bool verify();
  /// Leases that were woken behind their part: the next turn looks at them.
  bool has_woken();

  /// Calls `visit` with each job, in a circle that begins behind `last`, until one had something to
  /// do and the turn is over; that one is `last` then. It may open and drop jobs.
  template <typename Visit>
  bool visit_jobs(uint64_t& last, const Visit& visit);

  Uses uses_;
  TurnCircle circle_;
  // The jobs that had their turn last.
  uint64_t tiles_last_ = 0;
  uint64_t leases_last_ = 0;
  uint64_t ahead_last_ = 0;
  uint64_t conditions_last_ = 0;
  uint64_t early_last_ = 0;
  uint64_t encoded_last_ = 0;
};

}  // namespace memd
