// What a job's table says of its shards: where each lies, for those who lease it without a request.
#include "store/job.h"

namespace memd {

template <typename Visit>
void Job::for_each_shard(const Entry& entry, const Visit& visit) const {
  if (entry.kind == EntryKind::gradient) return;
  if (entry.kind == EntryKind::bytes) return visit(entry.owner, 0);
  const ShardIds& ids = buckets[entry.owner].shards;
  for (uint32_t index = 0; index < ids.size(); ++index) visit(ids[index], index);
}

ShardRow* Job::row_of(uint32_t shard_id) {
  if (shard_id >= kTableRows) return nullptr;
  return &reinterpret_cast<TableLayout*>(table.data())->rows[shard_id];
}

bool Job::can_publish(const Entry& entry) const {
  // Of what a writer fills, of what may take another one's place with a step, and of what a job
  // that is stopped has, each lease is the store's to decide.
  return may_publish && progress.stopped().is_ok() && entry.kind != EntryKind::gradient &&
         (entry.is_ahead ? entry.audience >= kFirstTag : entry.steps_before == 0) &&
         entry.is_resident() && entry.slot != nullptr && entry.pending == nullptr &&
         entry.owner == entry.kept_owner;
}

bool Job::can_publish(const Entry& entry, uint32_t shard_id, uint32_t index) const {
  const Shard& shard = shards[shard_id];
  return shard.written && shard.value == &entry && shard.bytes != 0 && shard_id < kTableRows &&
         withheld_shard != shard_id && pins(*entry.slot, index).writers == 0;
}

void Job::publish_shard(const Entry& entry, uint32_t shard_id, uint32_t index) {
  Shard& shard = shards[shard_id];
  if (!can_publish(entry) || !can_publish(entry, shard_id, index)) return withdraw_shard(shard_id);
  // Whatever it says is right: what changes it withdraws it before.
  if (shard.is_published) return;
  memd::publish(*row_of(shard_id),
                {.pin = entry.slot->pin_first + index,
                 .offset_bytes = entry.slot->offset_bytes +
                                 (entry.kind == EntryKind::bytes ? 0 : shard.offset_bytes()),
                 .length_bytes = shard.bytes,
                 .generation = shard.leased_generation()},
                entry.is_ahead ? entry.audience : kEverybody);
  shard.is_published = true;
  entry.slot->is_published = true;
}

void Job::publish(const Entry& entry) {
  for_each_shard(entry,
                 [&](uint32_t shard_id, uint32_t index) { publish_shard(entry, shard_id, index); });
}

void Job::publish_shard(uint32_t shard_id) {
  const Shard& shard = shards[shard_id];
  if (shard.deleted) return;
  const bool in_bucket = shard.kind == ShardKind::parameter;
  publish_shard(*shard.value, shard_id, in_bucket ? shard.index_in_bucket : 0);
}

void Job::publish_all() {
  for (Entry* const entry : entries) {
    if (entry != nullptr) publish(*entry);
  }
}

void Job::withdraw_shard(uint32_t shard_id) {
  if (!shards[shard_id].is_published) return;
  memd::withdraw(*row_of(shard_id));
  shards[shard_id].is_published = false;
}

void Job::withdraw(const Entry& entry) {
  if (entry.slot == nullptr || !entry.slot->is_published) return;
  for_each_shard(entry, [&](uint32_t shard_id, uint32_t) { withdraw_shard(shard_id); });
  entry.slot->is_published = false;
}

void Job::withdraw_all() {
  for (Entry* const entry : entries) {
    if (entry != nullptr) withdraw(*entry);
  }
}

void Job::clear_table() {
  for (uint32_t shard_id = 0; shard_id < shards.size(); ++shard_id) {
    if (ShardRow* const row = row_of(shard_id)) memd::withdraw(*row);
  }
}

bool Job::take_away(const Entry& entry) {
  return take_slot_away(
      [&] { withdraw(entry); }, [&] { return is_pinned(*entry.slot); }, [&] { publish(entry); });
}

}  // namespace memd
