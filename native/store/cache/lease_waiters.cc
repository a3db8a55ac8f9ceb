#include "store/cache/lease_waiters.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace memd {
namespace {

WaitList list_of(WaitsFor what) {
  switch (what) {
    case WaitsFor::earlier_step:
      return WaitList::calls;
    case WaitsFor::step_or_sync:
      return WaitList::writers;
    case WaitsFor::room:
      return WaitList::room;
    default:
      return WaitList::none;
  }
}

bool waits_for_writer(WaitsFor what) {
  return what == WaitsFor::first_writer || what == WaitsFor::writer;
}

}  // namespace

LeaseWait reason_of(WaitsFor what) {
  switch (what) {
    case WaitsFor::earlier_step:
    case WaitsFor::step:
    case WaitsFor::step_or_sync:
      return LeaseWait::step;
    case WaitsFor::gradient_step:
    case WaitsFor::rank:
      return LeaseWait::gradient;
    case WaitsFor::update:
    case WaitsFor::copy:
    case WaitsFor::zeroing:
      return LeaseWait::update;
    case WaitsFor::nothing:
    case WaitsFor::filling:
    case WaitsFor::reading:
    case WaitsFor::draining:
    case WaitsFor::tile_writes:
      return LeaseWait::disk;
    case WaitsFor::first_writer:
    case WaitsFor::writer:
      return LeaseWait::writer;
    case WaitsFor::room:
      return LeaseWait::room;
  }
  return LeaseWait::disk;
}

uint64_t LeaseWaiter::uncounted_ns(uint64_t now_ns) const {
  // Nobody stands still for a prefetch.
  const bool waits = waits_for_ != WaitsFor::nothing && !request_.prefetch;
  return waits ? now_ns - counted_ns_ : 0;
}

uint64_t LeaseWaiter::count_wait(uint64_t now_ns) {
  const uint64_t since_ns = uncounted_ns(now_ns);
  counted_ns_ = now_ns;
  waited_ns_[static_cast<size_t>(reason_of(waits_for_))] += since_ns;
  return since_ns;
}

void LeaseWaiter::note_waited(LeaseGrant& grant) const {
  const auto longest = std::max_element(waited_ns_.begin(), waited_ns_.end());
  grant.wait_reason = static_cast<LeaseWait>(longest - waited_ns_.begin());
  for (const uint64_t wait_ns : waited_ns_) grant.wait_ns += wait_ns;
}

void LeaseWaiter::refuse(const Status& status) {
  LeaseGrant none;
  note_waited(none);
  const LeaseReply reply = std::move(reply_);
  reply(status, none);
}

void LeaseWaiter::grant(const LeaseGrant& lease) {
  const LeaseReply reply = std::move(reply_);
  reply(Status::ok(), lease);
}

LeaseWaiter& LeaseWaiters::add(LeaseWaiter added) {
  const WaitLists::Ticket ticket = next_ticket_++;
  added.give_ticket(ticket);
  LeaseWaiter& waiter = all_.emplace(ticket, std::move(added)).first->second;
  deadlines_.emplace(waiter.deadline_ns(), waiter.ticket());
  hang(waiter);
  return waiter;
}

void LeaseWaiters::hang(LeaseWaiter& waiter) {
  const Entry& entry = *find_entry(shards_, waiter.request());
  lists_.hang(waiter.ticket(), entry, list_of(waiter.waits_for()));
  stop_watching(waiter);
  if (waits_for_writer(waiter.waits_for())) {
    const Watched watched(entry.id(), waiter.writer_index());
    watched_[watched].insert(waiter.ticket());
    watching_.emplace(waiter.ticket(), watched);
  }
}

void LeaseWaiters::stop_watching(const LeaseWaiter& waiter) {
  const auto found = watching_.find(waiter.ticket());
  if (found == watching_.end()) return;
  const auto watched = watched_.find(found->second);
  watched->second.erase(waiter.ticket());
  if (watched->second.empty()) watched_.erase(watched);
  watching_.erase(found);
}

LeaseWaiter LeaseWaiters::take_out(WaitLists::Ticket ticket) {
  LeaseWaiter waiter = std::move(all_.extract(ticket).mapped());
  deadlines_.erase({waiter.deadline_ns(), ticket});
  stop_watching(waiter);
  lists_.take_off(ticket);
  return waiter;
}

void LeaseWaiters::remove(const LeaseWaiter& answered) { take_out(answered.ticket()); }

void LeaseWaiters::end(const LeaseWaiter& waiter, const Status& refusal) {
  LeaseWaiter over = take_out(waiter.ticket());
  if (!refusal.is_ok()) over.refuse(refusal);
}

std::list<LeaseWaiter> LeaseWaiters::take(const std::vector<WaitLists::Ticket>& tickets) {
  std::list<LeaseWaiter> taken;
  for (const WaitLists::Ticket ticket : tickets) {
    taken.push_back(take_out(ticket));
    count_wait(taken.back());
  }
  return taken;
}

std::list<LeaseWaiter> LeaseWaiters::take(const Chosen& chosen) {
  std::vector<WaitLists::Ticket> tickets;
  for (const auto& [ticket, waiter] : all_) {
    if (chosen(waiter)) tickets.push_back(ticket);
  }
  return take(tickets);
}

