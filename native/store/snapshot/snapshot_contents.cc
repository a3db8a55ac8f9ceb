#include "store/snapshot/snapshot_contents.h"

#include <algorithm>
#include <utility>

#include "base/units.h"

namespace memd {

uint64_t element_count_of(const ShardRecord& shard) {
  uint64_t elements = 1;
  for (const uint64_t size : shard.shape) elements *= size;
  return elements;
}

bool is_in(const JobRecord& record, const SnapshotPlace& place) {
  if (place.is_tile) {
    return place.owner < record.buckets.size() &&
           place.index < record.buckets[place.owner].tiles.size();
  }
  return place.owner < record.shards.size() &&
         place.index < record.shards[place.owner].extents.size();
}

uint64_t tile_elements(const BucketRecord& bucket, size_t tile) {
  return std::min<uint64_t>(kTileElements, bucket.element_count - tile * kTileElements);
}

PieceBlocks blocks_of(const JobRecord& record, const SnapshotPlace& place) {
  if (!place.is_tile) {
    return {.value_bytes = record.shards[place.owner].extents[place.index].length_bytes};
  }
  const BucketRecord& bucket = record.buckets[place.owner];
  const TileRecord& tile = bucket.tiles[place.index];
  const bool has_master = bucket.dtype == DType::bfloat16 && tile.parameter.exists();
  const uint64_t elements = tile_elements(bucket, place.index);
  return {.value_bytes = tile.parameter.exists() ? tile.parameter.length_bytes : 0,
          .rest_bytes = tile.rest.exists() ? tile.rest.length_bytes : 0,
          .master_bytes = has_master ? align_up(elements * sizeof(float), kBlockBytes) : 0};
}

SnapshotContents::SnapshotContents(std::shared_ptr<const JobRecord> record)
    : record_(std::move(record)), members_(record_->buckets.size()) {
  uint64_t piece = 0;
  first_extent_.reserve(record_->shards.size() + 1);
  for (size_t i = 0; i < record_->shards.size(); ++i) {
    const ShardRecord& shard = record_->shards[i];
    first_extent_.push_back(piece);
    piece += shard.extents.size();
    // Those without elements lie nowhere.
    const bool lies_in_bucket = shard.kind == ShardKind::parameter && element_count_of(shard) > 0;
    if (lies_in_bucket) members_[shard.bucket].push_back(i);
  }
  first_extent_.push_back(piece);
  for (const BucketRecord& bucket : record_->buckets) {
    first_tile_.push_back(piece);
    piece += bucket.tiles.size();
  }
  first_tile_.push_back(piece);
  for (std::vector<size_t>& each : members_) {
    std::sort(each.begin(), each.end(), [this](size_t a, size_t b) {
      return record_->shards[a].element_offset < record_->shards[b].element_offset;
    });
  }
}

bool SnapshotContents::has_rest(const ShardRecord& shard) const {
  const uint64_t elements = element_count_of(shard);
  if (elements == 0) return false;
  const std::vector<TileRecord>& tiles = record_->buckets[shard.bucket].tiles;
  const size_t last = (shard.element_offset + elements - 1) / kTileElements;
  for (size_t tile = shard.element_offset / kTileElements; tile <= last; ++tile) {
    if (tiles[tile].rest.exists()) return true;
  }
  return false;
}

SnapshotShard SnapshotContents::shard(size_t index) const {
  const ShardRecord& shard = record_->shards[index];
  const bool is_parameter = shard.kind == ShardKind::parameter;
  return {.spec = {.name = shard.name,
                   .kind = shard.kind,
                   .dtype = shard.dtype,
                   .tier = shard.tier,
                   .shape = shard.shape,
                   .keeps_maximum = shard.keeps_maximum},
          .generation = shard.generation,
          .written =
              is_parameter ? shard.written : !shard.extents.empty() || element_count_of(shard) == 0,
          .has_moments = is_parameter && (shard.generation > 0 || has_rest(shard))};
}

std::optional<SnapshotPlace> SnapshotContents::place(uint64_t piece) const {
  if (piece >= piece_count()) return std::nullopt;
  const bool is_tile = piece >= first_extent_.back();
  const std::vector<uint64_t>& firsts = is_tile ? first_tile_ : first_extent_;
  // Owners without pieces begin where the next one does: the last of them that begins here has it.
  const auto behind = std::upper_bound(firsts.begin(), firsts.end(), piece);
  const auto owner = static_cast<size_t>(behind - firsts.begin()) - 1;
  return SnapshotPlace{
      .is_tile = is_tile, .owner = owner, .index = static_cast<size_t>(piece - firsts[owner])};
}

uint64_t SnapshotContents::memory_bytes(const SnapshotPlace& place) const {
  return is_in(*record_, place) ? blocks_of(*record_, place).bytes() : 0;
}

std::vector<SnapshotRun> SnapshotContents::runs(size_t bucket, size_t tile) const {
  const std::vector<size_t>& members = members_.at(bucket);
  const uint64_t begin = tile * uint64_t{kTileElements};
  const uint64_t end = begin + kTileElements;
  const auto shard_at = [this](size_t i) -> const ShardRecord& { return record_->shards[i]; };
  // The first that ends behind the tile's first element.
  auto each = std::partition_point(members.begin(), members.end(), [&](size_t i) {
    return shard_at(i).element_offset + element_count_of(shard_at(i)) <= begin;
  });
  std::vector<SnapshotRun> runs;
  for (; each != members.end() && shard_at(*each).element_offset < end; ++each) {
    const ShardRecord& shard = shard_at(*each);
    const uint64_t first = std::max(shard.element_offset, begin);
    const uint64_t last = std::min(shard.element_offset + element_count_of(shard), end);
    runs.push_back({.shard = *each,
                    .element_in_shard = first - shard.element_offset,
                    .element_in_tile = first - begin,
                    .element_count = last - first});
  }
  return runs;
}

}  // namespace memd
