// Leases of one job that are asked for and not answered.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/turn_budget.h"
#include "ring/layout.h"
#include "store/cache/job_counters.h"
#include "store/cache/lease_request.h"
#include "store/cache/shards.h"
#include "store/cache/slots.h"
#include "store/cache/wait_lists.h"

namespace memd {

/// Why a lease is not granted yet, and which event wakes it. Each waiter is woken as well by every
/// change of its entry's residency, slots and tasks (Residencies), by the end of a session, and by
/// the stop of the job.
enum class WaitsFor : uint8_t {
  nothing,        // it was not tried yet
  earlier_step,   // Steps accepts or refuses a call: the list `calls`
  step,           // the step or the staged buffer publishes or undoes: Step, StagedBuffers
  gradient_step,  // the gradient is dropped or unsealed: ShardStore::drop_gradients_of, Step
  step_or_sync,   // writers are held no longer: the list `writers`
  update,         // the last task ends, or the step publishes the bucket
  copy,           // the copy's task ends
  filling,        // the residency changes
  reading,        // the residency changes
  zeroing,        // the residency changes
  draining,       // the residency changes
  tile_writes,    // the bucket's last task ends, or its flush
  first_writer,   // the writer's pin is gone: LeaseWaiters::wake_released() looks at it
  writer,         // the writer's pin is gone: the same
  rank,           // another rank adds to the sum: Leases; or ends its gradients, for all: Gradients
  room,           // the list `room`; pins that are gone: Room::look_for_releases()
};
/// As clients and metrics know it.
LeaseWait reason_of(WaitsFor what);

/// One lease that is asked for, from its request to its answer. Owned by LeaseWaiters.
class LeaseWaiter {
 public:
  /// It waits for a writer of any shard in the slot.
  static constexpr uint32_t kAnyWriter = ~uint32_t{0};

  LeaseWaiter(const LeaseRequest& asked, LeaseReply answers, uint64_t now_ns)
      : request_(asked), reply_(std::move(answers)), started_ns_(now_ns), counted_ns_(now_ns) {}

  const LeaseRequest& request() const { return request_; }
  uint64_t started_ns() const { return started_ns_; }
  /// LeaseWaiters gives it one when it hangs it up.
  WaitLists::Ticket ticket() const { return ticket_; }
  void give_ticket(WaitLists::Ticket ticket) { ticket_ = ticket; }
  WaitsFor waits_for() const { return waits_for_; }
  /// The counter whose writer, or readers, it waits for.
  uint32_t writer_index() const { return writer_index_; }
  /// It was tried in vain.
  bool is_miss() const { return is_miss_; }
  uint64_t deadline_ns() const { return started_ns_ + request_.timeout_ns; }
  void put_off(WaitsFor what, uint32_t writer_index = kAnyWriter) {
    is_miss_ = true;
    waits_for_ = what;
    writer_index_ = writer_index;
  }
  /// Its wait until now has the reason that it has now. Returns what that adds.
  uint64_t count_wait(uint64_t now_ns);
  uint64_t uncounted_ns(uint64_t now_ns) const;
  /// Into `grant`: how long it has waited, and for what most of it.
  void note_waited(LeaseGrant& grant) const;
  /// True once: a prefetch under way that it finds becomes a demanded read.
  bool raises_prefetch() { return !std::exchange(has_raised_, true); }
  /// Room was made once for the old bytes beside the new ones.
  bool has_moved_old_bytes() const { return has_moved_old_bytes_; }
  void note_moved_old_bytes() { has_moved_old_bytes_ = true; }
  /// Answers it, once: with a lease, or with a reason.
  void grant(const LeaseGrant& lease);
  void refuse(const Status& status);

 private:
  LeaseRequest request_;
  LeaseReply reply_;
  uint64_t started_ns_;
  WaitLists::Ticket ticket_ = 0;
  bool has_moved_old_bytes_ = false;
  bool has_raised_ = false;
  WaitsFor waits_for_ = WaitsFor::nothing;
  uint32_t writer_index_ = kAnyWriter;
  bool is_miss_ = false;
  uint64_t counted_ns_ = 0;  // until when its wait is in waited_ns_
  std::array<uint64_t, kLeaseWaitCount> waited_ns_{};
};

/// Owns them, in the order in which they came, and has WaitLists say which of them are tried again.
/// Owned by the Job; the server thread calls everything; nothing blocks.
class LeaseWaiters {
 public:
  using Chosen = std::function<bool(const LeaseWaiter&)>;

  LeaseWaiters(const Shards& shards,
               const Slots& slots,
               WaitLists& lists,
               JobCounters& counters,
               const Clock& clock)
      : shards_(shards), slots_(slots), lists_(lists), counters_(counters), clock_(clock) {}
  LeaseWaiters(const LeaseWaiters&) = delete;
  LeaseWaiters& operator=(const LeaseWaiters&) = delete;

