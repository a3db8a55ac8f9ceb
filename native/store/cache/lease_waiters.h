// Leases of one job that are asked for and not answered.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/status.h"
#include "ring/layout.h"
#include "store/cache/job_counters.h"
#include "store/cache/lease_request.h"
#include "store/cache/shards.h"

namespace memd {

/// Why a lease is not granted yet.
enum class WaitsFor : uint8_t {
  nothing,  // it was not tried yet
  earlier_step,
  step,
  gradient_step,
  step_or_sync,
  update,
  filling,
  reading,
  draining,
  tile_writes,
  first_writer,
  writer,
  room,
};
/// As clients and metrics know it.
LeaseWait reason_of(WaitsFor what);

struct LeaseWaiter {
  LeaseRequest request;
  LeaseReply reply;
  uint64_t started_ns = 0;
  WaitsFor waits_for = WaitsFor::nothing;
  bool counted_as_miss = false;
  bool has_moved_old_bytes = false;
  bool has_raised = false;  // the priority of a prefetch under way that it found
  uint64_t counted_ns = 0;  // until when its wait is in waited_ns
  std::array<uint64_t, kLeaseWaitCount> waited_ns{};

  uint64_t deadline_ns() const { return started_ns + request.timeout_ns; }
  void put_off(WaitsFor what) {
    counted_as_miss = true;
    waits_for = what;
  }
  /// Into `grant`: how long it has waited, and for what most of it.
  void note_waited(LeaseGrant& grant) const;
  /// Answers it, once.
  void refuse(const Status& status);
};

/// In the order in which they came. Owned by the Job; the server thread calls everything; nothing
/// blocks.
class LeaseWaiters {
 public:
  using Chosen = std::function<bool(const LeaseWaiter&)>;

  LeaseWaiters(const Shards& shards, JobCounters& counters, const Clock& clock)
      : shards_(shards), counters_(counters), clock_(clock) {}
  LeaseWaiters(const LeaseWaiters&) = delete;
  LeaseWaiters& operator=(const LeaseWaiters&) = delete;

  LeaseWaiter& add(LeaseWaiter waiter) { return all_.emplace_back(std::move(waiter)); }
  /// It was answered at once. Others may have come meanwhile.
  void remove(const LeaseWaiter& answered);
  /// Out of the queue; the caller answers them.
  std::list<LeaseWaiter> take(const Chosen& chosen);
  std::list<LeaseWaiter> take_all() { return std::exchange(all_, {}); }
  /// Refuses every lease that waits for the entry.
  void fail(const Entry& entry, const Status& status);
  /// Refuses every lease that waits for room.
  void fail_for_room(const Status& status);

  bool empty() const { return all_.empty(); }
  bool any_for_room() const;
  /// The deadline of the first that runs out; the largest number: nobody waits.
  uint64_t next_deadline_ns() const;
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const LeaseWaiter& waiter : all_) visit(waiter);
  }
  /// Its reason to wait, for people.
  std::string describe(const LeaseWaiter& waiter) const;
  /// Its wait until now has the reason that it has now.
  void count(LeaseWaiter& waiter);

  /// Whether a waiter stays, was answered, or is refused with `refusal`.
  struct Verdict {
    bool stays = true;
    Status refusal{};
  };
  /// Asks `judge` of each, once. True where one was answered.
  template <typename Judge>
  bool advance(const Judge& judge) {
    bool progress = false;
    for (auto it = all_.begin(); it != all_.end();) {
      const Verdict verdict = judge(*it);
      if (verdict.stays) {
        ++it;
        continue;
      }
      LeaseWaiter over = std::move(*it);
      it = all_.erase(it);
      if (!verdict.refusal.is_ok()) over.refuse(verdict.refusal);
      progress = true;
    }
    return progress;
  }

 private:
  void fail_chosen(const Chosen& chosen, const Status& status);

  const Shards& shards_;
  JobCounters& counters_;
  const Clock& clock_;
  std::list<LeaseWaiter> all_;
};

}  // namespace memd
