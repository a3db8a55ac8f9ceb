// The slots of one job in its arena: how they come and go, who has them pinned, and what the
// ledger is told of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "store/cache/entry.h"
#include "store/cache/entry_table.h"
#include "store/cache/job_memory.h"
#include "store/cache/pins.h"
#include "store/cache/session.h"
#include "store/cache/wait_lists.h"
#include "store/journal/job_ledger.h"

namespace memd {

/// Owns the pin counters that slots use, and slots that were replaced while leases were on them; an
/// entry owns its own. A slot that the shard table may name is withdrawn before it comes here.
/// Owned by the Job, whose memory and ledger come and go; the server thread calls everything;
/// nothing blocks.
class Slots {
 public:
  Slots(const EntryTable& entries,
        const std::vector<std::shared_ptr<Session>>& sessions,
        const std::unique_ptr<JobMemory>& memory,
        JobLedger& ledger,
        WaitLists& waits)
      : entries_(entries), sessions_(sessions), memory_(memory), ledger_(ledger), waits_(waits) {}
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  /// A slot of `bytes` in the arena if there is room at this moment.
  std::unique_ptr<Slot> make(uint64_t bytes, uint32_t pin_count);
  void free(std::unique_ptr<Slot> slot);
  /// Frees the slot, or keeps it until its last lease ends.
  void retire(std::unique_ptr<Slot> slot);
  /// Those whose last lease has ended, among the next kRetiredLookedAtMax of them.
  void free_retired();
  /// Whether free_retired() would free one, among the next `count_max` of them: it is the next
  /// then.
  bool any_retired_free(size_t count_max);
  size_t retired_count() const { return retired_.size(); }
  /// Frees all slots, those of entries and those that are leased too.
  void free_all();
  const std::list<std::unique_ptr<Slot>>& retired() const { return retired_; }

  // Slots of an earlier daemon.
  /// nullptr where the slot is outside of the arena, or where another one lies.
  std::unique_ptr<Slot> adopt(const SlotRecord& record);
  /// A run of counters that can be used again.
  void adopt_free(const SlotRecord& record) {
    pin_indexes_.give_back(record.pin_first, record.pin_count);
  }
  /// Every run of counters below `pin_end` was adopted.
  void end_adoption(uint32_t pin_end);

  // Pins. No client takes away what another one or the daemon holds.
  /// Pins of all sessions and of the daemon itself.
  PinCount pins(const Slot& slot, uint32_t index) const;
  bool is_pinned(const Slot& slot) const;
  bool has_writer(const Slot& slot) const;
  /// A writer's pin is about to be on the entry.
  void note_writer(const Entry& entry) {
    if (entry.kind() == EntryKind::parameter) written_ids_.insert(entry.id());
  }
  /// Ids of all parameters with a writer in their slot, and of some whose writer has gone.
  const std::set<uint32_t>& written_ids() const { return written_ids_; }
  /// The first parameter whose slot a writer has pinned; nullptr: none.
  const Entry* written_parameter();
  /// Whether any pin in the arena belongs to somebody else. Nothing: it has looked at so many slots
  /// that the next call has to go on.
  std::optional<bool> pinned_by_others(uint64_t session_id);
  /// For people: a call counts the leases of 4,096 entries anew, and goes on behind them in the
  /// next one; of other entries it says what the call before has counted.
  uint32_t lease_count() const;
  /// One session's leases. Other sessions take and give back pins in shared memory meanwhile.
  uint32_t lease_count(const Session& session) const;
  /// Leases of the daemon itself, which end with release_service().
  void pin_for_service(Slot& slot, uint32_t index, uint32_t pin);
  void release_service(Slot& slot, uint32_t index, uint32_t pin);
  uint32_t service_lease_count() const { return service_lease_count_; }
  /// Retired slots that were looked at so far.
  uint64_t retired_looked_at_count() const { return retired_looked_at_count_; }

  static constexpr size_t kRetiredLookedAtMax = 256;

  // Notes for the ledger, if there is one.
  /// The entry's slots.
  void note(const Entry& entry);
  void note_all();
  /// The entry's slot with a residency that the entry does not have yet.
  void note_as(const Entry& entry, Residency residency);
  /// The entry's slot holds none of its bytes any more.
  void note_made(const Slot& slot);

 private:
  bool is_pinned_by_others(const Slot& slot, uint64_t session_id) const;
  uint64_t lease_count(const Slot& slot) const;

  const EntryTable& entries_;
  const std::vector<std::shared_ptr<Session>>& sessions_;
  const std::unique_ptr<JobMemory>& memory_;
  JobLedger& ledger_;
  WaitLists& waits_;
  PinIndexes pin_indexes_;
  std::list<std::unique_ptr<Slot>> retired_;
  uint32_t service_lease_count_ = 0;
  uint64_t retired_looked_at_count_ = 0;
  /// Entries that may have a writer: who writes has asked.
  std::set<uint32_t> written_ids_;
  mutable std::vector<uint64_t> lease_counts_;  // of so many entries each
  mutable size_t next_lease_count_ = 0;         // to be counted anew
  /// The place where pinned_by_others() goes on, and how many entries in a row it found free.
  struct PinSearch {
    uint64_t session_id = 0;
    size_t next_id = 0;
    size_t seen_count = 0;
    size_t retired_seen_count = 0;
  };
  PinSearch pin_search_;
};

}  // namespace memd
