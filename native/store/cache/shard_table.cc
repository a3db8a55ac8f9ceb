#include "store/cache/shard_table.h"

namespace memd {

ShardRow* ShardTable::row_of(uint32_t shard_id) {
  if (shard_id >= kTableRows) return nullptr;
  return &reinterpret_cast<TableLayout*>(memory_.data())->rows[shard_id];
}

void ShardTable::adopt(SharedMemory memory) {
  may_publish_ = false;
  memory_ = std::move(memory);
  for (uint32_t shard_id = 0; shard_id < shards_.size(); ++shard_id) {
    if (ShardRow* const row = row_of(shard_id)) memd::withdraw(*row);
  }
}

void ShardTable::end_adoption() {
  may_publish_ = true;
  for (const Entry* const entry : shards_.entries()) {
    if (entry != nullptr) publish(*entry);
  }
}

bool ShardTable::can_publish(const Entry& entry) const {
  // The store decides each lease of what a writer fills, of what may take another one's place with
  // a step, and of a stopped job.
  return may_publish_ && progress_.stopped().is_ok() && entry.kind() != EntryKind::gradient &&
         (entry.is_uncommitted() ? group_.visibility() != Visibility::nobody
                                 : !entry.is_awaiting_steps()) &&
         entry.is_resident() && entry.slot() != nullptr && entry.pending() == nullptr &&
         !entry.is_exchanged();
}

bool ShardTable::can_publish(const Entry& entry, uint32_t shard_id, uint32_t index) const {
  const Shard& shard = shards_[shard_id];
  return shard.written && shard.value == &entry && shard.bytes != 0 && shard_id < kTableRows &&
         withheld_shard_ != shard_id && !slots_.pins(*entry.slot(), index).has_writers();
}

void ShardTable::publish_shard(const Entry& entry, uint32_t shard_id, uint32_t index) {
  Shard& shard = shards_[shard_id];
  if (!can_publish(entry) || !can_publish(entry, shard_id, index)) return withdraw_shard(shard_id);
  // A row that is published is right: every change withdraws it before.
  if (shard.is_published) return;
  memd::publish(*row_of(shard_id),
                {.pin = entry.slot()->pin_first + index,
                 .offset_bytes = entry.slot()->offset_bytes +
                                 (entry.kind() == EntryKind::bytes ? 0 : shard.offset_bytes()),
                 .length_bytes = shard.bytes,
                 .generation = shard.leased_generation()},
                entry.is_uncommitted() ? group_.visibility() : Visibility::everybody);
  shard.is_published = true;
  entry.slot()->is_published = true;
}

void ShardTable::publish(const Entry& entry) {
  shards_.for_each_shard(
      entry, [&](uint32_t shard_id, uint32_t index) { publish_shard(entry, shard_id, index); });
}

void ShardTable::publish_shard(uint32_t shard_id) {
  const Shard& shard = shards_[shard_id];
  if (shard.deleted) return;
  const bool in_bucket = shard.kind == ShardKind::parameter;
  publish_shard(*shard.value, shard_id, in_bucket ? shard.index_in_bucket : 0);
}

void ShardTable::withdraw_shard(uint32_t shard_id) {
  if (!shards_[shard_id].is_published) return;
  memd::withdraw(*row_of(shard_id));
  shards_[shard_id].is_published = false;
}

void ShardTable::withdraw(const Entry& entry) {
  if (entry.slot() == nullptr || !entry.slot()->is_published) return;
  shards_.for_each_shard(entry, [&](uint32_t shard_id, uint32_t) { withdraw_shard(shard_id); });
  entry.slot()->is_published = false;
}

void ShardTable::withdraw_all() {
  for (const Entry* const entry : shards_.entries()) {
    if (entry != nullptr) withdraw(*entry);
  }
}

void ShardTable::withdraw_uncommitted() {
  for (const Entry* const entry : shards_.entries()) {
    if (entry != nullptr && entry->is_uncommitted()) withdraw(*entry);
  }
}

bool ShardTable::take_away(const Entry& entry) {
  return take_slot_away([&] { withdraw(entry); },
                        [&] { return slots_.is_pinned(*entry.slot()); },
                        [&] { publish(entry); });
}

void ShardTable::withhold(uint32_t shard_id) {
  withheld_shard_ = shard_id;
  withdraw_shard(shard_id);
}

}  // namespace memd
