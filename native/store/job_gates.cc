#include "store/job_gates.h"

#include "base/bulk_bytes.h"

namespace memd {

void JobGates::discard_early(const Entry& entry, uint32_t shard_id) {
  if (entry.kind() == EntryKind::gradient) early().forget_gradient(shard_id);
  if (entry.kind() == EntryKind::parameter) early().discard(entry.owner(), EarlyDiscard::state);
}

void JobGates::read_tile(Entry& entry, size_t index, Done done) {
  TileTask task;
  task.entry = &entry;
  task.bucket = &job_.shards().bucket(entry.owner());
  task.index = index;
  task.reads_value = true;
  task.reads_rest = true;
  task.work = [](const TileBytes& bytes) {
    copy_bytes(bytes.arena_value, bytes.value, bytes.value_bytes);
  };
  task.done = std::move(done);
  job_.state().tasks().submit(std::move(task));
}

bool JobGates::flush_tiles(std::optional<uint32_t> bucket) {
  const bool is_dirty =
      bucket ? job_.tiles().has_dirty(*bucket, job_.shards().bucket(*bucket).tile_count())
             : job_.tiles().has_dirty();
  if (is_dirty) calls_.ask_for_flush(bucket);
  return is_dirty;
}

void JobGates::drop_cached_tiles(const Entry& value) {
  job_.state().drop_cached_tiles(job_.shards().bucket(value.owner()));
}

}  // namespace memd
