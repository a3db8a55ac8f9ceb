// The commit: what lies where is written down, and one superblock makes it true.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/histogram.h"
#include "base/status.h"
#include "store/format/block_bytes.h"
#include "store/format/catalogue.h"
#include "store/space/extent_store.h"

namespace memd {

/// What a commit writes for one job: its encoded record. Whoever has the job implements it, and is
/// there until its commits are done. The server thread calls everything; nothing blocks.
class CatalogueSource {
 public:
  /// The catalogue as of now. The commit may still fail before it begins to write.
  virtual std::vector<std::byte> begin_commit() = 0;
  /// Writing begins: the catalogue names what lies where now. Returns what may be released once it
  /// is durable.
  virtual std::vector<ExtentRecord> mark_committing() = 0;
  /// The catalogue is on disk, and what mark_committing() returned is released. `catalogue_tag`: of
  /// that catalogue, see Commits::catalogue_tag().
  virtual void committed(uint64_t catalogue_tag) = 0;

 protected:
  ~CatalogueSource() = default;
};

/// One commit at a time, over all jobs, since they share the root. The order of its writes is the
/// promise: state (before), catalogue and root; sync of every device; the superblock pair; sync of
/// the lead volume. Only then are `done` called and what the previous catalogue alone named
/// released.
class Commits {
 public:
  Commits(ExtentStore& extents, const Clock& clock) : extents_(extents), clock_(clock) {}

  /// At start: root and catalogues of the newest superblock, whose extents are reserved.
  /// `turn` lets the I/O queue run, and its error ends the waiting: what was asked of the devices
  /// goes on, and this object and the ExtentStore stay until it is done.
  Result<std::vector<JobRecord>> load(const std::function<Status()>& turn);

  /// `source` is asked for the job's catalogue when the commit starts. Capacity and earlier
  /// failures are reported before anything changed.
  void commit(uint64_t job_id,
              CatalogueSource& source,
              std::function<void(const Status&, double commit_seconds)> done);
  /// Takes the job out of the root; its extents, and `extents` with them, are free afterwards.
  void remove(uint64_t job_id, std::vector<ExtentRecord> extents, Done done);

  /// Which catalogue of the job is the last on disk: another number after each commit of it; 0: it
  /// has none.
  uint64_t catalogue_tag(uint64_t job_id) const;
  /// Its place on disk; for job 0, the root's. Valid until the next commit ends.
  std::span<const ExtentRecord> catalogue(uint64_t job_id) const;
  uint64_t take_job_id() { return root_.job_id_next++; }
  bool is_idle() const { return waiting_.empty() && !running_; }
  /// Job, and when it began or started to wait; the one that runs first, if any does.
  struct Open {
    uint64_t job_id = 0;
    uint64_t since_ns = 0;
    bool running = false;
  };
  std::vector<Open> open() const;
  const SecondsHistogram& seconds() const { return seconds_; }

 private:
  struct Commit {
    CatalogueSource* source = nullptr;  // nullptr: remove `job_id`
    uint64_t job_id = 0;
    std::vector<ExtentRecord> releasable;
    std::function<void(const Status&, double)> done;
    // While it runs:
    RootRecord root;
    ExtentRecord root_extent;
    uint64_t root_bytes = 0;
    std::vector<std::pair<ExtentRecord, std::unique_ptr<BlockBytes>>> writes;
    uint64_t started_ns = 0;  // and before, since when it waits
  };

  Result<std::vector<JobRecord>> load_records(const std::function<Status()>& turn);
  void start_next();
  Status prepare(Commit& commit);
  Status add_write(Commit& commit, std::span<const std::byte> bytes, ExtentRecord* extent);
  void abandon(Commit& commit);
  void finish(const std::shared_ptr<Commit>& commit, const Status& status);

  ExtentStore& extents_;
  const Clock& clock_;
  RootRecord root_;
  ExtentRecord root_extent_;
  std::deque<std::shared_ptr<Commit>> waiting_;
  bool running_ = false;
  Open current_;  // while one runs
  SecondsHistogram seconds_{kStepSecondsBounds};
};

}  // namespace memd
