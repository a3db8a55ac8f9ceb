// Which entry goes first when memory is short.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/next_use_order.h"
#include "plan/plan_book.h"

namespace memd {

/// Nobody is known to use it.
inline constexpr uint64_t kNeverUsed = std::numeric_limits<uint64_t>::max();

/// Advice only: the store skips what is pinned or in use. Called by the server thread.
class EvictionPolicy {
 public:
  /// `distance`: how many uses come before the next one of the entry, as far as that is known, or
  /// kNeverUsed.
  using Visit = std::function<bool(uint32_t entry_id, uint64_t distance)>;

  virtual ~EvictionPolicy() = default;
  /// The entry became resident, or was leased. `price`: of letting it go.
  virtual void used(uint32_t entry_id, EvictionPrice price) = 0;
  /// The entry is no longer resident.
  virtual void forget(uint32_t entry_id) = 0;
  /// Resident entries in the order in which they should go, until `visit` returns false. `visit`
  /// must not change the policy.
  virtual void in_order(const Visit& visit) const = 0;
};

class LeastRecentlyUsed final : public EvictionPolicy {
 public:
  struct Resident {
    uint32_t entry_id = 0;
    EvictionPrice price = EvictionPrice::clean;
  };

  void used(uint32_t entry_id, EvictionPrice price) override;
  void forget(uint32_t entry_id) override;
  void in_order(const Visit& visit) const override;
  /// Front: longest unused.
  const std::list<Resident>& order() const { return order_; }

 private:
  std::list<Resident> order_;
  std::unordered_map<uint32_t, std::list<Resident>::iterator> places_;
};

/// A step that a session has closed, whose end in the log of uses is still to be read.
struct PlanCut {
  uint64_t step = 0;
  uint64_t use_tail = 0;         // ServerRing's, when it was closed
  std::vector<PlanUse> updates;  // in the daemon's order
  bool is_made = false;          // the updates are
};

/// One session's place in the plans of its job, and resident entries by their next use there.
class SessionPlan {
 public:
  explicit SessionPlan(std::shared_ptr<PlanBook> book) : cursor(std::move(book)) {}

  /// After the cursor went on. Returns what is resident and was passed over: all of it where the
  /// cursor is somewhere else now.
  std::vector<uint32_t> followed(std::span<const uint32_t> used_ids,
                                 const LeastRecentlyUsed& residents);
  void put(uint32_t entry_id, EvictionPrice price);
  /// In uses, or kNeverUsed.
  uint64_t distance(uint32_t entry_id) const;

  PlanCursor cursor;
  /// Resident entries; empty without a plan.
  NextUseOrder order;
  /// Entries that are used before this time are resident, or being fetched.
  uint64_t looked_until = 0;
  /// In the order of their steps.
  std::deque<PlanCut> cuts;

 private:
  uint64_t epoch_ = 0;  // of the cursor, when `order` was made
};

/// Farthest next use first, over all sessions that have a plan; least recently used where none has,
/// and among entries that no plan has. With one session O(log n) a use and O(1) an eviction.
class FarthestNextUse final : public EvictionPolicy {
 public:
  void used(uint32_t entry_id, EvictionPrice price) override;
  void forget(uint32_t entry_id) override;
  void in_order(const Visit& visit) const override;

  void add(SessionPlan* session) { sessions_.push_back(session); }
  void remove(SessionPlan* session) { std::erase(sessions_, session); }
  const LeastRecentlyUsed& residents() const { return recent_; }
  /// An entry goes, or may be brought up from now on: whoever looked farther ahead looks again.
  void look_again_at(uint32_t entry_id);
  /// An absent entry may be fetched now that could not be before.
  void look_again();
  /// Something has changed for what plans may bring up: the next turn looks.
  void want_look_ahead() { wants_look_ahead_ = true; }
  bool take_look_ahead() { return std::exchange(wants_look_ahead_, false); }

 private:
  LeastRecentlyUsed recent_;
  std::vector<SessionPlan*> sessions_;  // owned by their Session
  bool wants_look_ahead_ = false;
};

}  // namespace memd
