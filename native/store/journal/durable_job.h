// A job as the last catalogue on disk describes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "store/format/catalogue.h"

namespace memd {

/// The places of everything on disk, which shards have a maximum, and as of when. Names, shapes and
/// places in buckets are the job's, which does not change them: with them, encoded, each shard
/// takes about 60 bytes more, and as a JobRecord 200. Whether a bucket has a place for maxima is
/// the job's too: the place may be empty on disk. Owned by the Job, on its thread.
class DurableJob {
 public:
  DurableJob() = default;  // of no catalogue: everything is 0
  /// `ids`: the job's, of the record's shards, in its order, or kNoId for what the job has no more.
  DurableJob(const JobRecord& record, std::span<const uint32_t> ids);
  /// The same piece by piece: each bucket and its tiles, and then each shard after its extents, by
  /// ascending ids. `job`: its fields, without shards and buckets. So much is set aside, and not
  /// touched before it is used.
  struct Counts {
    size_t ids_end = 0;
    size_t buckets = 0;
    size_t extents = 0;
    size_t blobs = 0;
  };
  DurableJob(const JobRecord& job, const Counts& counts);
  /// A shard's state at the commit, apart from its extents.
  struct ShardMarks {
    bool written = false;
    bool keeps_maximum = false;
    uint64_t generation = 0;
  };
  void add_tile(const TileRecord& tile);
  void end_bucket();
  void add_extent(const ExtentRecord& extent);
  void add_shard(uint32_t shard_id, const ShardMarks& marks);
  /// One that the job has no more; extents that were added for it count for nothing.
  void add_gone(ShardRecord shard);

  static constexpr uint32_t kNoId = ~uint32_t{0};

  uint64_t step() const { return step_; }
  uint64_t undurable_since() const { return undurable_since_; }
  size_t bucket_count() const { return tile_ends_.size(); }
  size_t tile_count(size_t bucket) const { return tile_ends_[bucket] - tile_begin(bucket); }
  TileRecord tile(size_t bucket, size_t index) const;

  /// The job is about to forget the shard. `shard`: what does not change of it.
  void keep(uint32_t shard_id, ShardRecord shard);
  /// `job`: its record as it is now, with `ids` of its shards. Returns what the catalogue says; the
  /// shards that the job has no more come last.
  JobRecord record(const JobRecord& job, std::span<const uint32_t> ids) const;

 private:
  struct Blob {
    uint32_t shard_id = 0;
    uint32_t extent_begin = 0;
    uint32_t extent_count = 0;
  };

  /// Tiles of the buckets before it.
  uint32_t tile_begin(size_t bucket) const { return bucket == 0 ? 0 : tile_ends_[bucket - 1]; }
  bool names(uint32_t shard_id) const { return shard_id < named_.size() && named_[shard_id]; }
  ExtentRecord extent(size_t index) const;
  /// Fills in what it says of a shard that it names.
  void fill(uint32_t shard_id, ShardRecord& shard) const;

  uint64_t step_ = 0;
  uint64_t host_bytes_ = 0;
  uint64_t nvme_bytes_ = 0;
  uint64_t undurable_since_ = 0;
  uint32_t durability_ = 0;
  uint32_t weight_ = JobWeight::kOne;
  // By id.
  std::vector<bool> named_;
  std::vector<bool> written_;
  std::vector<bool> keeps_maximum_;
  std::vector<uint64_t> generations_;
  /// Encoded: two of each tile, in their order, and then those of `blobs_`.
  std::vector<std::byte> extents_;
  std::vector<uint32_t> tile_ends_;
  size_t shard_extents_begin_ = 0;  // in extents_: those of the shard that is added next
  std::vector<Blob> blobs_;         // that are written, by id
  std::vector<ShardRecord> kept_;   // whole
};

}  // namespace memd
