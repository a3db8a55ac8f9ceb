// The lists on which a job's waiting leases sleep, and the events that wake them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "store/cache/entry.h"

namespace memd {

/// Events that concern no single entry.
enum class WaitList : uint8_t {
  none,
  calls,    // a session's step was accepted, or refused
  writers,  // a step or sync began or ceased to hold writers of parameters
  room,     // memory may have become free; in the order in which the waiters came
};
inline constexpr size_t kWaitListCount = 4;

/// Every waiter hangs on its entry, and on one list where its reason has one. It sleeps until an
/// event wakes it; what wakes whom is listed at WaitsFor. Waiters are known by their tickets, which
/// are given in the order in which they come. A waiter stays where it hangs while it is tried, so
/// that no event of that moment is lost. Owned by the Job; the server thread calls everything;
/// nothing blocks.
class WaitLists {
 public:
  using Ticket = uint64_t;
  static constexpr Ticket kNoTicket = ~Ticket{0};

  WaitLists() = default;
  WaitLists(const WaitLists&) = delete;
  WaitLists& operator=(const WaitLists&) = delete;

  /// From here on it waits there and nowhere else.
  void hang(Ticket ticket, const Entry& entry, WaitList list);
  void take_off(Ticket ticket);

  // Events. A waiter that they wake is tried once, in this turn or the next.
  /// The entry's residency, tasks or slots changed, or a step did something to it.
  void wake(const Entry& entry);
  /// All on the list; on the list for room only the first, whose turn it is. The next one is woken
  /// when it becomes the first.
  void wake(WaitList list);
  void wake_all();
  /// No event: whoever is first for room goes on with what it began, or is told something.
  void wake_first_for_room();

  /// The first from `from` to below `before` that is to be tried; it is taken for tried from here
  /// on.
  std::optional<Ticket> take_woken(Ticket from, Ticket before);
  bool has_woken() const { return !woken_.empty(); }
  /// How often memory may have become free.
  uint64_t room_event_count() const { return room_event_count_; }

  const std::set<Ticket>& on(WaitList list) const { return lists_[static_cast<size_t>(list)]; }
  /// Those that hang on the entry, in the order in which they came.
  template <typename Visit>
  void for_each_on(const Entry& entry, const Visit& visit) const {
    for (auto it = by_entry_.lower_bound({key_of(entry), 0});
         it != by_entry_.end() && it->first == key_of(entry);
         ++it) {
      visit(it->second);
    }
  }

 private:
  /// The owner of its bytes: a staged buffer and the one that it replaces exchange their entries.
  using Key = std::pair<EntryKind, uint32_t>;
  static Key key_of(const Entry& entry) { return {entry.kind(), entry.owner()}; }

  struct Place {
    Key key;
    WaitList list = WaitList::none;
  };

  void leave(Ticket ticket, WaitList list);

  std::unordered_map<Ticket, Place> places_;
  std::set<std::pair<Key, Ticket>> by_entry_;
  /// By WaitList; nobody is on `none`.
  std::array<std::set<Ticket>, kWaitListCount> lists_;
  std::set<Ticket> woken_;
  uint64_t room_event_count_ = 0;
};

}  // namespace memd
