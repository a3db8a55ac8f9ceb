// Leases of one job: who gets which bytes, and what the others wait for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "base/turn_budget.h"
#include "store/cache/cache_parts.h"
#include "store/cache/fetches.h"
#include "store/cache/half_written.h"
#include "store/cache/lease_waiters.h"
#include "store/cache/room.h"
#include "store/cache/slot_fills.h"

namespace memd {

/// A lease is granted, which pins its shard's slot, or waits for a reason, which LeaseWaiter names,
/// or is refused. Each is answered once, at once or later inside advance() or a completion. Owned
/// by the Job; the server thread calls everything; nothing blocks.
class Leases {
 public:
  Leases(const CacheParts& parts,
         Room& room,
         Fetches& fetches,
         SlotFills& fills,
         HalfWritten& half_written)
      : parts_(parts), room_(room), fetches_(fetches), fills_(fills), half_written_(half_written) {}
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;

  void acquire(const LeaseRequest& request, LeaseReply reply);
  /// Retries what was woken, or as much of it as `turn` has time for. True where one was answered.
  bool advance(TurnBudget& turn);
  /// Grants what waited for slots that workers have filled; before anybody else sees those. True
  /// where there were any.
  bool grant_filled();
  /// One that `for_service` was asked for. `discard`: what was written is not whole.
  void release_service(const LeaseGrant& grant, bool discard);
  /// How often a lease was tried so far.
  uint64_t try_count() const { return try_count_; }

 private:
  enum class Grant : uint8_t { done, waiting };
  /// Nothing: the next step decides.
  using Outcome = std::optional<Grant>;
  bool try_waiting(TurnBudget& turn);
  /// One lease that is being tried.
  struct Try {
    LeaseWaiter& waiter;
    const LeaseRequest& request;
    Shard& shard;
    Entry& entry;
    bool reads = false;
  };

  LeaseWaiters::Verdict try_again(LeaseWaiter& waiter);
  /// Its entry moves still, and wakes it when it has: until then nothing else can grant it.
  bool is_on_its_way(const LeaseWaiter& waiter) const;
  static Grant wait(LeaseWaiter& waiter,
                    WaitsFor what,
                    uint32_t writer_index = LeaseWaiter::kAnyWriter);
  static Grant refuse(LeaseWaiter& waiter, const Status& status);
  Grant try_grant(LeaseWaiter& waiter);
  Grant grant_or_wait(LeaseWaiter& waiter);
  // In this order.
  Outcome check_call(const Try& asked) const;
  /// A gradient that its session had added to is void.
  Outcome check_notice(const Try& asked) const;
  Outcome check_written(const Try& asked) const;
  /// There is something to read.
  bool has_bytes(const Try& asked) const;
  Outcome check_steps(const Try& asked) const;
  Outcome check_contributors(const Try& asked) const;
  Outcome check_rank(const Try& asked) const;
  Outcome check_moving(const Try& asked);
  Outcome check_writer(const Try& asked);
  /// Writers of blobs and buffers get a slot of their own, which takes the old one's place once it
  /// is given back: readers see the old bytes or the new ones, whatever happens to the writer.
  Grant grant_bytes_writer(const Try& asked, bool keeps_old_bytes);
  Grant grant_pending(const Try& asked, std::unique_ptr<Slot> slot);
  Grant grant_resident(const Try& asked);
  /// A live view is never written: the writer waits for a copy, which takes the slot's place, and
  /// the old one lives until its last lease ends.
  Grant copy_for_writer(const Try& asked, uint32_t index);
  Outcome begin_writing(const Try& asked);
  Outcome check_pin_count(const Try& asked, uint32_t index) const;
  Grant bring_up(const Try& asked);
  std::unique_ptr<Slot> make_room(const Entry& entry, bool may_spill);

  LeaseGrant grant_of(const Try& asked, Slot& slot) const;
  void reply_granted(const Try& asked, Slot& slot);
  void note_grant(const Try& asked, const Slot& slot, const LeaseGrant& grant) const;
  void note_writer(const Try& asked);

  /// A writer copies a blob's old bytes, and they may lie where the copy has no room beside them:
  /// they go to disk, once, and come back where both fit. False where that makes no room either.
  bool move_old_bytes(LeaseWaiter& waiter);
  /// ok, or why nothing will ever make room for it.
  Status check_room_can_come(const LeaseWaiter& waiter) const;
  /// Why it is refused at its deadline.
  Status overdue(const LeaseWaiter& waiter) const;
  std::string describe_rank_before(const LeaseWaiter& waiter) const;
  std::string describe_holders() const;

  const CacheParts parts_;
  Room& room_;
  Fetches& fetches_;
  SlotFills& fills_;
  HalfWritten& half_written_;
  /// Somebody who came before the one that is being tried waits for room.
  bool is_room_wanted_ = false;
  uint64_t try_count_ = 0;
};

}  // namespace memd
