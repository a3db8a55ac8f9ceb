#include "store/step/staged_buffers.h"

#include <algorithm>

#include "base/check.h"
#include "base/failpoint.h"

namespace memd {

bool StagedBuffers::names(uint32_t shard_id) const {
  return std::any_of(pairs_.begin(), pairs_.end(), [shard_id](const auto& pair) {
    return pair.first == shard_id || pair.second == shard_id;
  });
}

Status StagedBuffers::check() const {
  const StateParts& job = parts_.job;
  for (const auto& [staged_id, buffer_id] : pairs_) {
    const Shard& staged = job.shards[staged_id];
    const Shard& buffer = job.shards[buffer_id];
    job.residencies.settle_pending(*staged.value);
    job.residencies.settle_pending(*buffer.value);
    if (!staged.written || staged.value->pending() != nullptr) {
      return error(StatusCode::invalid_argument,
                   "shard ",
                   job.job_name,
                   "/",
                   staged.name(),
                   " was not put yet");
    }
    if (buffer.value->pending() != nullptr) {
      return error(StatusCode::invalid_argument,
                   "shard ",
                   job.job_name,
                   "/",
                   buffer.name(),
                   " is still leased for writing; let go of the tensor first");
    }
  }
  return Status::ok();
}

Status StagedBuffers::swap() {
  if (Status status = check(); !status.is_ok()) return status;
  for (const auto& [staged_id, buffer_id] : pairs_)
    buffer_was_written_.push_back(parts_.job.shards[buffer_id].written);
  exchange(true);
  if (!pairs_.empty()) parts_.durable.note_change();
  MEMD_FAILPOINT("step.buffers_swapped");
  return Status::ok();
}

void StagedBuffers::exchange(bool swapped) {
  MEMD_CHECK(is_swapped_ != swapped);
  const StateParts& job = parts_.job;
  for (size_t i = 0; i < pairs_.size(); ++i) {
    Shard& staged = job.shards[pairs_[i].first];
    Shard& buffer = job.shards[pairs_[i].second];
    job.table.withdraw(*staged.value);
    job.table.withdraw(*buffer.value);
    std::swap(staged.value, buffer.value);
    staged.value->exchange_owner(*buffer.value);
    staged.written = !swapped;
    buffer.written = swapped || buffer_was_written_[i];
    job.table.publish(*staged.value);
    job.table.publish(*buffer.value);
    job.waits.wake(*staged.value);
    job.waits.wake(*buffer.value);
  }
  is_swapped_ = swapped;
}

void StagedBuffers::forget_old_extents() {
  const StateParts& job = parts_.job;
  for (const auto& [staged_id, buffer_id] : pairs_) {
    Entry& fresh = *job.shards[buffer_id].value;
    if (fresh.residency() != Residency::dirty) continue;
    for (size_t i = 0; i < fresh.replicas().size(); ++i) {
      if (fresh.replicas()[i].exists()) job.space.release(fresh.replica_place(i), job.extents);
      job.log.note_value(fresh, i);
    }
  }
}

void StagedBuffers::drop() {
  const StateParts& job = parts_.job;
  MEMD_FAILPOINT("step.before_staged_dropped");
  for (const auto& [staged_id, buffer_id] : pairs_) {
    Entry& old = *job.shards[staged_id].value;
    if (old.is_resident()) job.residencies.move(old, old.residency(), Residency::absent);
    if (old.slot() != nullptr) job.slots.retire(old.take_slot());
    for (size_t i = 0; i < old.replicas().size(); ++i) {
      if (old.replicas()[i].exists()) job.space.release(old.replica_place(i), job.extents);
    }
    MEMD_FAILPOINT("ledger.old_buffer_dropped");
    // Now the staged bytes are the buffer's, also for whoever goes on after this daemon.
    Entry& fresh = *job.shards[buffer_id].value;
    old.keep_owner();
    fresh.keep_owner();
    job.waits.wake(old);
    job.waits.wake(fresh);
    job.slots.note(fresh);
    job.table.publish(fresh);
    // For bytes in memory alone too: the old ones' extents are nobody's.
    for (size_t i = 0; i < fresh.replicas().size(); ++i) job.log.note_value(fresh, i);
    for (size_t i = 0; i < old.replicas().size(); ++i) job.log.note_value(old, i);
    parts_.journal.note_shard(buffer_id);
    parts_.journal.note_shard(staged_id);
  }
}

}  // namespace memd
