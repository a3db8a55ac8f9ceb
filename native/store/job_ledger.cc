// What a job's ledger is told of its shards, layout and extents.
#include "store/job.h"

namespace memd {

void Job::note_shard(uint32_t shard_id) {
  if (ledger == nullptr) return;
  ledger->note_shard(shard_id, shards_[shard_id].written, shards_[shard_id].gradient_session);
}

void Job::note_layout() {
  if (ledger == nullptr) return;
  JobRecord layout = record();
  const std::vector<uint32_t> ids = shards_.ids_in_order();
  // What lies where is the catalogue's to say, and the loose extents'.
  for (ShardRecord& shard : layout.shards) {
    shard.extents.clear();
    shard.generation = 0;
    shard.written = false;
  }
  for (BucketRecord& bucket : layout.buckets) {
    for (TileRecord& tile : bucket.tiles) tile = {};
  }
  // Without its shards nobody could go on with the job: the next daemon starts it from disk.
  if (const Status written = ledger->write_layout(layout, ids); !written.is_ok()) ledger->give_up();
}

void Job::note_layout_change(LayoutChange change) {
  if (ledger == nullptr) return;
  change.added.job_id = job_id;
  change.added.name = name;
  for (const uint32_t id : change.added_ids)
    change.added.shards.push_back(shards_[id].label_record());
  if (!ledger->change_layout(change)) note_layout();
}

void Job::note_shards() {
  note_layout();
  for (uint32_t id = 0; id < shards_.size(); ++id) {
    if (!shards_[id].deleted) note_shard(id);
  }
}

}  // namespace memd
