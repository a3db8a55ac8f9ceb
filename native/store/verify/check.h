// Whether everything that a set of volumes should hold is there: `memd check` without a daemon.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "store/format/catalogue.h"
#include "store/format/volume.h"

namespace memd {

/// One extent that a catalogue names, and what lies in it.
struct ExtentUse {
  ExtentRecord extent;
  std::string part;  // "parameter of tile 3", "rest of tile 3", "bytes 1048576 to 2097151"
  std::vector<std::string> shards;
};

/// All extents of a job's state, in the catalogue's order.
std::vector<ExtentUse> extents_of(const JobRecord& job);

/// Something that is not as it should be. A warning harms nobody and is mended by the next commits;
/// what is lost cannot be read any more.
struct CheckFinding {
  bool is_lost = true;
  std::string path;
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;
  std::string job;                  // empty: not of a single job
  std::string snapshot{};           // of that job; empty: of its last commit
  std::vector<std::string> shards;  // that lie in it
  std::string part;
  std::string reason;
};

/// A warning for each copy of a volume at `sequence` that is damaged.
std::vector<CheckFinding> superblock_findings(const std::string& path,
                                              const std::array<SuperblockCopy, 4>& copies,
                                              uint64_t sequence);

struct CheckedSnapshot {
  std::string name;
  uint64_t step = 0;
  bool is_lost = false;       // its catalogue is damaged: nothing more is known of it
  uint64_t extent_count = 0;  // some of which its job or other snapshots may name too
  uint64_t bytes = 0;
  std::vector<std::string> lost_shards;
};

struct CheckedJob {
  uint64_t job_id = 0;
  std::string name;
  uint64_t step = 0;
  uint64_t shard_count = 0;
  uint64_t extent_count = 0;
  uint64_t bytes = 0;
  std::vector<std::string> lost_shards;
  std::vector<CheckedSnapshot> snapshots{};
};

struct CheckedVolume {
  std::string directory;
  std::string path;
  uint64_t bytes = 0;
  std::string holder;
  Superblock superblock;
  std::array<SuperblockCopy, 4> copies;
};

struct CheckReport {
  std::vector<CheckedVolume> volumes;
  std::vector<CheckedJob> jobs;
  std::vector<CheckFinding> findings;
  uint64_t bytes = 0;  // read and compared
  double seconds = 0;

  bool anything_lost() const;
};

struct CheckOptions {
  std::vector<std::string> directories;  // all of one set, in any order
  std::string job;                       // empty: all
  /// On the calling thread, some ten times a second: bytes compared and bytes to compare. Where it
  /// answers false the check ends, with StatusCode::unavailable.
  std::function<bool(uint64_t, uint64_t)> progress;
  /// Each reads and compares one extent at a time: together they are the depth of the queue.
  uint32_t thread_count = 16;
  /// How long to wait for a daemon that just ended, as in VolumeSetOptions.
  uint32_t lock_wait_ms = 5000;
  /// As in VolumeSetOptions.
  std::function<int(int file)> flush_file{};
};

/// Reads superblocks, root, catalogues and every extent of a set that no daemon has open, and
/// writes nothing. The drives' caches are flushed before, so that what is read is what the next
/// daemon finds; where one cannot be, that is a finding. Any thread; blocks until it is done. An
/// error where it cannot even begin: no volume, one in use, volumes that are no set, a newer
/// format.
Result<CheckReport> check_volumes(const CheckOptions& options);

struct ListedVolumes {
  std::vector<CheckedVolume> volumes;
  std::vector<CheckedJob> jobs;  // without what a check alone knows
  std::string jobs_unknown;      // why there is no list of jobs
};

/// One volume of a set, whether or not the others are there.
Result<CheckedVolume> inspect_alone(const std::string& directory);
/// The view of `memd volume list`. The set may be in use: then its jobs may be a commit old.
Result<ListedVolumes> list_volumes(const std::vector<std::string>& directories);

}  // namespace memd
