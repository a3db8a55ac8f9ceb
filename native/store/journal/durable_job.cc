#include "store/journal/durable_job.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "store/format/encoding.h"

namespace memd {

DurableJob::DurableJob(const JobRecord& record, std::span<const uint32_t> ids)
    : step_(record.step),
      host_bytes_(record.host_bytes),
      nvme_bytes_(record.nvme_bytes),
      undurable_since_(record.undurable_since),
      durability_(record.durability),
      weight_(record.weight) {
  MEMD_CHECK_EQ(ids.size(), record.shards.size());
  size_t id_count = 0;
  size_t extent_count = 0;
  size_t blob_count = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == kNoId) continue;
    id_count = std::max<size_t>(id_count, size_t{ids[i]} + 1);
    extent_count += record.shards[i].extents.size();
    blob_count += record.shards[i].extents.empty() ? 0 : 1;
  }
  for (const BucketRecord& bucket : record.buckets) extent_count += 2 * bucket.tiles.size();
  // Exactly, each of them: it stays as long as the catalogue does.
  named_.resize(id_count);
  written_.resize(id_count);
  generations_.resize(id_count);
  extents_.reserve(extent_count * kExtentEncodedBytes);
  tile_ends_.reserve(record.buckets.size());
  blobs_.reserve(blob_count);

  FieldWriter writer(extents_);
  uint32_t tile_count = 0;
  for (const BucketRecord& bucket : record.buckets) {
    for (const TileRecord& tile : bucket.tiles) {
      writer.put(tile.parameter);
      writer.put(tile.rest);
    }
    tile_count += static_cast<uint32_t>(bucket.tiles.size());
    tile_ends_.push_back(tile_count);
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const ShardRecord& shard = record.shards[i];
    if (ids[i] == kNoId) {
      kept_.push_back(shard);
      continue;
    }
    named_[ids[i]] = true;
    written_[ids[i]] = shard.written;
    generations_[ids[i]] = shard.generation;
    if (shard.extents.empty()) continue;
    blobs_.push_back({.shard_id = ids[i],
                      .extent_begin = static_cast<uint32_t>(extents_.size() / kExtentEncodedBytes),
                      .extent_count = static_cast<uint32_t>(shard.extents.size())});
    for (const ExtentRecord& extent : shard.extents) writer.put(extent);
  }
  std::sort(blobs_.begin(), blobs_.end(), [](const Blob& a, const Blob& b) {
    return a.shard_id < b.shard_id;
  });
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
