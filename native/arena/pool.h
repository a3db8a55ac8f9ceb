// The daemon's memory: segments that belong to nobody yet.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arena/segment.h"
#include "base/status.h"

namespace memd {

enum class LockMode : uint8_t {
  required,  // the service: refuses to start where the pool can't be locked
  wanted,    // an embedded daemon: goes on unlocked and reports it
};

struct PoolOptions {
  uint64_t bytes = 0;          // rounded up to whole segments
  uint64_t segment_bytes = 0;  // 0: segment_bytes_for(bytes)
  bool huge_pages = true;      // tried first, 4 KiB pages where none are reserved
  LockMode lock = LockMode::required;
};

/// What the pool got, as opposed to what was asked for.
struct PoolReport {
  uint64_t bytes = 0;
  uint64_t segment_bytes = 0;
  uint64_t page_bytes = 0;
  bool locked = false;
  std::string note;  // why pages are small or memory is unlocked; empty where all was granted
  double prefault_seconds = 0;
};

/// 64 MiB; less for small pools, so that a job has segments for both of its sides: a sixteenth, in
/// whole 2 MiB, at least 2 MiB.
uint64_t segment_bytes_for(uint64_t pool_bytes);

/// Created once at start, all of it touched (and locked) before the daemon says it is ready. One
/// thread (the server thread) calls it.
class Pool {
 public:
  /// Refuses a pool larger than the memory that is available, and, with LockMode::required, larger
  /// than the memlock limit allows: the message names both sizes and what to change.
  static Result<std::unique_ptr<Pool>> create(const PoolOptions& options);
  /// What create() refuses before it takes any memory: for who has to decide first.
  static Status check(const PoolOptions& options);

  /// A segment of zeros, or nothing where all are taken.
  std::optional<Segment> take();
  /// Destroys the segment, whose memory goes back to the kernel, and puts a fresh one in its place.
  /// Where the kernel refuses memory for it the pool is smaller from then on, and the status says
  /// so.
  Status give_back(Segment segment);

  uint64_t segment_bytes() const { return report_.segment_bytes; }
  uint64_t segment_count_free() const { return free_.size(); }
  const PoolReport& report() const { return report_; }

 private:
  explicit Pool(const PoolOptions& options)
      : huge_pages_(options.huge_pages), lock_(options.lock) {}
  Status fill(uint64_t segment_count);
  Result<Segment> create_segment();

  bool huge_pages_;  // until they are refused for the first time
  LockMode lock_;
  PoolReport report_;
  std::vector<Segment> free_;
};

}  // namespace memd
