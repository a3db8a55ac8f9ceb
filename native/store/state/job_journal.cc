#include "store/state/job_journal.h"

#include <optional>
#include <utility>

namespace memd {

// ---- Shards -------------------------------------------------------------------------------------

void JobJournal::note_shard(uint32_t shard_id) {
  const Shard& shard = parts_.shards[shard_id];
  parts_.ledger.note_shard(shard_id, shard.written, shard.contributors);
}

void JobJournal::note_layout() {
  if (!parts_.ledger.is_open()) return;
  JobRecord layout = parts_.recorder.record();
  // The catalogue and the loose extents name the places.
  for (ShardRecord& shard : layout.shards) {
    shard.extents.clear();
    shard.generation = 0;
    shard.written = false;
  }
  for (BucketRecord& bucket : layout.buckets) {
    for (TileRecord& tile : bucket.tiles) tile = {};
  }
  // Without its shards nobody could go on with the job: the next daemon starts it from disk.
  const Status written = parts_.ledger.write_layout(layout, parts_.shards.ids_in_order());
  if (!written.is_ok()) parts_.ledger.give_up();
}

void JobJournal::change_layout(LayoutChange change) {
  change.added.job_id = parts_.job_id;
  change.added.name = parts_.job_name;
  if (!parts_.ledger.change_layout(change)) note_layout();
}

void JobJournal::change_facts(const LayoutFacts& facts) {
  if (!parts_.ledger.change_facts(facts)) note_layout();
}

void JobJournal::note_added(const std::vector<uint32_t>& shard_ids, size_t bucket_begin) {
  if (!parts_.ledger.is_open()) return;
  LayoutChange change{.removed = {}, .added = {}, .added_ids = shard_ids};
  const Shards& shards = parts_.shards;
  for (const uint32_t id : shard_ids) {
    ShardRecord label = shards[id].label_record();
    label.keeps_maximum = shards[id].keeps_maximum;
    if (label.kind == ShardKind::parameter) label.bucket -= static_cast<uint32_t>(bucket_begin);
    change.added.shards.push_back(std::move(label));
  }
  for (size_t index = bucket_begin; index < shards.buckets().size(); ++index) {
    BucketRecord bucket = shards.bucket(index).record();
    bucket.tiles.resize(shards.bucket(index).tile_count());
    change.added.buckets.push_back(std::move(bucket));
  }
  change_layout(std::move(change));
}

void JobJournal::note_removed(uint32_t shard_id) {
  if (!parts_.ledger.is_open()) return;
  change_layout({.removed = {shard_id}, .added = {}, .added_ids = {}});
}

void JobJournal::note_maxima(const std::vector<uint32_t>& shard_ids) {
  if (!parts_.ledger.is_open()) return;
  LayoutFacts facts;
  for (const uint32_t id : shard_ids)
    facts.maxima.emplace_back(id, parts_.shards[id].keeps_maximum);
  change_facts(facts);
}

void JobJournal::note_places_of_maxima(const std::vector<uint32_t>& buckets) {
  if (!parts_.ledger.is_open()) return;
  change_facts({.job = std::nullopt, .maxima = {}, .buckets_with_maxima = buckets});
}

void JobJournal::note_terms() {
  if (!parts_.ledger.is_open()) return;
  change_facts({.job = parts_.recorder.fields(), .maxima = {}, .buckets_with_maxima = {}});
}

void JobJournal::note_shards() {
  note_layout();
  for (uint32_t id = 0; id < parts_.shards.size(); ++id) {
    if (!parts_.shards[id].deleted) note_shard(id);
  }
}

// ---- Extents ------------------------------------------------------------------------------------

void JobJournal::forget_extents(const Entry& entry) {
  if (!parts_.ledger.is_open()) return;
  for (uint32_t index = 0; index < entry.replicas().size(); ++index) {
    parts_.ledger.note_loose(
        {.kind = LooseKey::Kind::bytes, .owner = entry.kept_owner(), .index = index}, {});
  }
}

}  // namespace memd
