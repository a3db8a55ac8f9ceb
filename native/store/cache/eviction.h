// Which entry goes first when memory is short.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
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

/// Resident entries, the longest unused first. Called by the server thread.
class LeastRecentlyUsed {
 public:
  struct Resident {
    uint32_t entry_id = 0;
    EvictionPrice price = EvictionPrice::clean;
    bool is_aside = false;
  };
  using Visit = std::function<bool(uint32_t entry_id)>;

  void used(uint32_t entry_id, EvictionPrice price);
  void forget(uint32_t entry_id);
  /// No walk meets it until it is put back or used; it keeps its place.
  void set_aside(uint32_t entry_id) { set_aside(entry_id, true); }
  void put_back(uint32_t entry_id) { set_aside(entry_id, false); }
  /// Those of one price that are not aside, until `visit` returns false.
  void in_order(EvictionPrice price, const Visit& visit) const;
  bool contains(uint32_t entry_id) const { return last_uses_.contains(entry_id); }
  /// All, the longest unused first, by the number of their last use.
  const std::map<uint64_t, Resident>& residents() const { return residents_; }

 private:
  /// By the number of their last use.
  using Order = std::map<uint64_t, uint32_t>;
  Order& order(EvictionPrice price) { return price == EvictionPrice::clean ? clean_ : dirty_; }
  void set_aside(uint32_t entry_id, bool is_aside);

  std::map<uint64_t, Resident> residents_;
  std::unordered_map<uint32_t, uint64_t> last_uses_;
  Order clean_;
  Order dirty_;
  uint64_t use_count_ = 0;
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
/// and among entries that no plan has. With one session O(log n) a use, and O(1) for each entry
/// that a walk meets. Advice only: the store sets aside what it may not take, so that no walk meets
/// it again before that has changed. Called by the server thread.
class FarthestNextUse {
 public:
  /// `distance`: how many uses come before the next one of the entry, as far as that is known, or
  /// kNeverUsed.
  using Visit = std::function<bool(uint32_t entry_id, uint64_t distance)>;

  /// The entry became resident, or was leased. `price`: of letting it go.
  void used(uint32_t entry_id, EvictionPrice price);
  /// The entry is no longer resident.
  void forget(uint32_t entry_id);
  void set_aside(uint32_t entry_id);
  void put_back(uint32_t entry_id);
  /// Resident entries of one price in the order in which they should go, until `visit` returns
  /// false. `visit` must not change the policy.
  void in_order(EvictionPrice price, const Visit& visit) const;

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
  void in_order_of_all(const std::vector<const SessionPlan*>& planned,
                       EvictionPrice price,
                       const Visit& visit) const;

  LeastRecentlyUsed recent_;
  std::vector<SessionPlan*> sessions_;  // owned by their Session
  bool wants_look_ahead_ = false;
};

}  // namespace memd
