// Verification in the background: what lies on disk is read and compared before anybody needs it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/clock.h"
#include "store/commit.h"
#include "store/extent_store.h"
#include "store/job.h"
#include "store/statistics.h"
#include "store/workers.h"

namespace memd {

struct ScrubParts {
  ExtentStore& extents;
  UpdateWorkers& workers;
  const Clock& clock;
  const Commits& commits;
  const std::unordered_map<uint64_t, std::unique_ptr<Job>>& jobs;
  /// A catalogue of the job, or the root (0), is damaged on disk: it is written anew from memory.
  std::function<void(uint64_t job_id)> write_anew;
};

/// Walks over every extent that a catalogue on disk names, and over catalogues and root: one extent
/// at a time, at the lowest priority, at most so many bytes a second, hashed by the workers. Small
/// volumes are gone through once an hour, large ones without end. Owned by the ShardStore; the
/// server thread; nothing blocks. Between the parts of a read nothing is kept but ids and the
/// extent: jobs and shards come and go.
class Scrub {
 public:
  explicit Scrub(ScrubParts parts) : parts_(std::move(parts)) {}

  /// 0: nothing more is read. What is in flight is finished.
  void set_rate(uint64_t bytes_per_second);
  /// Reads on, where it is time. True where there is more to look through at once.
  bool advance();
  /// When advance() has something to do next; 0: never, or something in flight comes first.
  uint64_t next_ns() const;
  bool is_idle() const { return !reading_; }
  ScrubStatistics statistics() const;

 private:
  enum class Kind : uint8_t { catalogue, value, rest };
  /// One extent by its owner's names. Job 0's catalogue is the root.
  struct Place {
    uint64_t job_id = 0;
    Kind kind = Kind::catalogue;
    size_t owner = 0;  // entry or bucket
    size_t index = 0;
  };

  void begin_pass();
  /// The next extent; nothing at the end of the pass, or of this turn's share of the walk.
  std::optional<ExtentRecord> walk();
  const Job* find(uint64_t job_id) const;
  /// What is named there now; nothing where nothing is, or no catalogue names it yet.
  std::optional<ExtentRecord> named(const Place& place) const;
  bool still_named(const ExtentRecord& extent) const;
  void read(const ExtentRecord& extent);
  void compared(const ExtentRecord& extent, bool is_whole, bool was_read);
  void read_twice(const ExtentRecord& extent, const Status& status);
  std::string describe() const;
  /// Newer bytes in memory will take its place: nothing is lost.
  bool is_being_replaced() const;
  void finish_read(const ExtentRecord& extent);

  ScrubParts parts_;
  uint64_t rate_ = 0;         // bytes a second
  uint64_t due_ns_ = 0;       // of the next read, for the rate
  uint64_t pass_due_ns_ = 0;  // of the next pass
  bool in_pass_ = false;
  Place cursor_;  // of what is read, or looked at next
  bool reading_ = false;
  bool matches_ = false;  // the worker's word
  std::unique_ptr<BlockBytes> buffer_;
  ScrubStatistics statistics_;
  uint64_t last_pass_ns_ = 0;
};

}  // namespace memd