  /// It hangs on its entry, and sleeps.
  LeaseWaiter& add(LeaseWaiter waiter);
  /// After it was tried in vain: it hangs where its reason says.
  void hang(LeaseWaiter& waiter);
  /// It was answered.
  void remove(const LeaseWaiter& answered);
  /// Out of the queue; the caller answers them.
  std::list<LeaseWaiter> take(const Chosen& chosen);
  std::list<LeaseWaiter> take_all();
  /// The same among those that wait for the entry.
  std::list<LeaseWaiter> take(const Entry& entry, const Chosen& chosen);
  /// Refuses every lease that waits for the entry.
  void fail(const Entry& entry, const Status& status);
  /// Refuses every lease that waits for room.
  void fail_for_room(const Status& status);

  bool empty() const { return all_.empty(); }
  size_t count() const { return all_.size(); }
  bool any_for_room() const { return !lists_.on(WaitList::room).empty(); }
  /// The first that waits for room; nullptr: nobody does.
  const LeaseWaiter* first_for_room() const {
    return any_for_room() ? &all_.at(*lists_.on(WaitList::room).begin()) : nullptr;
  }
  /// Somebody who came before it waits for room.
  bool is_behind_for_room(const LeaseWaiter& waiter) const;
  /// One of them waits for pins to be given back, which clients do without a request.
  bool wants_releases() const { return !watched_.empty() || any_for_room(); }
  /// Somebody is to be tried again.
  bool has_woken() const { return lists_.has_woken(); }
  /// The deadline of the first that runs out; the largest number: nobody waits.
  uint64_t next_deadline_ns() const;
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const auto& [ticket, waiter] : all_) visit(waiter);
  }
  /// Its reason to wait, for people.
  std::string describe(const LeaseWaiter& waiter) const;
  /// Its wait until now has the reason that it has now.
  void count_wait(LeaseWaiter& waiter);
  /// The job's, with what leases that wait still have waited until now.
  JobCounters counters_until_now() const;

  /// Whether a waiter stays, was answered, or is refused with `refusal`.
  struct Verdict {
    bool stays = true;
    Status refusal{};
  };
  /// Asks `judge` of each that was woken, once, in the order in which they came; then `overdue` of
  /// each whose deadline has passed, which it refuses. Where `turn` has no time for all of them,
  /// the next turn goes on behind the last one. True where one was answered.
  template <typename Judge, typename Overdue>
  bool advance(const Judge& judge, const Overdue& overdue, TurnBudget& turn) {
    wake_released();
    bool progress = false;
    const WaitLists::Ticket began = std::exchange(try_from_, 0);
    for (WaitLists::Ticket from = began, before = WaitLists::kNoTicket;;) {
      const auto ticket = lists_.take_woken(from, before);
      if (!ticket && (began == 0 || before == began)) break;
      if (!ticket) {
        from = 0;
        before = began;
        continue;
      }
      from = *ticket + 1;
      LeaseWaiter& waiter = all_.at(*ticket);
      const Verdict verdict = judge(waiter);
      if (verdict.stays) {
        hang(waiter);
      } else {
        end(waiter, verdict.refusal);
        progress = true;
      }
      if (lists_.has_woken() && turn.is_spent()) {
        try_from_ = from;
        break;
      }
    }
    while (!deadlines_.empty() && deadlines_.begin()->first <= clock_.now_ns()) {
      LeaseWaiter& waiter = all_.at(deadlines_.begin()->second);
      count_wait(waiter);
      end(waiter, overdue(waiter));
      progress = true;
    }
    return progress;
  }

 private:
  /// An entry, and which of its slot's counters.
  using Watched = std::pair<uint32_t, uint32_t>;

  LeaseWaiter take_out(WaitLists::Ticket ticket);
  std::list<LeaseWaiter> take(const std::vector<WaitLists::Ticket>& tickets);
  void end(const LeaseWaiter& waiter, const Status& refusal);
  void stop_watching(const LeaseWaiter& waiter);
  /// Looks at the pins of each entry whose writer somebody waits for.
  void wake_released();
  bool is_written(const Entry& entry, uint32_t index) const;
  /// It needed room for a copy beside the readers of its shard, and may have no need of that now.
  bool has_lost_readers(const LeaseWaiter& waiter) const;

  const Shards& shards_;
  const Slots& slots_;
  WaitLists& lists_;
  JobCounters& counters_;
  const Clock& clock_;
  std::map<WaitLists::Ticket, LeaseWaiter> all_;
  std::set<std::pair<uint64_t, WaitLists::Ticket>> deadlines_;
  std::map<Watched, std::set<WaitLists::Ticket>> watched_;
  std::unordered_map<WaitLists::Ticket, Watched> watching_;
  WaitLists::Ticket next_ticket_ = 0;
  WaitLists::Ticket try_from_ = 0;  // not 0: where a turn that had no more time stopped
};

}  // namespace memd
