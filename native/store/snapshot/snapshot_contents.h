// The content of a snapshot: shards, pieces, and the runs of a tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "store/cache/shard.h"
#include "store/format/catalogue.h"

namespace memd {

/// A shard as a snapshot has it.
struct SnapshotShard {
  ShardSpec spec;
  uint64_t generation = 0;
  bool written = false;
  bool has_moments = false;  // parameter: there is optimizer state in its tiles, or was an update
};

/// An extent of a blob or buffer, or a tile of a bucket.
struct SnapshotPlace {
  bool is_tile = false;
  size_t owner = 0;  // bucket of a tile, shard of an extent
  size_t index = 0;
};

/// Elements of one parameter that lie in a tile one after the other.
struct SnapshotRun {
  size_t shard = 0;
  uint64_t element_in_shard = 0;
  uint64_t element_in_tile = 0;
  uint64_t element_count = 0;
};

uint64_t element_count_of(const ShardRecord& shard);

bool is_in(const JobRecord& record, const SnapshotPlace& place);

/// A piece's bytes in memory, whole blocks each, one after the other.
struct PieceBlocks {
  uint64_t value_bytes = 0;
  uint64_t rest_bytes = 0;    // of a tile: its optimizer state
  uint64_t master_bytes = 0;  // fp32, of a tile of bf16

  uint64_t bytes() const { return value_bytes + rest_bytes + master_bytes; }
};
uint64_t tile_elements(const BucketRecord& bucket, size_t tile);
/// `place` is in the record. What was never written takes no block.
PieceBlocks blocks_of(const JobRecord& record, const SnapshotPlace& place);

/// The content of a record that nobody changes; any thread. Pieces are numbered: the extents of
/// blobs and buffers, and then the tiles of buckets, both in the catalogue's order.
class SnapshotContents {
 public:
  /// Walks over all of it.
  explicit SnapshotContents(std::shared_ptr<const JobRecord> record);

  size_t shard_count() const { return record_->shards.size(); }
  SnapshotShard shard(size_t index) const;
  uint64_t piece_count() const { return first_tile_.back(); }
  /// Nothing behind the last one.
  std::optional<SnapshotPlace> place(uint64_t piece) const;
  /// That its piece takes in memory; 0 where it is in no such record.
  uint64_t memory_bytes(const SnapshotPlace& place) const;
  /// In the order of the tile's elements.
  std::vector<SnapshotRun> runs(size_t bucket, size_t tile) const;

 private:
  bool has_rest(const ShardRecord& shard) const;

  std::shared_ptr<const JobRecord> record_;
  std::vector<uint64_t> first_extent_;        // number of each shard's first piece, and of the end
  std::vector<uint64_t> first_tile_;          // of each bucket's
  std::vector<std::vector<size_t>> members_;  // shards of each bucket, by their places in it
};

}  // namespace memd
