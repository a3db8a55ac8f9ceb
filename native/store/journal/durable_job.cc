#include "store/journal/durable_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "store/format/encoding.h"

namespace memd {

DurableJob::DurableJob(const JobRecord& job, const Counts& counts)
    : step_(job.step),
      host_bytes_(job.host_bytes),
      nvme_bytes_(job.nvme_bytes),
      undurable_since_(job.undurable_since),
      durability_(job.durability),
      weight_(job.weight) {
  named_.reserve(counts.ids_end);
  written_.reserve(counts.ids_end);
  keeps_maximum_.reserve(counts.ids_end);
  generations_.reserve(counts.ids_end);
  extents_.reserve(counts.extents * kExtentEncodedBytes);
  tile_ends_.reserve(counts.buckets);
  blobs_.reserve(counts.blobs);
}

DurableJob::DurableJob(const JobRecord& record, std::span<const uint32_t> ids) {
  MEMD_CHECK_EQ(ids.size(), record.shards.size());
  // Exactly, each of them: it stays as long as the catalogue does.
  Counts counts{.buckets = record.buckets.size()};
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == kNoId) continue;
    counts.ids_end = std::max<size_t>(counts.ids_end, size_t{ids[i]} + 1);
    counts.extents += record.shards[i].extents.size();
    counts.blobs += record.shards[i].extents.empty() ? 0 : 1;
  }
  for (const BucketRecord& bucket : record.buckets) counts.extents += 2 * bucket.tiles.size();
  *this = DurableJob(record, counts);
  for (const BucketRecord& bucket : record.buckets) {
    for (const TileRecord& tile : bucket.tiles) add_tile(tile);
    end_bucket();
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const ShardRecord& shard = record.shards[i];
    if (ids[i] == kNoId) {
      add_gone(shard);
      continue;
    }
    for (const ExtentRecord& extent : shard.extents) add_extent(extent);
    add_shard(ids[i],
              {.written = shard.written,
               .keeps_maximum = shard.keeps_maximum,
               .generation = shard.generation});
  }
  std::sort(blobs_.begin(), blobs_.end(), [](const Blob& a, const Blob& b) {
    return a.shard_id < b.shard_id;
  });
}

void DurableJob::add_tile(const TileRecord& tile) {
  FieldWriter writer(extents_);
  writer.put(tile.parameter);
  writer.put(tile.rest);
}

void DurableJob::end_bucket() {
  shard_extents_begin_ = extents_.size() / kExtentEncodedBytes;
  tile_ends_.push_back(static_cast<uint32_t>(shard_extents_begin_ / 2));
}

void DurableJob::add_extent(const ExtentRecord& extent) { FieldWriter(extents_).put(extent); }

void DurableJob::add_shard(uint32_t shard_id, const ShardMarks& marks) {
  if (shard_id >= named_.size()) {
    named_.resize(size_t{shard_id} + 1);
    written_.resize(size_t{shard_id} + 1);
    keeps_maximum_.resize(size_t{shard_id} + 1);
    generations_.resize(size_t{shard_id} + 1);
  }
  named_[shard_id] = true;
  written_[shard_id] = marks.written;
  keeps_maximum_[shard_id] = marks.keeps_maximum;
  generations_[shard_id] = marks.generation;
  const size_t end = extents_.size() / kExtentEncodedBytes;
  const size_t begin = std::exchange(shard_extents_begin_, end);
  if (begin == end) return;
  blobs_.push_back({.shard_id = shard_id,
                    .extent_begin = static_cast<uint32_t>(begin),
                    .extent_count = static_cast<uint32_t>(end - begin)});
}

void DurableJob::add_gone(ShardRecord shard) {
  shard_extents_begin_ = extents_.size() / kExtentEncodedBytes;
  kept_.push_back(std::move(shard));
}

ExtentRecord DurableJob::extent(size_t index) const {
  const std::span<const std::byte> all(extents_);
  FieldReader reader(all.subspan(index * kExtentEncodedBytes, kExtentEncodedBytes));
  return reader.get_extent();
}

TileRecord DurableJob::tile(size_t bucket, size_t index) const {
  MEMD_CHECK_LT(index, tile_count(bucket));
  const size_t first = 2 * (size_t{tile_begin(bucket)} + index);
  return {.parameter = extent(first), .rest = extent(first + 1)};
}

void DurableJob::fill(uint32_t shard_id, ShardRecord& shard) const {
  shard.written = written_[shard_id];
  shard.keeps_maximum = keeps_maximum_[shard_id];
  shard.generation = generations_[shard_id];
  shard.extents.clear();
  const auto blob =
      std::lower_bound(blobs_.begin(), blobs_.end(), shard_id, [](const Blob& each, uint32_t id) {
        return each.shard_id < id;
      });
  if (blob == blobs_.end() || blob->shard_id != shard_id) return;
  for (uint32_t i = 0; i < blob->extent_count; ++i) {
    shard.extents.push_back(extent(size_t{blob->extent_begin} + i));
  }
}

void DurableJob::keep(uint32_t shard_id, ShardRecord shard) {
  if (!names(shard_id)) return;
  fill(shard_id, shard);
  kept_.push_back(std::move(shard));
  // The next shard with this id is another one.
  named_[shard_id] = false;
}

JobRecord DurableJob::record(const JobRecord& job, std::span<const uint32_t> ids) const {
  MEMD_CHECK_EQ(ids.size(), job.shards.size());
  MEMD_CHECK_GE(job.buckets.size(), bucket_count());
  JobRecord record{.job_id = job.job_id,
                   .uid = job.uid,
                   .name = job.name,
                   .step = step_,
                   .host_bytes = host_bytes_,
                   .nvme_bytes = nvme_bytes_,
                   .shards = {},
                   .buckets = {},
                   .durability = durability_,
                   .undurable_since = undurable_since_,
                   .weight = weight_};
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!names(ids[i])) continue;
    record.shards.push_back(job.shards[i]);
    fill(ids[i], record.shards.back());
  }
  record.shards.insert(record.shards.end(), kept_.begin(), kept_.end());
  for (size_t bucket = 0; bucket < bucket_count(); ++bucket) {
    record.buckets.push_back(job.buckets[bucket]);
    std::vector<TileRecord>& tiles = record.buckets.back().tiles;
    MEMD_CHECK_EQ(tiles.size(), tile_count(bucket));
    for (size_t index = 0; index < tiles.size(); ++index) tiles[index] = tile(bucket, index);
  }
  return record;
}

}  // namespace memd
