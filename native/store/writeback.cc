// What ShardStore writes back: values that a user wrote, and tiles of commits in memory.
#include <algorithm>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "store/shard_store.h"

namespace memd {
namespace {

/// The user wrote new bf16 values: those are the parameter exactly. What was not touched keeps its
/// fp32 remainder.
void take_halves(const TileBytes& bytes) {
  auto* const half = reinterpret_cast<uint16_t*>(bytes.value);
  const auto* const written = reinterpret_cast<const uint16_t*>(bytes.arena_value);
  auto* const remainder = reinterpret_cast<int16_t*>(bytes.rest + bytes.elements * 8);
  for (uint64_t i = 0; i < bytes.elements; ++i) {
    if (half[i] != written[i]) remainder[i] = 0;
    half[i] = written[i];
  }
}

}  // namespace

void ShardStore::write_back(Job& job,
                            Entry& entry,
                            const std::shared_ptr<StepReport>& report,
                            Done done) {
  MEMD_FAILPOINT("writeback.started");
  job.residencies().move(entry, Residency::dirty, Residency::draining);
  auto join = Join::start([&job, &entry, done = std::move(done)](const Status& status) {
    MEMD_FAILPOINT("writeback.finished");
    if (status.is_ok() && entry.kind == EntryKind::parameter) {
      for (const uint32_t id : job.shards().bucket(entry.owner).shards) {
        job.shards()[id].is_on_disk = job.shards()[id].written;
      }
    }
    job.residencies().move(
        entry, Residency::draining, status.is_ok() ? Residency::clean : Residency::dirty);
    // What was spilled is in no catalogue before the next commit.
    if (status.is_ok() && entry.kind != EntryKind::gradient) job.changed = true;
    done(status);
  });
  Bucket* const bucket =
      entry.kind == EntryKind::parameter ? &job.shards().bucket(entry.owner) : nullptr;
  for (size_t i = 0; i < entry.replicas.size(); ++i) {
    TileTask task;
    task.job = &job;
    task.entry = &entry;
    task.index = i;
    task.writes_value = true;
    const bool keeps_remainder = bucket != nullptr && bucket->dtype == DType::bfloat16 &&
                                 bucket->rest[i].exists() && entry.replicas[i].exists();
    if (keeps_remainder) {
      task.bucket = bucket;
      task.reads_value = true;
      task.reads_rest = true;
      task.writes_rest = true;
      task.work = take_halves;
    } else {
      task.work = [](const TileBytes& bytes) {
        copy_bytes(bytes.value, bytes.arena_value, bytes.value_bytes);
      };
    }
    task.report = report;
    task.done = join->branch();
    tiles_.submit(std::move(task));
  }
  join->finish(Status::ok());
}

void ShardStore::write_back_all(Job& job,
                                bool with_bytes,
                                const std::shared_ptr<StepReport>& report,
                                Done done) {
  auto join = Join::start(std::move(done));
  job.residencies().settle_all_pending();
  for (Entry* const entry : job.shards().entries()) {
    if (entry == nullptr || entry->kind == EntryKind::gradient) continue;
    if (entry->residency() != Residency::dirty || entry->tier != Tier::nvme) continue;
    if (entry->replicas.empty()) continue;
    if (entry->kind == EntryKind::bytes && !with_bytes) continue;
    // What a staged buffer replaced goes as soon as the step is committed.
    if (entry->kind == EntryKind::bytes && !job.shards()[entry->owner].written) continue;
    write_back(job, *entry, report, join->branch());
  }
  join->finish(Status::ok());
}

void ShardStore::flush_tiles(Job& job,
                             const Bucket* only,
                             const std::shared_ptr<StepReport>& report,
                             Done done) {
  std::vector<uint64_t> keys;
  for (const uint64_t key : job.tiles.dirty_keys()) {
    if (only == nullptr || &job.shards().bucket(bucket_of(key)) == only) keys.push_back(key);
  }
  auto join = Join::start(std::move(done));
  for (const uint64_t key : keys) tiles_.submit_flush(job, key, report, join->branch());
  join->finish(Status::ok());
}

void ShardStore::ask_for_flush(Job& job, std::optional<uint32_t> bucket) {
  const uint64_t key = bucket ? *bucket : ~uint64_t{0};
  if (!job.tiles.ask_flush(key)) return;
  enqueue(job, "flush", [this, &job, bucket, key](const Status& turn) {
    if (!turn.is_ok()) return;
    const Bucket* const only = bucket ? &job.shards().bucket(*bucket) : nullptr;
    flush_tiles(
        job, only, std::make_shared<StepReport>(), [this, &job, key, only](const Status& status) {
          job.tiles.end_flush(key);
          if (!status.is_ok()) {
            only == nullptr ? job.waiters().fail_for_room(status)
                            : job.waiters().fail(*only->value, status);
          }
          end_operation(job.job_id);
        });
  });
}

}  // namespace memd
