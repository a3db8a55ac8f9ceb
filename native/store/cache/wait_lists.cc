#include "store/cache/wait_lists.h"

#include "base/check.h"

namespace memd {

void WaitLists::hang(Ticket ticket, const Entry& entry, WaitList list) {
  const Key key = key_of(entry);
  const auto [found, is_new] = places_.try_emplace(ticket, Place{.key = key});
  if (is_new) by_entry_.emplace(key, ticket);
  Place& place = found->second;
  MEMD_CHECK(place.key == key);  // a waiter asks for one shard
  if (place.list == list) return;
  leave(ticket, place.list);
  place.list = list;
  if (list == WaitList::none) return;
  std::set<Ticket>& all = lists_[static_cast<size_t>(list)];
  all.insert(ticket);
  // Events until here have woken somebody else, or nobody.
  if (list == WaitList::room && *all.begin() == ticket) woken_.insert(ticket);
}

void WaitLists::leave(Ticket ticket, WaitList list) {
  if (list == WaitList::none) return;
  std::set<Ticket>& all = lists_[static_cast<size_t>(list)];
  const bool was_first = *all.begin() == ticket;
  all.erase(ticket);
  if (list == WaitList::room && was_first) wake_first_for_room();
}

void WaitLists::take_off(Ticket ticket) {
  const auto found = places_.find(ticket);
  if (found == places_.end()) return;
  const Place place = found->second;
  by_entry_.erase({place.key, ticket});
  leave(ticket, place.list);
  woken_.erase(ticket);
  places_.erase(found);
}

void WaitLists::wake(const Entry& entry) {
  if (places_.empty()) return;
  for_each_on(entry, [this](Ticket ticket) { woken_.insert(ticket); });
}

void WaitLists::wake(WaitList list) {
  if (list == WaitList::room) {
    ++room_event_count_;
    return wake_first_for_room();
  }
  const std::set<Ticket>& all = on(list);
  woken_.insert(all.begin(), all.end());
}

void WaitLists::wake_first_for_room() {
  const std::set<Ticket>& all = on(WaitList::room);
  if (!all.empty()) woken_.insert(*all.begin());
}

void WaitLists::wake_all() {
  for (const auto& [ticket, place] : places_) woken_.insert(ticket);
}

std::optional<WaitLists::Ticket> WaitLists::take_woken(Ticket from, Ticket before) {
  const auto found = woken_.lower_bound(from);
  if (found == woken_.end() || *found >= before) return std::nullopt;
  const Ticket ticket = *found;
  woken_.erase(found);
  return ticket;
}

}  // namespace memd
