#include "store/job/job_gates.h"

#include "base/bulk_bytes.h"

namespace memd {

void JobGates::discard_early(const Entry& entry, uint32_t shard_id) {
  if (entry.kind() == EntryKind::gradient) early().forget_gradient(shard_id);
  if (entry.kind() == EntryKind::parameter) early().discard(entry.owner(), EarlyDiscard::state);
}

bool JobGates::is_tile_in_memory(const Entry& entry, size_t index) const {
  if (entry.kind() != EntryKind::parameter) return false;
  if (job_.shards().bucket(entry.owner()).is_host()) return true;
  const uint64_t key = tile_key(entry.owner(), index);
  if (job_.tiles().is_dirty(key)) return true;
  // A commit on disk leaves tiles there that were dirty.
  return job_.admission().durability().is_in_memory() && job_.tiles().contains(key);
}

void JobGates::read_tile(Entry& entry, size_t index, std::byte* into, Done done) {
  TileTask task;
  task.entry = &entry;
  task.bucket = &job_.shards().bucket(entry.owner());
  task.index = index;
  task.reads_value = true;
  task.reads_rest = true;
  task.work = [into](const TileBytes& bytes) { copy_bytes(into, bytes.value, bytes.value_bytes); };
  task.done = std::move(done);
  TileTasks& tasks = job_.state().tasks();
  // A copy for somebody who waits needs no room, and no tile that is to be updated.
  const bool is_there =
      task.bucket->is_host() || job_.tiles().contains(tile_key(entry.owner(), index));
  is_there ? tasks.submit_first(std::move(task)) : tasks.submit(std::move(task));
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
