// A job's catalogue as of one moment, written a part at a time while the job goes on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "store/cache/shards.h"
#include "store/format/catalogue.h"
#include "store/journal/durable_job.h"
#include "store/state/job_recorder.h"

namespace memd {

/// The unit is a tile or an extent. Code that changes or removes a shard meanwhile
/// says so before (code that adds one: at once), and the shard's part is kept as it was. Extents of
/// parameters change in steps alone, which end before. A commit on disk and one in memory use it in
/// turn, as operations of a job do. Owned by the Job; the server thread calls everything; nothing
/// blocks.
class CatalogueSnapshot {
 public:
  CatalogueSnapshot(const JobRecorder& recorder, const Shards& shards)
      : recorder_(recorder), shards_(shards) {}
  CatalogueSnapshot(const CatalogueSnapshot&) = delete;
  CatalogueSnapshot& operator=(const CatalogueSnapshot&) = delete;

  /// The moment. `for_disk`: end() will be asked what it says in short.
  void begin(bool for_disk);
  /// Writes about `bytes_max` more.
  void write(size_t bytes_max);
  bool is_writing() const { return state_ == State::writing; }
  /// The whole, for JobEncoder::seal().
  std::vector<std::byte> take() { return encoder_.take(); }
  /// The same in short. Ends it.
  DurableJob end();
  /// Nothing came of it.
  void abandon();

  /// A fact of the shard that the catalogue names is about to change.
  void before_change(uint32_t shard_id);
  void before_removal(uint32_t shard_id);
  /// The shard has come, maybe with the id of one that was removed.
  void added(uint32_t shard_id);

 private:
  enum class State : uint8_t { none, writing, whole };
  /// A shard that the cursor has not passed, as of the beginning; none: it had not come.
  struct Kept {
    std::optional<ShardRecord> record;
    bool is_removed = false;
  };

  /// Returns the bytes that were written or looked at.
  size_t write_next();
  size_t write_tile();
  size_t write_shard();
  void begin_shard(const Kept* kept);
  void end_shard(const Kept* kept);
  bool is_unwritten(uint32_t shard_id) const;
  const Kept* find_kept(uint32_t shard_id) const;
  void end_writing();

  const JobRecorder& recorder_;
  const Shards& shards_;
  State state_ = State::none;
  bool is_for_disk_ = false;
  JobRecord job_;  // without shards and buckets
  JobEncoder encoder_;
  DurableJob durable_;
  std::unordered_map<uint32_t, Kept> kept_;
  // As of the beginning.
  size_t bucket_count_ = 0;
  uint32_t ids_end_ = 0;
  uint32_t shard_count_ = 0;
  // The cursor: buckets go before shards.
  size_t bucket_ = 0;
  size_t tile_ = 0;
  bool is_bucket_on_disk_ = false;
  uint32_t shard_id_ = 0;
  bool is_in_shard_ = false;
  uint32_t extent_ = 0;
  uint32_t extent_count_ = 0;
  DurableJob::ShardMarks marks_;
#ifdef MEMD_COUNT_BYTES
  /// Encoded by a walk over the whole job at the beginning; empty for large jobs.
  std::vector<std::byte> expected_;
#endif
};

}  // namespace memd