std::list<LeaseWaiter> LeaseWaiters::take_all() {
  return take([](const LeaseWaiter&) { return true; });
}

std::list<LeaseWaiter> LeaseWaiters::take(const Entry& entry, const Chosen& chosen) {
  std::vector<WaitLists::Ticket> tickets;
  lists_.for_each_on(entry, [&](WaitLists::Ticket ticket) {
    if (chosen(all_.at(ticket))) tickets.push_back(ticket);
  });
  return take(tickets);
}

void LeaseWaiters::fail(const Entry& entry, const Status& status) {
  for (LeaseWaiter& waiter : take(entry, [](const LeaseWaiter&) { return true; }))
    waiter.refuse(status);
}

void LeaseWaiters::fail_for_room(const Status& status) {
  const std::set<WaitLists::Ticket>& all = lists_.on(WaitList::room);
  for (LeaseWaiter& waiter : take(std::vector(all.begin(), all.end()))) waiter.refuse(status);
}

bool LeaseWaiters::is_behind_for_room(const LeaseWaiter& waiter) const {
  const std::set<WaitLists::Ticket>& all = lists_.on(WaitList::room);
  return !all.empty() && *all.begin() < waiter.ticket();
}

uint64_t LeaseWaiters::next_deadline_ns() const {
  return deadlines_.empty() ? std::numeric_limits<uint64_t>::max() : deadlines_.begin()->first;
}

bool LeaseWaiters::is_written(const Entry& entry, uint32_t index) const {
  // An entry that moves wakes its waiters at the end; a finished overwrite takes its place then.
  if (entry.residency() == Residency::filling || entry.residency() == Residency::draining)
    return true;
  if (entry.pending() != nullptr) return slots_.has_writer(*entry.pending());
  if (entry.slot() == nullptr) return false;
  return index == LeaseWaiter::kAnyWriter ? slots_.has_writer(*entry.slot())
                                          : slots_.pins(*entry.slot(), index).has_writers();
}

void LeaseWaiters::wake_released() {
  for (const auto& [watched, tickets] : watched_) {
    const Entry* const entry = shards_.entry(watched.first);
    if (entry == nullptr || is_written(*entry, watched.second)) continue;
    lists_.wake(*entry);
  }
  if (const LeaseWaiter* const first = first_for_room();
      first != nullptr && has_lost_readers(*first))
    lists_.wake(WaitList::room);
}

bool LeaseWaiters::has_lost_readers(const LeaseWaiter& waiter) const {
  if (waiter.writer_index() == LeaseWaiter::kAnyWriter) return false;
  const Entry* const entry = find_entry(shards_, waiter.request());
  return entry->slot() == nullptr || slots_.pins(*entry->slot(), waiter.writer_index()).all() == 0;
}

std::string LeaseWaiters::describe(const LeaseWaiter& waiter) const {
  const Entry* const entry = find_entry(shards_, waiter.request());
  const std::string what = entry == nullptr ? "a deleted shard" : shards_.describe(*entry);
  switch (waiter.waits_for()) {
    case WaitsFor::nothing:
      return "";
    case WaitsFor::earlier_step:
      return concat("the step before it, which has not come yet: ", what);
    case WaitsFor::step:
      return concat("a step that uses ", what);
    case WaitsFor::gradient_step:
      return concat("the step that uses ", what);
    case WaitsFor::step_or_sync:
      return concat("a step or sync that writes back ", what);
    case WaitsFor::update:
      return concat("an update of ", what);
    case WaitsFor::copy:
      return concat("a copy for its writer: ", what);
    case WaitsFor::filling:
      return concat("the disk or an update: ", what, " is filling");
    case WaitsFor::reading:
      return concat("the disk: ", what, " is filling");
    case WaitsFor::zeroing:
      return concat("the workers: ", what, " is filled with zeros");
    case WaitsFor::draining:
      return concat("the disk: ", what, " is draining");
    case WaitsFor::tile_writes:
      return concat("the disk: the update of ", what, " is being written");
    case WaitsFor::first_writer:
      return concat("its first writer: ", what);
    case WaitsFor::writer:
      return concat("another writer of ", what);
    case WaitsFor::rank:
      return concat("the part of another rank in ", what);
    case WaitsFor::room:
      return "room in the arena";
  }
  return "";
}

void LeaseWaiters::count_wait(LeaseWaiter& waiter) {
  const uint64_t since_ns = waiter.count_wait(clock_.now_ns());
  counters_.lease_wait_reason_ns[static_cast<size_t>(reason_of(waiter.waits_for()))] += since_ns;
}

JobCounters LeaseWaiters::counters_until_now() const {
  JobCounters counters = counters_;
  const uint64_t now_ns = clock_.now_ns();
  for (const auto& [ticket, waiter] : all_) {
    const auto reason = static_cast<size_t>(reason_of(waiter.waits_for()));
    counters.lease_wait_reason_ns[reason] += waiter.uncounted_ns(now_ns);
  }
  return counters;
}

}  // namespace memd
