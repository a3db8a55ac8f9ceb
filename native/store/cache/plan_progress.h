// How far the sessions of one job are in their plans, and what the job's periods move.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/turn_budget.h"
#include "plan/plan_book.h"
#include "store/cache/eviction.h"
#include "store/cache/job_counters.h"
#include "store/cache/job_memory.h"
#include "store/cache/prefetch_window.h"
#include "store/cache/session.h"
#include "store/cache/shards.h"
#include "store/cache/training_group.h"
#include "store/format/durability.h"

namespace memd {

/// Owns the job's plans; each session has a place in them (Session::plan). Owned by the Job; the
/// server thread calls everything; nothing blocks.
class PlanProgress {
 public:
  /// Uses of one session that are followed in one turn: with the most that PlanBook compares for
  /// each, a few milliseconds. A log holds 64 times as many.
  static constexpr uint64_t kFollowedATurn = 1024;
  /// Uses that are followed before the turn's time is looked at.
  static constexpr uint64_t kFollowedTogether = 64;
  // A session that needs nothing is heard of this often.
  static constexpr uint64_t kUsesUnheardMax = 256;

  struct Parts {
    const Shards& shards;
    const std::vector<std::shared_ptr<Session>>& sessions;
    const TrainingGroup& group;
    const std::unique_ptr<JobMemory>& memory;
    const Durability& durability;
    FarthestNextUse& policy;
    PrefetchWindow& window;
    JobCounters& counters;
  };

  explicit PlanProgress(const Parts& parts) : parts_(parts) {}
  PlanProgress(const PlanProgress&) = delete;
  PlanProgress& operator=(const PlanProgress&) = delete;

  void begin(Session& session);
  void end(Session& session);
  /// Has the session say so when it has made some uses.
  static void want_uses(Session& session) { session.ring.want_use_after(kUsesUnheardMax); }
  /// Follows the session's leases since the last call: with a request, whose grant was counted, or
  /// without one. It leaves to the next turn what is more than kFollowedATurn, or than `turn` has
  /// time for. True where there was something.
  bool follow_uses(Session& session, TurnBudget& turn);

  /// Buckets in the order in which the session used their parameters first since its last step,
  /// which is the order in which the next forward will want them.
  std::vector<uint32_t> in_order_of_use(uint64_t session_id,
                                        const std::set<uint32_t>& buckets) const;
  /// The session has closed a step, which will update these in this order.
  void close_step(uint64_t session_id, uint64_t step, const std::vector<uint32_t>& buckets);
  /// It did.
  void end_updates(uint64_t session_id, uint64_t step);
  /// The step is made, and moved this beside what leases and spills moved.
  void count_moved(uint64_t step_bytes);
  /// How far away the session's next use of the entry is; kNeverUsed where that is not known.
  uint64_t distance(uint64_t session_id, uint32_t entry_id) const;
  const PlanBook& book() const { return *plans_; }
  /// Fetched in the last period of a plan.
  uint64_t period_fetched_bytes() const { return period_fetched_bytes_; }

 private:
  Session* planned(uint64_t session_id) const;
  void follow(Session& session, std::span<const Use> uses);
  /// All that the session used before it closed the step was followed: the period is over.
  void end_period(SessionPlan& plan);
  void note_followed(SessionPlan& plan, std::span<const uint32_t> used_ids);
  uint64_t necessary_bytes(const Plan& plan) const;
  /// The arena and the private side share memory as the period that ended would have it.
  void share_memory(std::optional<PlanBook::PlanId> ended, const Plan* plan);
  /// Whether most bytes of values are used after their gradient came.
  bool uses_values_again(const Plan& plan) const;
  std::optional<UseKind> kind_of(const Entry& entry, LeaseMode mode) const;

  const Parts parts_;
  std::shared_ptr<PlanBook> plans_ = std::make_shared<PlanBook>();
  /// Bytes that the last period of a plan fetched, and the count when it began.
  uint64_t period_fetched_bytes_ = 0;
  uint64_t period_begin_fetched_bytes_ = 0;
  /// Bytes that the period which the last step ended has to move; 0: not known.
  uint64_t necessary_bytes_ = 0;
  /// The plan for which that was computed last, and what it was.
  std::optional<PlanBook::PlanId> necessary_of_;
  uint64_t necessary_of_bytes_ = 0;
  /// The plan that was looked at last for whether it uses values again.
  std::optional<PlanBook::PlanId> one_pass_of_;
  bool is_one_pass_ = false;
  /// Fetched and spilled, as of the last step.
  uint64_t counted_moved_bytes_ = 0;
  std::vector<Use> uses_;  // of one call
};

}  // namespace memd
