// The plans of a job, and where its sessions are in them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace memd {

/// A job's periods as its sessions ran them: training steps, evaluations, generation,
/// branches chosen at run time. Remembers which period followed which. No clock, no I/O.
class PlanBook {
 public:
  using PlanId = uint32_t;
  struct Place {
    PlanId plan_id = 0;
    uint32_t position = 0;  // of the next use
  };

  /// Uses in all plans together; a plan that was learned once or long ago goes first.
  static constexpr size_t kPlanCountMax = 16;
  static constexpr size_t kUseCountMax = 1u << 19;

  /// A period has ended: its plan, new or known. `before`: the period before it.
  PlanId learn(std::vector<PlanUse> uses, std::optional<PlanId> before);
  /// The same where it is known that the plan was followed to its end.
  void completed(PlanId plan_id, std::optional<PlanId> before);

  std::shared_ptr<const Plan> find(PlanId plan_id) const;
  /// It was followed more than once.
  bool is_repeated(PlanId plan_id) const;
  /// The period that followed it most often; if none did, the job's most frequent one.
  PlanId successor(PlanId plan_id) const;
  /// The period that most probably begins with `use`, after `before`.
  std::optional<PlanId> beginning_with(const PlanUse& use, std::optional<PlanId> before) const;
  /// The place in all plans of a session that made these uses, the newest last: after the longest
  /// match; `near` is preferred among equals. Nothing if not even `match_min` uses match.
  std::optional<Place> locate(std::span<const PlanUse> recent,
                              size_t match_min,
                              std::optional<Place> near);
  /// Places that locate() compared so far.
  uint64_t compared_count() const { return compared_count_; }
  /// The most that one locate() compares, of the plan it prefers and of each other. An item that
  /// a step uses more often (a thousand times in a loop) is found near the session's last place, or
  /// by its next use.
  static constexpr size_t kPlacesNearMax = 64;
  static constexpr size_t kPlacesElsewhereMax = 16;
  size_t plan_count() const { return plans_.size(); }

 private:
  struct Known {
    std::shared_ptr<const Plan> plan;
    uint64_t completed_count = 0;
    uint64_t completed_last = 0;  // in periods of the job
    std::map<PlanId, uint64_t> followers;
  };
  void drop_what_is_too_much(PlanId kept);

  std::map<PlanId, Known> plans_;
  PlanId plan_id_next_ = 1;
  uint64_t period_count_ = 0;
  size_t use_count_ = 0;
  uint64_t compared_count_ = 0;
};

/// One session's place in the plans of its job. Follows what the session uses; a use that no plan
/// foresaw never loses the plan: the next uses tell what was skipped or added, and
/// another plan takes over where it fits better. O(log n) a use, O(n) where a plan is learned or
/// looked for.
///
/// Times count the uses of the plans it goes through; they go up, and a plan's uses that were
/// skipped are skipped in time as well.
class PlanCursor {
 public:
  explicit PlanCursor(std::shared_ptr<PlanBook> book) : book_(std::move(book)) {}

  /// A use as the plan sees it.
  enum class Seen : uint8_t {
    unknown,   // no plan matches yet
    foreseen,  // the next of the plan
    moved,     // the place has changed: times of items may have too
    stranger,  // the plan has it nowhere near
  };
  Seen use(uint32_t item, UseKind kind);
  /// The session closed a step. The period ends with the last use that `is_of_step` (a gradient's,
  /// say): a session may have begun the next forward before the daemon hears of the step, and what
  /// came later begins the next period. `updates`: what the daemon will use, in its order.
  void end_step(const std::function<bool(const PlanUse&)>& is_of_step,
                std::span<const PlanUse> updates);
  /// The daemon has made the update phase that comes next in the plan, if any.
  void end_updates();

  bool has_plan() const { return plan_ != nullptr; }
  std::optional<PlanBook::PlanId> plan_id() const {
    return plan_ == nullptr ? std::nullopt : std::optional(place_.plan_id);
  }
  const Plan* plan() const { return plan_.get(); }
  /// Uses since the period began, in order.
  const std::vector<PlanUse>& period() const { return segment_; }
  /// The period that ended last.
  std::optional<PlanBook::PlanId> last_period() const { return before_; }
  uint32_t position() const { return place_.position; }
  uint64_t now() const { return base_ + place_.position; }
  /// When the item is used next, in this period or those that probably follow; nothing where they
  /// do not use it.
  std::optional<uint64_t> next_use(uint32_t item) const;
  /// The uses that come, at `from` or later, until `visit` returns false, or the periods that are
  /// looked at are over.
  void for_coming(uint64_t from,
                  const std::function<bool(const PlanUse& use, uint64_t time)>& visit) const;
  /// Counts each time that times given before hold no more.
  uint64_t epoch() const { return epoch_; }

 private:
  // A use that was not foreseen moves the cursor to where the one before it agrees, or to one of
  // its kind that is this near in the plan.
  static constexpr uint32_t kNearUses = 8;
  // How many of the last uses are compared.
  static constexpr size_t kRecentMax = 16;
  // Without steps or periods that repeat nothing is learned, and this is not passed.
  static constexpr size_t kSegmentUsesMax = 1u << 17;
  // So many of the uses after a step are followed again; more would tell a session nothing that it
  // does not learn from the last ones.
  static constexpr size_t kFollowedAgainMax = 1024;
  // Periods ahead that are looked at: this one and two more.
  static constexpr int kPeriodsAhead = 3;

  void note(const PlanUse& use);
  void add_to_segment(const PlanUse& use);
  /// These and no others of its plan are made.
  bool has_begun_with(std::span<const PlanUse> uses) const;
  bool follow(const PlanUse& use);
  bool find_near(const PlanUse& use);
  void enter(PlanBook::PlanId plan_id, uint32_t position);
  void move_to(uint32_t position);
  /// Past the daemon's uses; at the end of the plan into the period that begins with `use`.
  bool begins_next_period(const PlanUse& use);
  /// Nothing but updates is left of it.
  bool is_at_end_of(PlanBook::PlanId plan_id) const;
  void forget_segment();
  void cut_where_it_repeats();

  std::shared_ptr<PlanBook> book_;
  std::shared_ptr<const Plan> plan_;
  PlanBook::Place place_;
  uint64_t base_ = uint64_t{1} << 40;  // no position is larger: it never falls below 0
  uint64_t epoch_ = 0;
  std::optional<PlanBook::PlanId> before_;  // the period before this one

  /// Uses since the last period ended.
  std::vector<PlanUse> segment_;
  /// For each prefix of segment_, the length of the longest prefix that it also ends with.
  std::vector<uint32_t> borders_;
  bool has_steps_ = false;  // some of it is no read
  /// The segment is what the plan says, from its beginning.
  bool is_exact_ = false;
  std::vector<PlanUse> recent_;
};

}  // namespace memd
