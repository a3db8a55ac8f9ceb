#include "store/journal/shard_states.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/memory_orders.h"
#include "store/journal/ledger_layout.h"

namespace memd {
namespace {

/// The mark of a shard that came or went while a commit was made: it comes after the one before,
/// and after this one too.
constexpr uint64_t kInCommit = ~uint64_t{0};

/// Tells a commit from every other one: the catalogue on disk, and the record in memory on it; 0 is
/// none. Never 0 or kInCommit.
uint64_t commit_mark(uint64_t base, uint64_t record_sequence) {
  const uint64_t words[2] = {base, record_sequence};
  return std::clamp<uint64_t>(hash_record(std::as_bytes(std::span(words))), 1, kInCommit - 1);
}

}  // namespace

void ShardStates::note(uint32_t shard_id, bool written, Contributors contributors) {
  if (shard_id >= kShardsMax) return;  // Job::declare() refuses it
  ShardWords& words = layout_.shards[shard_id];
  words.contributors.store(contributors.word(), kRelease);
  words.written.store(written ? 1 : 0, kRelease);
}

void ShardStates::note_generation(uint32_t shard_id, uint64_t generation) {
  if (shard_id >= kShardsMax) return;
  layout_.shards[shard_id].generation.store(generation, kRelease);
  layout_.shards[shard_id].generation_commit.store(last_commit_, kRelease);
}

void ShardStates::reset(uint32_t shard_id) {
  if (shard_id >= kShardsMax) return;
  note(shard_id, false, {});
  ShardWords& words = layout_.shards[shard_id];
  words.generation_commit.store(0, kRelease);
  words.reset_commit.store(is_committing_ ? kInCommit : last_commit_, kRelease);
  if (is_committing_) reset_ids_.push_back(shard_id);
}

uint32_t ShardStates::given_ids_end(uint32_t from) const {
  // Ids are given without gaps, and each leaves a mark: the ledger's commit is never 0.
  while (from < kShardsMax && layout_.shards[from].reset_commit.load(kAcquire) != 0) ++from;
  return from;
}

void ShardStates::begin_commit() {
  // Those of a commit of which nothing came are in this one.
  settle_marks();
  is_committing_ = true;
}

void ShardStates::end_commit(uint64_t base) {
  base_ = base;
  last_commit_ = commit_mark(base_, record_sequence());
  is_committing_ = false;
  settle_marks();
}

ShardState ShardStates::adopt(uint32_t shard_id) {
  ShardWords& words = layout_.shards[shard_id];
  const uint64_t reset_commit = words.reset_commit.load(kAcquire);
  ShardState state{.written = words.written.load(kAcquire) != 0,
                   .contributors = Contributors::from_word(words.contributors.load(kAcquire)),
                   .generation = std::nullopt,
                   .is_new = reset_commit == last_commit_ || reset_commit == kInCommit};
  if (reset_commit == kInCommit) words.reset_commit.store(last_commit_, kRelease);
  if (base_ != 0 && words.generation_commit.load(kAcquire) == last_commit_)
    state.generation = words.generation.load(kAcquire);
  return state;
}

uint64_t ShardStates::record_sequence() const {
  const RecordPlace& newest_place = layout_.job_places[1 - older_of(layout_.job_places)];
  return newest_place.tag == base_ ? newest_place.sequence.load(std::memory_order_relaxed) : 0;
}

void ShardStates::settle_marks() {
  for (const uint32_t shard_id : std::exchange(reset_ids_, {})) {
    layout_.shards[shard_id].reset_commit.store(last_commit_, kRelease);
  }
}

}  // namespace memd
