// A job's catalogue on disk, and how a new one takes its place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "store/cache/shards.h"
#include "store/format/catalogue.h"
#include "store/journal/durable_job.h"
#include "store/journal/job_ledger.h"
#include "store/journal/progress.h"
#include "store/space/commit.h"
#include "store/space/job_space.h"
#include "store/state/catalogue_snapshot.h"

namespace memd {

/// Owns what the last catalogue on disk says, and whether something changed since. A commit asks it
/// for the job's catalogue. Owned by the Job; the server
/// thread calls everything; nothing blocks.
class DurableState final : public CatalogueSource {
 public:
  struct Parts {
    JobRecorder& recorder;
    Shards& shards;
    CatalogueSnapshot& snapshot;
    JobSpace& space;
    JobProgress& progress;
    JobLedger& ledger;
  };

  explicit DurableState(const Parts& parts) : parts_(parts) {}
  DurableState(const DurableState&) = delete;
  DurableState& operator=(const DurableState&) = delete;

  /// At start: this is on disk. It may be older than what the job was made of.
  void restore(const JobRecord& on_disk);
  const DurableJob& catalogue() const { return durable_; }
  /// The same, whole.
  JobRecord record() const;
  /// The larger one of the last catalogue on disk and the newest that was begun, in whole blocks.
  uint64_t catalogue_bytes_max() const { return std::max(durable_bytes_, committing_bytes_); }
  void set_catalogue_bytes(uint64_t bytes) { durable_bytes_ = bytes; }

  /// A commit should write something down.
  void note_change() { is_changed_ = true; }
  bool is_changed() const { return is_changed_; }
  /// The job is about to forget the shard, which the disk has until the next commit.
  void keep(uint32_t shard_id);

  void begin_commit() override;
  bool encode(size_t bytes_max) override;
  std::vector<std::byte> take_encoded() override;
  void abandon_commit() override;
  void fail_commit() override;
  /// Commits of which nobody knows whether the disk has them.
  uint64_t failed_commit_count() const { return failed_commit_count_; }
  void committed(uint64_t catalogue_tag) override;
  bool release_superseded(ExtentStore& extents, size_t count) override;

 private:
  const Parts parts_;
  DurableJob durable_;
  uint64_t durable_bytes_ = 0;
  uint64_t committing_bytes_ = 0;
  uint64_t failed_commit_count_ = 0;
  bool is_changed_ = false;
};

}  // namespace memd
