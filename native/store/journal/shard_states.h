// Facts of a job's shards in its ledger, and which of them are newer than its last commit.
#pragma once

#include <cstdint>
#include <vector>

#include "store/journal/ledger_contents.h"

namespace memd {

struct LedgerLayout;

/// Owned by its Ledger, whose docstrings hold.
class ShardStates {
 public:
  explicit ShardStates(LedgerLayout& layout) : layout_(layout) {}

  void note(uint32_t shard_id, bool written, Contributors contributors);
  void note_generation(uint32_t shard_id, uint64_t generation);
  void reset(uint32_t shard_id);
  uint32_t given_ids_end(uint32_t from) const;

  /// The tag of the catalogue on disk.
  uint64_t base() const { return base_; }
  void begin_commit();
  /// A commit ended, in memory if `base` is that of before.
  void end_commit(uint64_t base);
  /// Reads the words that another daemon left; its unfinished commit counts as ended.
  ShardState adopt(uint32_t shard_id);

 private:
  /// The newest record of a commit in memory, if it builds on `base_`; else 0.
  uint64_t record_sequence() const;
  /// Shards that came and went while a commit was made are marked as any other.
  void settle_marks();

  LedgerLayout& layout_;
  uint64_t base_ = 0;
  uint64_t last_commit_ = 0;  // tells `base_` and the record on it from every other commit
  bool is_committing_ = false;
  std::vector<uint32_t> reset_ids_;  // with kInCommit as their mark
};

}  // namespace memd
