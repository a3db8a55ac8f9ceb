#include "store/cache/lease_waiters.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/check.h"

namespace memd {

LeaseWait reason_of(WaitsFor what) {
  switch (what) {
    case WaitsFor::earlier_step:
    case WaitsFor::step:
    case WaitsFor::step_or_sync:
      return LeaseWait::step;
    case WaitsFor::gradient_step:
      return LeaseWait::gradient;
    case WaitsFor::update:
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

void LeaseWaiter::note_waited(LeaseGrant& grant) const {
  const auto longest = std::max_element(waited_ns.begin(), waited_ns.end());
  grant.wait_reason = static_cast<LeaseWait>(longest - waited_ns.begin());
  for (const uint64_t wait_ns : waited_ns) grant.wait_ns += wait_ns;
}

void LeaseWaiter::refuse(const Status& status) {
  LeaseGrant none;
  note_waited(none);
  const LeaseReply to = std::move(reply);
  to(status, none);
}

void LeaseWaiters::remove(const LeaseWaiter& answered) {
  const auto newest = std::find_if(
      all_.rbegin(), all_.rend(), [&](const LeaseWaiter& each) { return &each == &answered; });
  MEMD_CHECK(newest != all_.rend());
  all_.erase(std::next(newest).base());
}

std::list<LeaseWaiter> LeaseWaiters::take(const Chosen& chosen) {
  std::list<LeaseWaiter> taken;
  for (auto it = all_.begin(); it != all_.end();) {
    const auto next = std::next(it);
    if (chosen(*it)) taken.splice(taken.end(), all_, it);
    it = next;
  }
  return taken;
}

void LeaseWaiters::fail_chosen(const Chosen& chosen, const Status& status) {
  for (LeaseWaiter& waiter : take(chosen)) {
    count(waiter);
    waiter.refuse(status);
  }
}

void LeaseWaiters::fail(const Entry& entry, const Status& status) {
  const auto waits_for_it = [&](const LeaseWaiter& waiter) {
    return shards_.find_entry(waiter.request.shard_id, waiter.request.part) == &entry;
  };
  fail_chosen(waits_for_it, status);
}

void LeaseWaiters::fail_for_room(const Status& status) {
  fail_chosen([](const LeaseWaiter& waiter) { return waiter.waits_for == WaitsFor::room; }, status);
}

bool LeaseWaiters::any_for_room() const {
  return std::any_of(all_.begin(), all_.end(), [](const LeaseWaiter& waiter) {
    return waiter.waits_for == WaitsFor::room;
  });
}

uint64_t LeaseWaiters::next_deadline_ns() const {
  uint64_t next_ns = std::numeric_limits<uint64_t>::max();
  for (const LeaseWaiter& waiter : all_) next_ns = std::min(next_ns, waiter.deadline_ns());
  return next_ns;
}

std::string LeaseWaiters::describe(const LeaseWaiter& waiter) const {
  const Entry* const entry = shards_.find_entry(waiter.request.shard_id, waiter.request.part);
  const std::string what = entry == nullptr ? "a deleted shard" : shards_.describe(*entry);
  switch (waiter.waits_for) {
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
    case WaitsFor::filling:
      return concat("the disk or an update: ", what, " is filling");
    case WaitsFor::reading:
      return concat("the disk: ", what, " is filling");
    case WaitsFor::draining:
      return concat("the disk: ", what, " is draining");
    case WaitsFor::tile_writes:
      return concat("the disk: the update of ", what, " is being written");
    case WaitsFor::first_writer:
      return concat("its first writer: ", what);
    case WaitsFor::writer:
      return concat("another writer of ", what);
    case WaitsFor::room:
      return "room in the arena";
  }
  return "";
}

void LeaseWaiters::count(LeaseWaiter& waiter) {
  const uint64_t now_ns = clock_.now_ns();
  const uint64_t since_ns = now_ns - std::exchange(waiter.counted_ns, now_ns);
  // Nobody stands still for a prefetch.
  if (waiter.waits_for == WaitsFor::nothing || waiter.request.prefetch) return;
  const auto reason = static_cast<size_t>(reason_of(waiter.waits_for));
  waiter.waited_ns[reason] += since_ns;
  counters_.lease_wait_reason_ns[reason] += since_ns;
}

}  // namespace memd
