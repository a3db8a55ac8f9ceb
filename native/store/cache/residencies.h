// The one place where an entry's residency changes, with all that has to follow it.
#pragma once

#include <cstdint>
#include <memory>
#include <set>

#include "store/cache/entry.h"
#include "store/cache/entry_table.h"
#include "store/cache/eviction.h"
#include "store/cache/prefetch_window.h"
#include "store/cache/shard_table.h"
#include "store/cache/slots.h"
#include "store/cache/wait_lists.h"

namespace memd {

/// Questions of a change of residency to the rest of the job. Implemented by Job.
class ResidencyGates {
 public:
  virtual ~ResidencyGates() = default;
  /// The slot of the entry's speculative value, if there is one: while it is there the entry
  /// stays in the policy's order.
  virtual const Slot* early_slot(const Entry& entry) const = 0;
  /// A fact of the shard that a catalogue names is about to change.
  virtual void before_change(uint32_t shard_id) = 0;
  /// The shard has bytes that the next commit should write down.
  virtual void note_written(uint32_t shard_id) = 0;
};

/// Keeps the shard table, the ledger and the eviction policy in step with residency, and knows
/// which entries have a pending slot. An entry's slot is set before it moves to filling, and taken
/// after it has moved to absent. Owned by the Job; the server thread calls everything; nothing
/// blocks.
class Residencies {
 public:
  struct Parts {
    const EntryTable& entries;
    Slots& slots;
    ShardTable& table;
    FarthestNextUse& policy;
    PrefetchWindow& window;
    WaitLists& waits;
    ResidencyGates& gates;
  };

  explicit Residencies(const Parts& parts) : parts_(parts) {}
  Residencies(const Residencies&) = delete;
  Residencies& operator=(const Residencies&) = delete;

  void move(Entry& entry, Residency from, Residency to);
  /// The slot of a clean entry, for other bytes; the entry is absent then. nullptr where somebody
  /// leases it.
  std::unique_ptr<Slot> take_slot(Entry& entry);

  /// Work that uses the entry's bytes or its place, beyond this call. The caller decides what
  /// becomes of them meanwhile.
  void begin_task(Entry& entry);
  void end_task(Entry& entry);
  /// Its slots or their pins have changed otherwise: waiters for the entry, and for room, look
  /// again.
  void note_changed(const Entry& entry);

  /// Somebody writes there what takes the place of the entry's bytes when it is done.
  const std::set<uint32_t>& pending_ids() const { return pending_ids_; }
  void set_pending(Entry& entry, std::unique_ptr<Slot> slot);
  /// Lets a finished overwrite take the place of what was there.
  void settle_pending(Entry& entry);
  /// All that are finished, at the cost of those that were begun.
  void settle_all_pending();
  /// Those that are finished among the next `count_max`.
  void settle_pending(size_t count_max);

  /// See ResidencyGates.
  void before_change(uint32_t shard_id) { parts_.gates.before_change(shard_id); }
  void note_written(uint32_t shard_id) { parts_.gates.note_written(shard_id); }

  /// Ids of entries that are filling or draining, or have tasks; ascending.
  const std::set<uint32_t>& busy_ids() const { return busy_ids_; }

  /// Sets all that is dirty or whose overwrite is finished apart, for who takes one entry after the
  /// other. Until it is taken nobody writes it and no later overwrite takes its place: its bytes
  /// are those of this moment.
  void await_dirty();
  bool is_awaited(const Entry& entry) const {
    return awaited_ids_.contains(entry.id()) || awaited_pending_ids_.contains(entry.id());
  }
  /// The next of them, dirty as any other from here on; nullptr after the last.
  Entry* take_awaited();

  /// Bytes of entries that are being written back.
  uint64_t draining_bytes() const { return draining_bytes_; }

 private:
  /// Its overwrite is, and nothing is being copied from the bytes of before.
  bool is_finished(const Entry& entry) const;
  bool may_settle(const Entry& entry) const;
  void note_state(const Entry& entry);
  /// move() without a word to the ledger, which must not see what lies between.
  void move_unnoted(Entry& entry, Residency from, Residency to);

  const Parts parts_;
  std::set<uint32_t> busy_ids_;
  std::set<uint32_t> dirty_ids_;            // but for those that are awaited
  std::set<uint32_t> awaited_ids_;          // dirty ones
  std::set<uint32_t> awaited_pending_ids_;  // whose finished overwrite takes its place until then
  uint64_t draining_bytes_ = 0;
  // Ids of entries with a pending slot; some have lost it since, as their writer gave up.
  std::set<uint32_t> pending_ids_;
  uint32_t next_pending_id_ = 0;  // settle_pending() goes on there
};

}  // namespace memd
