// A job's commits in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/workers.h"
#include "store/journal/job_ledger.h"
#include "store/state/catalogue_snapshot.h"
#include "store/state/private_tiles.h"

namespace memd {

/// One at a time: the server thread encodes a part of the job's record in each turn, a worker
/// writes it into the ledger's free place, and one word there makes it true. A daemon that dies
/// before leaves the commit before it. Owned by the Job, whose operation waits for the end; the
/// server thread calls everything; nothing blocks.
class MemoryCommits {
 public:
  struct Parts {
    const uint64_t job_id;
    CatalogueSnapshot& snapshot;
    JobLedger& ledger;
    const PrivateTiles& tiles;
    Workers& workers;
  };

  explicit MemoryCommits(const Parts& parts) : parts_(parts) {}
  MemoryCommits(const MemoryCommits&) = delete;
  MemoryCommits& operator=(const MemoryCommits&) = delete;

  /// The job as it is now, on the catalogue with the tag `base`. `done` where the next daemon would
  /// go on from it, or where none goes on with the job.
  void commit(uint64_t base, std::function<void()> done);
  /// advance() has something to do.
  bool is_encoding() const { return done_ != nullptr && parts_.snapshot.is_writing(); }
  /// Encodes about `bytes_max` more.
  void advance(size_t bytes_max);

 private:
  void write(std::vector<std::byte> record);
  void finish();

  const Parts parts_;
  uint64_t base_ = 0;
  std::function<void()> done_;  // while one runs
};

}  // namespace memd
