#include "store/state/durable_state.h"

#include "base/units.h"

namespace memd {
namespace {

// To forget an extent takes as long as to encode so many bytes.
constexpr size_t kOldExtentBytes = 128;

}  // namespace

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
  durable_.keep(shard_id, parts_.shards[shard_id].label_record());
  parts_.snapshot.before_removal(shard_id);
}

void DurableState::begin_commit() {
  parts_.snapshot.begin(true);
  parts_.space.begin_commit();
  parts_.ledger.begin_commit();
  is_changed_ = false;
}

bool DurableState::encode(size_t bytes_max) {
  parts_.snapshot.write(bytes_max);
  const bool is_forgotten = parts_.ledger.forget_old_extents(bytes_max / kOldExtentBytes);
  return is_forgotten && !parts_.snapshot.is_writing();
}

std::vector<std::byte> DurableState::take_encoded() {
  std::vector<std::byte> encoded = parts_.snapshot.take();
  committing_bytes_ = align_up(encoded.size() + JobEncoder::kSealBytes, kBlockBytes);
  parts_.recorder.catalogue_bytes_changed();
  return encoded;
}

void DurableState::abandon_commit() {
  parts_.snapshot.abandon();
  parts_.space.abandon_commit();
  is_changed_ = true;
}

void DurableState::fail_commit() {
  parts_.snapshot.abandon();
  parts_.space.fail_commit();
  ++failed_commit_count_;
}

void DurableState::committed(uint64_t catalogue_tag) {
  durable_ = parts_.snapshot.end();
  durable_bytes_ = committing_bytes_;
  const bool is_step = durable_.undurable_since() == 0;
  parts_.space.end_commit(is_step);
  parts_.progress.committed_on_disk(is_step ? durable_.step() : 0);
  parts_.recorder.catalogue_bytes_changed();
  parts_.ledger.committed_on_disk(catalogue_tag);
}

bool DurableState::release_superseded(ExtentStore& extents, size_t count) {
  return parts_.space.release_superseded(extents, count);
}

}  // namespace memd
