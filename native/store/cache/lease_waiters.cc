#include "store/cache/lease_waiters.h"

#include <algorithm>
#include <iterator>

namespace memd {

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

std::list<LeaseWaiter> LeaseWaiters::take(const Chosen& chosen) {
  std::list<LeaseWaiter> taken;
  for (auto it = all_.begin(); it != all_.end();) {
    const auto next = std::next(it);
    if (chosen(*it)) taken.splice(taken.end(), all_, it);
    it = next;
  }
  return taken;
}

bool LeaseWaiters::any(const Chosen& chosen) const {
  return std::any_of(all_.begin(), all_.end(), chosen);
}

uint64_t LeaseWaiters::next_deadline_ns() const {
  uint64_t next_ns = std::numeric_limits<uint64_t>::max();
  for (const LeaseWaiter& waiter : all_) next_ns = std::min(next_ns, waiter.deadline_ns());
  return next_ns;
}

}  // namespace memd
