#include "store/state/durable_state.h"

#include "base/units.h"

namespace memd {

void DurableState::restore(const JobRecord& on_disk) {
  std::vector<uint32_t> ids;
  ids.reserve(on_disk.shards.size());
  for (const ShardRecord& shard : on_disk.shards) {
    const auto found = parts_.shards.find(shard.name);
    const bool is_same = found && is_same_shard(parts_.shards[*found].label_record(), shard);
    ids.push_back(is_same ? *found : DurableJob::kNoId);
  }
  durable_ = DurableJob(on_disk, ids);
}

JobRecord DurableState::record() const {
  return durable_.record(parts_.recorder.record(), parts_.shards.ids_in_order());
}

void DurableState::keep(uint32_t shard_id) {
  const ShardRecord label = parts_.shards[shard_id].label_record();
  durable_.keep(shard_id, label);
  committing_.keep(shard_id, label);
}

std::vector<std::byte> DurableState::begin_commit() {
  const JobRecord now = parts_.recorder.record();
  committing_ = DurableJob(now, parts_.shards.ids_in_order());
  std::vector<std::byte> encoded = encode(now);
  committing_bytes_ = align_up(encoded.size(), kBlockBytes);
  parts_.recorder.catalogue_bytes_changed();
  return encoded;
}

std::vector<ExtentRecord> DurableState::mark_committing() {
  is_changed_ = false;
  return parts_.space.begin_commit(parts_.shards.each_replica());
}

void DurableState::committed(uint64_t catalogue_tag) {
  parts_.space.end_commit();
  durable_ = std::move(committing_);
  durable_bytes_ = committing_bytes_;
  const bool is_step = durable_.undurable_since() == 0;
  parts_.progress.committed_on_disk(is_step ? durable_.step() : 0);
  if (!is_step) {
    // Nothing on disk is gone back to: each extent is free as soon as another takes its place.
    parts_.shards.for_each_replica([](Replica& replica) { replica.referenced = false; });
  }
  parts_.recorder.catalogue_bytes_changed();
  parts_.journal.committed_on_disk(catalogue_tag);
}

}  // namespace memd
