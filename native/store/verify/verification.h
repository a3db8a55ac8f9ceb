// One extent is read and compared with its checksum while the daemon works.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/status.h"
#include "base/workers.h"
#include "store/space/commit.h"
#include "store/space/extent_store.h"
#include "store/verify/extent_walk.h"

namespace memd {

struct VerificationParts {
  ExtentStore& extents;
  Workers& workers;
  const ExtentPlaces& places;
  /// A catalogue of the job, or the root (0), is damaged on disk: it is written anew from memory.
  std::function<void(uint64_t job_id)> write_anew;
};

/// The verdict on an extent, from the moment in which it was compared for the last time.
enum class Verdict : uint8_t {
  whole,
  released,  // no longer named: its place may hold anything
  damaged,   // but newer bytes take its place, or it is written anew: nothing is lost
  lost,      // the job stops at its last commit, and its shards are marked
  unread,    // the device failed each try: it says nothing about the bytes
};

/// One at a time, below all other I/O; hashed by the workers. Between the parts of a read nothing
/// is kept but the place and the extent: jobs and shards come and go. The server thread; nothing
/// blocks.
class Verification {
 public:
  using Told = std::function<void(Verdict, const Status&)>;

  explicit Verification(VerificationParts parts) : parts_(std::move(parts)) {}

  /// A mismatch is read once more. `pass`: see ExtentStore::begin_verification(). `told` may begin
  /// the next one.
  void begin(const ExtentWalk::Found& found, uint32_t pass, Told told);
  bool is_running() const { return told_ != nullptr; }
  const ExtentRecord& extent() const { return found_.extent; }
  /// The state of one that does not run.
  void free_memory() { buffer_.reset(); }

 private:
  /// The catalogue of a job, or the root: memory has it too.
  bool is_in_memory() const {
    return found_.place.kind == ExtentPlace::Kind::catalogue && found_.place.snapshot_id == 0;
  }
  void unread(const Status& status);
  void compared(bool is_whole);
  void read_twice(const Status& status);
  void finish(Verdict verdict, const Status& status);

  VerificationParts parts_;
  ExtentWalk::Found found_;
  uint32_t pass_ = 0;
  Told told_;
  bool matches_ = false;  // the worker's word
  std::unique_ptr<BlockBytes> buffer_;
};

}  // namespace memd
