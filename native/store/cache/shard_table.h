// A job's shard table in shared memory: where each shard lies, for leases without a request.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "ring/layout.h"
#include "ring/shared_memory.h"
#include "store/cache/entry.h"
#include "store/cache/shards.h"
#include "store/cache/slots.h"
#include "store/cache/training_group.h"
#include "store/journal/progress.h"

namespace memd {

/// Owns the table; Shard::is_published and Slot::is_published say what is in it. A client that
/// leases without a request is in the middle of it at any time, so that nothing which is read of
/// pins holds before the entry, or the shard, is withdrawn. Owned by the Job; the server thread
/// calls everything; nothing blocks.
class ShardTable {
 public:
  ShardTable(SharedMemory memory,
             Shards& shards,
             const Slots& slots,
             const TrainingGroup& group,
             const JobProgress& progress)
      : memory_(std::move(memory)),
        shards_(shards),
        slots_(slots),
        group_(group),
        progress_(progress) {}
  ShardTable(const ShardTable&) = delete;
  ShardTable& operator=(const ShardTable&) = delete;

  /// TableLayout.
  const SharedMemory& memory() const { return memory_; }
  /// The memory of the same job's table, which its clients map.
  void take_memory(ShardTable& other) { memory_ = std::move(other.memory_); }
  /// Takes the table of another daemon, whose clients map it: each row that it may have written is
  /// withdrawn, and nothing is published until end_adoption(). Those clients begin no lease from
  /// here on.
  void adopt(SharedMemory memory);
  /// All of the job is known.
  void end_adoption();

  /// Publishes those of the entry's shards that can be leased without a request.
  void publish(const Entry& entry);
  /// The same of one shard; for what a reader was granted or a writer gave back.
  void publish_shard(uint32_t shard_id);
  /// Nobody begins to lease them from here on.
  void withdraw(const Entry& entry);
  void withdraw_shard(uint32_t shard_id);
  void withdraw_all();
  /// Withdraws the values that the training group no longer sees.
  void withdraw_uncommitted();
  /// Withdraws the entry, which has a slot. If the pins then show a lease, it is published again,
  /// and this is false.
  bool take_away(const Entry& entry);
  /// While a writer of the shard is being granted: withdraws it, and publishes it no more.
  void withhold(uint32_t shard_id);
  void end_withholding() { withheld_shard_.reset(); }

 private:
  bool can_publish(const Entry& entry) const;
  bool can_publish(const Entry& entry, uint32_t shard_id, uint32_t index) const;
  void publish_shard(const Entry& entry, uint32_t shard_id, uint32_t index);
  ShardRow* row_of(uint32_t shard_id);

  SharedMemory memory_;
  Shards& shards_;
  const Slots& slots_;
  const TrainingGroup& group_;
  const JobProgress& progress_;
  std::optional<uint32_t> withheld_shard_;
  bool may_publish_ = true;
};

}  // namespace memd
