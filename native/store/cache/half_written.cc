#include "store/cache/half_written.h"

#include <memory>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "store/format/block_bytes.h"

namespace memd {

void HalfWritten::discard(const Session& session, Join& discarded) {
  const auto writes = [&](const Slot& slot, uint32_t index) {
    return pin_writers(session.ring.pins(slot.pin_first + index)) != 0;
  };
  for (Entry* const entry : parts_.shards.entries()) {
    if (entry == nullptr) continue;
    if (entry->pending != nullptr && writes(*entry->pending, 0)) {
      parts_.slots.retire(std::move(entry->pending));
      parts_.waits.wake(*entry);
    }
    if (entry->slot == nullptr || entry->kind != EntryKind::parameter) continue;
    std::set<uint32_t> torn;
    for (uint32_t i = 0; i < entry->slot->pin_count(); ++i) {
      if (writes(*entry->slot, i)) torn.insert(i);
    }
    discard(*entry, torn, discarded.branch());
  }
}

void HalfWritten::discard(Entry& entry, const std::set<uint32_t>& torn, Done discarded) {
  if (torn.empty() || (entry.residency() != Residency::dirty && !mends_.contains(entry))) {
    return discarded(Status::ok());
  }
  const Bucket& bucket = parts_.shards.bucket(entry.owner);
  std::byte* const slot = parts_.memory->arena().at(entry.slot->offset_bytes);
  std::set<uint32_t> read_again;
  for (const uint32_t index : torn) {
    Shard& shard = parts_.shards[bucket.shards[index]];
    if (shard.is_on_disk && entry.has_replica()) {
      read_again.insert(index);
      continue;
    }
    // Without a copy on disk the shard is as if it had never been written.
    parts_.table.withdraw_shard(bucket.shards[index]);
    shard.written = false;
    const Owed owed(OwedPlace::torn_shard_zeroed);
    zero_bytes(slot + shard.offset_bytes(), shard.bytes);
    parts_.note_shard(bucket.shards[index]);
    parts_.waits.wake(entry);
  }
  if (read_again.empty()) return discarded(Status::ok());
  if (parts_.shards.shard_count(entry) == 1) {
    parts_.residencies.move(entry, Residency::dirty, Residency::absent);
    parts_.slots.retire(std::move(entry.slot));
    return discarded(Status::ok());
  }
  if (mends_.add(entry, read_again, std::move(discarded))) start_mend(entry);
}

// In place, as others may be writing beside it: their leases stay what they are.
void HalfWritten::start_mend(Entry& entry) {
  parts_.residencies.move(entry, Residency::dirty, Residency::draining);
  parts_.activities.begin();
  parts_.residencies.begin_task(entry);
  MEMD_CHECK_EQ(entry.replicas.size(),
                size_t{1});  // only a large shard has several, and it is alone
  const auto block = std::make_shared<BlockBytes>(uint64_t{entry.replica_bytes(0)});
  parts_.extents.read(
      entry.replicas[0].extent(),
      block->span(),
      {.job = JobId{parts_.job_id}, .priority = IoPriority::demand},
      concat(
          "shard ", parts_.shards.describe(entry, 0), ", step ", parts_.progress.committed_step()),
      [this, &entry, block](const Status& status) { finish_mend(entry, block->span(), status); });
}

void HalfWritten::finish_mend(Entry& entry,
                              std::span<const std::byte> on_disk,
                              const Status& status) {
  const Mends::Mend mend = mends_.take(entry);
  parts_.activities.end();
  parts_.residencies.end_task(entry);
  if (status.is_ok()) {
    std::byte* const slot = parts_.memory->arena().at(entry.slot->offset_bytes);
    for (const uint32_t index : mend.torn) {
      const Shard& shard = parts_.shards[parts_.shards.bucket(entry.owner).shards[index]];
      const Owed owed(OwedPlace::torn_shard_mended);
      copy_bytes(slot + shard.offset_bytes(), on_disk.data() + shard.offset_bytes(), shard.bytes);
    }
  } else {
    // With the slot goes what others wrote there: whatever the reason, nothing is committed without
    // it.
    parts_.lose(entry, 0, status);
    parts_.waiters.fail(entry, status);
  }
  parts_.residencies.move(entry, Residency::draining, Residency::dirty);
  if (!status.is_ok()) {
    parts_.residencies.move(entry, Residency::dirty, Residency::absent);
    parts_.slots.retire(std::move(entry.slot));
  }
  // Until here a daemon that takes over finds the writer, and does the same once more.
  for (const Done& done : mend.done) done(Status::ok());
}

}  // namespace memd
