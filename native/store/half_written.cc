// What a writer that is gone left in the arena of ShardStore's jobs: nothing of it is ever read,
// and what others wrote beside it stays.
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "store/format/block_bytes.h"
#include "store/shard_store.h"

namespace memd {

void ShardStore::discard_half_written(Job& job, const Session& session, Join& discarded) {
  const auto writes = [&](const Slot& slot, uint32_t index) {
    return pin_writers(session.ring.pins(slot.pin_first + index)) != 0;
  };
  for (Entry* const entry : job.shards().entries()) {
    if (entry == nullptr) continue;
    if (entry->pending != nullptr && writes(*entry->pending, 0)) {
      job.slots().retire(std::move(entry->pending));
    }
    if (entry->slot == nullptr || entry->kind != EntryKind::parameter) continue;
    std::set<uint32_t> torn;
    for (uint32_t i = 0; i < entry->slot->pin_count(); ++i) {
      if (writes(*entry->slot, i)) torn.insert(i);
    }
    discard_torn(job, *entry, torn, discarded.branch());
  }
}

void ShardStore::discard_torn(Job& job,
                              Entry& entry,
                              const std::set<uint32_t>& torn,
                              Done discarded) {
  if (torn.empty() || (entry.residency() != Residency::dirty && !job.mends.contains(entry))) {
    return discarded(Status::ok());
  }
  const Bucket& bucket = job.shards().bucket(entry.owner);
  std::byte* const slot = job.memory->arena().at(entry.slot->offset_bytes);
  std::set<uint32_t> read_again;
  for (const uint32_t index : torn) {
    Shard& shard = job.shards()[bucket.shards[index]];
    if (shard.is_on_disk && entry.has_replica()) {
      read_again.insert(index);
      continue;
    }
    // Without a copy on disk the shard is as if it had never been written.
    job.table().withdraw_shard(bucket.shards[index]);
    shard.written = false;
    const Owed owed(OwedPlace::torn_shard_zeroed);
    zero_bytes(slot + shard.offset_bytes(), shard.bytes);
    job.note_shard(bucket.shards[index]);
  }
  if (read_again.empty()) return discarded(Status::ok());
  if (job.shards().shard_count(entry) == 1) {
    job.residencies().move(entry, Residency::dirty, Residency::absent);
    job.slots().retire(std::move(entry.slot));
    return discarded(Status::ok());
  }
  if (job.mends.add(entry, read_again, std::move(discarded))) start_mend(job, entry);
}

// In place, as others may be writing beside it: their leases stay what they are.
void ShardStore::start_mend(Job& job, Entry& entry) {
  job.residencies().move(entry, Residency::dirty, Residency::draining);
  ++job.activity_count;
  ++entry.task_count;
  MEMD_CHECK_EQ(entry.replicas.size(),
                size_t{1});  // only a large shard has several, and it is alone
  const auto block = std::make_shared<BlockBytes>(uint64_t{entry.replica_bytes(0)});
  extents_.read(entry.replicas[0].extent(),
                block->span(),
                {.job = JobId{job.job_id}, .priority = IoPriority::demand},
                concat("shard ", job.shards().describe(entry, 0), ", step ", job.progress.committed_step()),
                [this, &job, &entry, block](const Status& status) {
                  finish_mend(job, entry, block->span(), status);
                });
}

void ShardStore::finish_mend(Job& job,
                             Entry& entry,
                             std::span<const std::byte> on_disk,
                             const Status& status) {
  const Mends::Mend mend = job.mends.take(entry);
  --job.activity_count;
  --entry.task_count;
  if (status.is_ok()) {
    std::byte* const slot = job.memory->arena().at(entry.slot->offset_bytes);
    for (const uint32_t index : mend.torn) {
      const Shard& shard = job.shards()[job.shards().bucket(entry.owner).shards[index]];
      const Owed owed(OwedPlace::torn_shard_mended);
      copy_bytes(slot + shard.offset_bytes(), on_disk.data() + shard.offset_bytes(), shard.bytes);
    }
  } else {
    // With the slot goes what others wrote there: whatever the reason, nothing is committed without
    // it.
    job.lose(entry, 0, status);
    fail_waiters(job, entry, status);
  }
  job.residencies().move(entry, Residency::draining, Residency::dirty);
  if (!status.is_ok()) {
    job.residencies().move(entry, Residency::dirty, Residency::absent);
    job.slots().retire(std::move(entry.slot));
  }
  // Until here a daemon that takes over finds the writer, and does the same once more.
  for (const Done& done : mend.done) done(Status::ok());
}

}  // namespace memd
