// Notes for the next daemon on a job's extents, and on tiles that no catalogue names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "store/cache/bucket.h"
#include "store/cache/entry.h"
#include "store/journal/job_ledger.h"
#include "store/space/job_space.h"
#include "store/state/private_tiles.h"

namespace memd {

/// Writes to the job's ledger and TileWords, where there are any. A step that can be undone logs
/// nothing that it replaces: its commit's catalogue names that. Owned by the Job; the server
/// thread calls everything; nothing blocks.
class ExtentLog {
 public:
  ExtentLog(JobLedger& ledger, const JobSpace& space, PrivateTiles& tiles)
      : ledger_(ledger), space_(space), tiles_(tiles) {}
  ExtentLog(const ExtentLog&) = delete;
  ExtentLog& operator=(const ExtentLog&) = delete;

  void note_value(const Entry& entry, size_t index);
  void note_rest(const Bucket& bucket, size_t tile);
  /// A tile has new extents, as of `step`; its bytes in memory are not the only ones any more. Of
  /// one that is half updated to the next step, pieces before `piece_next` are of that one.
  void note_tile(const Bucket& bucket,
                 size_t tile,
                 uint64_t step,
                 std::optional<uint64_t> piece_next = std::nullopt);
  /// The tile's record in TileWords, where there are any; without room the ledger is given up.
  std::optional<uint32_t> tile_record(uint64_t key);

 private:
  JobLedger& ledger_;
  const JobSpace& space_;
  PrivateTiles& tiles_;
};

}  // namespace memd
