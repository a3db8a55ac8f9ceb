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

  void used(uint32_t entry_id, EvictionPrice price);
  void forget(uint32_t entry_id);
  /// No walk meets it until it is put back or used; it keeps its place.
  void set_aside(uint32_t entry_id) { set_aside(entry_id, true); }
  void put_back(uint32_t entry_id) { set_aside(entry_id, false); }
  /// The first of one price after the one with that use that is not aside, and its use.
  std::optional<std::pair<uint64_t, uint32_t>> next(EvictionPrice price,
                                                    const std::optional<uint64_t>& behind) const;
  bool contains(uint32_t entry_id) const { return last_uses_.contains(entry_id); }
  /// nullptr where the entry is not resident.
  const Resident* find(uint32_t entry_id) const;
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
  explicit SessionPlan(std::shared_ptr<PlanBook> book) : cursor_(std::move(book)) {}

  /// The session's place, which its uses and its steps move.
  const PlanCursor& cursor() const { return cursor_; }
  PlanCursor::Seen use(uint32_t entry_id, UseKind kind) { return cursor_.use(entry_id, kind); }

  /// The period of a closed step ends once the uses before its cut were followed.
  void cut(PlanCut cut) { cuts_.push_back(std::move(cut)); }
  /// The first whose period has not ended; nullptr: none.
  const PlanCut* next_cut() const { return cuts_.empty() ? nullptr : &cuts_.front(); }
  /// The period of the next cut is over; `is_of_step` as PlanCursor::end_step() wants it.
  void end_period(const std::function<bool(const PlanUse&)>& is_of_step);
  /// The step's updates are made. Returns whether that moved the cursor: it waits for the cut.
  bool end_updates(uint64_t step);

  /// After the cursor went on. Returns what is resident and was passed over: all of it where the
  /// cursor is somewhere else now.
  std::vector<uint32_t> followed(std::span<const uint32_t> used_ids,
                                 const LeastRecentlyUsed& residents);
  /// In uses, or kNeverUsed.
  uint64_t distance(uint32_t entry_id) const;

  /// Coming uses, from the first whose entry may be neither resident nor being fetched, until
  /// `visit` returns false, which leaves its use for the next call.
  void look_ahead(const std::function<bool(const PlanUse& use, uint64_t time)>& visit);
  void look_again() { looked_until_ = 0; }
  void look_again_at(uint32_t entry_id);

  /// Resident entries by their next use; empty without a plan.
  const NextUseOrder& order() const { return order_; }
  void put(uint32_t entry_id, EvictionPrice price);
  void set_aside(uint32_t entry_id) { order_.set_aside(entry_id); }
  void put_back(uint32_t entry_id) { order_.put_back(entry_id); }
  void forget(uint32_t entry_id) { order_.remove(entry_id); }

 private:
  PlanCursor cursor_;
  NextUseOrder order_;
  uint64_t epoch_ = 0;  // of the cursor, when `order_` was made
  /// Entries that are used before this time are resident, or being fetched.
  uint64_t looked_until_ = 0;
  std::deque<PlanCut> cuts_;  // in the order of their steps
};

/// A place in the order in which entries should go. It stays useful while entries come, go and
/// change their place: a walk that begins later meets an entry that moves in front of it.
class EvictionCursor {
 private:
  friend class FarthestNextUse;
  /// Plans that made the order, and their epochs: it begins anew with other ones.
  std::vector<std::pair<const SessionPlan*, uint64_t>> made_by_;
  std::vector<std::optional<NextUseOrder::Position>> behind_;  // one for each of them
  std::optional<uint64_t> behind_use_;
};

/// Farthest next use first, over all sessions that have a plan; least recently used where none has,
/// and among entries that no plan has. O(log n) a use, and for each entry that a walk meets.
/// Sessions' clocks tick at their own rates: where several have plans, each entry is filed under
/// the one that needs it first, and a walk that meets it where that is another one by now files it
/// anew. Advice only: the store sets aside what it may not take, so that no walk meets
/// it again before that has changed. Called by the server thread.
class FarthestNextUse {
 public:
  /// `distance`: how many uses come before the next one of the entry, as far as that is known, or
  /// kNeverUsed.
  using Visit = std::function<bool(uint32_t entry_id, uint64_t distance)>;

  /// After the session's cursor went on: as SessionPlan::followed().
  std::vector<uint32_t> followed(SessionPlan& session, std::span<const uint32_t> used_ids);
  /// The entry became resident, or was leased. `price`: of letting it go.
  void used(uint32_t entry_id, EvictionPrice price);
  /// The entry is no longer resident.
  void forget(uint32_t entry_id);
  void set_aside(uint32_t entry_id);
  void put_back(uint32_t entry_id);
  /// Resident entries of one price in the order in which they should go, from `cursor` on, until
  /// `visit` returns false.
  void in_order(EvictionPrice price, EvictionCursor& cursor, const Visit& visit);
  void in_order(EvictionPrice price, const Visit& visit) {
    EvictionCursor from_the_beginning;
    in_order(price, from_the_beginning, visit);
  }

  void add(SessionPlan* session) { sessions_.push_back(session); }
  void remove(SessionPlan* session) {
    std::erase(sessions_, session);
    stop_filing();
  }
  const LeastRecentlyUsed& residents() const { return recent_; }
  /// An entry goes, or may be brought up from now on: whoever looked farther ahead looks again.
  void look_again_at(uint32_t entry_id);
  /// An absent entry may be fetched now that could not be before.
  void look_again();
  /// Something has changed for what plans may bring up: the next turn looks.
  void want_look_ahead() { wants_look_ahead_ = true; }
  bool take_look_ahead() { return std::exchange(wants_look_ahead_, false); }

 private:
  using Epochs = std::vector<std::pair<const SessionPlan*, uint64_t>>;

  /// The next entry, and its distance.
  std::optional<std::pair<uint32_t, uint64_t>> next(const std::vector<SessionPlan*>& planned,
                                                    EvictionPrice price,
                                                    EvictionCursor& cursor);
  /// Under the session that needs it first.
  void file(uint32_t entry_id);
  void file_all(const Epochs& epochs);
  void stop_filing() {
    first_uses_.clear();
    filed_for_.clear();
  }

  LeastRecentlyUsed recent_;
  std::vector<SessionPlan*> sessions_;  // owned by their Session
  /// By session, entries that no other session's plan uses sooner.
  std::map<const SessionPlan*, NextUseOrder> first_uses_;
  /// The plans that they were made for; empty: they are not kept.
  Epochs filed_for_;
  bool wants_look_ahead_ = false;
};

}  // namespace memd
