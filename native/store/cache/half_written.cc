#include "store/cache/half_written.h"

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"

namespace memd {

void HalfWritten::discard(const Session& session, Join& discarded) {
  const auto writes = [&](const Slot& slot, uint32_t index) {
    return pin_writers(session.ring.pins(slot.pin_first + index)) != 0;
  };
  // A writer has asked: an entry with a pending slot, or a parameter.
  std::set<uint32_t> ids = parts_.residencies.pending_ids();
  ids.insert(parts_.slots.written_ids().begin(), parts_.slots.written_ids().end());
  for (const uint32_t id : ids) {
    Entry* const entry = parts_.shards.entry(id);
    if (entry == nullptr) continue;
    if (entry->pending() != nullptr && writes(*entry->pending(), 0)) {
      parts_.slots.retire(entry->take_pending());
      parts_.residencies.note_changed(*entry);
    }
    if (entry->slot() == nullptr || entry->kind() != EntryKind::parameter) continue;
    std::set<uint32_t> torn;
    for (uint32_t i = 0; i < entry->slot()->pin_count(); ++i) {
      if (writes(*entry->slot(), i)) torn.insert(i);
    }
    discard(*entry, torn, discarded.branch());
  }
}

void HalfWritten::discard(Entry& entry, const std::set<uint32_t>& torn, Done discarded) {
  if (torn.empty() || (entry.residency() != Residency::dirty && !mends_.contains(entry))) {
    return discarded(Status::ok());
  }
  const Bucket& bucket = parts_.shards.bucket(entry.owner());
  Mends::Torn all;
  for (const uint32_t index : torn) {
    Shard& shard = parts_.shards[bucket.shards[index]];
    if (shard.is_on_disk && entry.is_backed()) {
      all.on_disk.insert(index);
      continue;
    }
    // Without a copy on disk the shard is as if it had never been written.
    parts_.table.withdraw_shard(bucket.shards[index]);
    parts_.residencies.before_change(bucket.shards[index]);
    shard.written = false;
    parts_.note_shard(bucket.shards[index]);
    all.nowhere.insert(index);
    parts_.waits.wake(entry);
  }
  if (parts_.shards.shard_count(entry) == 1) {
    parts_.residencies.move(entry, Residency::dirty, Residency::absent);
    parts_.slots.retire(entry.take_slot());
    return discarded(Status::ok());
  }
  if (mends_.add(entry, all, std::move(discarded))) start_mend(entry);
}

// In place, as others may be writing beside it: their leases stay what they are.
void HalfWritten::start_mend(Entry& entry) {
  parts_.residencies.move(entry, Residency::dirty, Residency::draining);
  parts_.activities.begin();
  parts_.residencies.begin_task(entry);
  mend(entry);
}

void HalfWritten::mend(Entry& entry) {
  const Mends::Torn torn = mends_.take_torn(entry);
  if (torn.on_disk.empty()) return repair(entry, torn, nullptr);
  MEMD_CHECK_EQ(entry.replicas().size(),
                size_t{1});  // only a large shard has several, and it is alone
  const auto block = std::make_shared<BlockBytes>(uint64_t{entry.replica_bytes(0)});
  const Done mended = [this, &entry, torn, block](const Status& status) {
    status.is_ok() ? repair(entry, torn, block) : end_mend(entry, status);
  };
  if (parts_.gates.is_tile_in_memory(entry, 0))
    return parts_.gates.read_tile(entry, 0, block->span().data(), mended);
  parts_.extents.read(
      entry.replicas()[0].extent(),
      block->span(),
      {.job = JobId{parts_.job_id}, .priority = IoPriority::demand},
      concat(
          "shard ", parts_.shards.describe(entry, 0), ", step ", parts_.progress.committed_step()),
      mended);
}

void HalfWritten::repair(Entry& entry,
                         const Mends::Torn& torn,
                         const std::shared_ptr<BlockBytes>& on_disk) {
  const auto repaired = Join::start([this, &entry](const Status& status) {
    // Other writers may have left theirs meanwhile.
    mends_.has_torn(entry) ? mend(entry) : end_mend(entry, status);
  });
  const auto each_piece = [&](const std::set<uint32_t>& indexes, const auto& work) {
    for (const uint32_t index : indexes) {
      const Shard& shard = parts_.shards[parts_.shards.bucket(entry.owner()).shards[index]];
      const uint64_t begin = shard.offset_bytes();
      std::byte* const into = parts_.memory->arena().at(entry.slot()->offset_bytes) + begin;
      parts_.workers.submit_pieces(
          JobId{parts_.job_id},
          shard.bytes,
          [work, into, begin](uint64_t offset, uint64_t bytes) {
            work(into + offset, begin + offset, bytes);
          },
          [done = repaired->branch()] { done(Status::ok()); });
    }
  };
  each_piece(torn.nowhere,
             [](std::byte* into, uint64_t, uint64_t bytes) { zero_bytes(into, bytes); });
  each_piece(torn.on_disk, [on_disk](std::byte* into, uint64_t offset, uint64_t bytes) {
    copy_bytes(into, on_disk->span().data() + offset, bytes);
  });
  repaired->finish(Status::ok());
}

void HalfWritten::end_mend(Entry& entry, const Status& status) {
  const std::vector<Done> waiting = mends_.take(entry);
  parts_.activities.end();
  parts_.residencies.end_task(entry);
  if (!status.is_ok()) {
    // With the slot goes what others wrote there: whatever the reason, nothing is committed without
    // it.
    parts_.lose(entry, 0, status);
    parts_.waiters.fail(entry, status);
  }
  parts_.residencies.move(entry, Residency::draining, Residency::dirty);
  if (!status.is_ok()) {
    parts_.residencies.move(entry, Residency::dirty, Residency::absent);
    parts_.slots.retire(entry.take_slot());
  }
  // Until here a daemon that takes over finds the writer, and does the same once more.
  for (const Done& done : waiting) done(Status::ok());
}

}  // namespace memd
