// The commit: what lies where is written down, and one superblock makes it true.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/histogram.h"
#include "base/status.h"
#include "base/turn_budget.h"
#include "base/workers.h"
#include "store/format/block_bytes.h"
#include "store/format/catalogue.h"
#include "store/space/extent_store.h"

namespace memd {

/// One job's part of a commit: its encoded record. The job's owner implements it, and outlives
/// its commits. A commit calls begin_commit(), encode() in as many turns as it
/// takes, take_encoded(), and then abandon_commit(), fail_commit(), or committed() and
/// release_superseded(). The server thread calls everything; nothing blocks.
class CatalogueSource {
 public:
  /// The catalogue is that of this moment.
  virtual void begin_commit() = 0;
  /// Encodes about `bytes_max` more of it; true once all is encoded.
  virtual bool encode(size_t bytes_max) = 0;
  /// For JobEncoder::seal().
  virtual std::vector<std::byte> take_encoded() = 0;
  /// It failed before anything was written: all is as if it had not been begun.
  virtual void abandon_commit() = 0;
  /// A write failed: the disk may name what it names.
  virtual void fail_commit() = 0;
  /// The catalogue is on disk. `catalogue_tag`: of it, see Commits::catalogue_tag().
  virtual void committed(uint64_t catalogue_tag) = 0;
  /// Releases up to `count` of the extents that it names no more; true once there are none left.
  virtual bool release_superseded(ExtentStore& extents, size_t count) = 0;

 protected:
  ~CatalogueSource() = default;
};

/// A snapshot that a start found.
struct LoadedSnapshot {
  SnapshotEntry entry;
  /// Its catalogue's content; nothing where that is damaged, so that nobody knows what it names.
  std::shared_ptr<const JobRecord> record;
  Status damage;
};

/// One commit at a time, over all jobs, since they share the root. The order of its writes is the
/// promise: state (before), catalogue and root; sync of every device; the superblock pair; sync of
/// the lead volume. Only then is what the previous catalogue alone named released, and `done`
/// called.
///
///   encoding → filling → writing → releasing
///
/// The server thread encodes and releases a bounded part in each turn; a worker copies and hashes.
/// Until it writes, a commit that fails leaves everything as it was.
class Commits {
 public:
  Commits(ExtentStore& extents, Workers& workers, const Clock& clock)
      : extents_(extents), workers_(workers), clock_(clock) {}

  /// At start: root and catalogues of the newest superblock, whose extents are reserved.
  /// `turn` lets the I/O queue run, and its error ends the waiting: what was asked of the devices
  /// goes on, and this object and the ExtentStore stay until it is done.
  Result<std::vector<JobRecord>> load(const std::function<Status()>& turn);
  /// Those that load() found, once. Of their extents the catalogues' alone are pinned.
  std::vector<LoadedSnapshot> take_loaded_snapshots() { return std::move(loaded_snapshots_); }

  /// `source` is asked for the job's catalogue when the commit starts. Capacity and earlier
  /// failures are reported before anything changed.
  void commit(uint64_t job_id,
              CatalogueSource& source,
              std::function<void(const Status&, double commit_seconds)> done);
  /// The same of a job that has gone back to the snapshot: from then on the root lists that one
  /// last of the job's, and before it those from before it.
  void commit_gone_back(uint64_t job_id,
                        const std::string& snapshot,
                        CatalogueSource& source,
                        std::function<void(const Status&, double commit_seconds)> done);
  /// Takes the job out of the root, and its snapshots with it; its catalogue and `extents` are
  /// released afterwards, and what its snapshots pin is unpinned.
  void remove(uint64_t job_id,
              std::vector<ExtentRecord> extents,
              std::vector<PinnedList> pinned,
              Done done);
  /// Puts the snapshot into the root. The caller has pinned all that it names, and its job commits
  /// nothing meanwhile.
  void add_snapshot(const SnapshotEntry& snapshot, Done done);
  /// Takes it out; `pinned` are unpinned afterwards.
  void drop_snapshot(uint64_t job_id, const std::string& name, PinnedList pinned, Done done);

  /// Which catalogue of the job is the last on disk: another number after each commit of it; 0: it
  /// has none.
  uint64_t catalogue_tag(uint64_t job_id) const;
  /// Its place on disk; for job 0, the root's. Valid until the next commit ends.
  std::span<const ExtentRecord> catalogue(uint64_t job_id) const;
  /// The job as the root names it; nullptr where it has no catalogue on disk.
  const RootEntry* root_entry(uint64_t job_id) const;
  uint64_t take_job_id() { return root_.job_id_next++; }
  bool is_idle() const { return waiting_.empty() && running_ == nullptr; }
  /// A piece of the commit that runs, and more while there is time. True where there was something
  /// to do.
  bool advance(TurnBudget& turn);
  /// Job, and when it began or started to wait; the one that runs first, if any does.
  struct Open {
    uint64_t job_id = 0;
    uint64_t since_ns = 0;
    bool running = false;
  };
  std::vector<Open> open() const;
  const SecondsHistogram& seconds() const { return seconds_; }

 private:
  enum class Phase : uint8_t { encoding, filling, writing, releasing };
  struct Write {
    ExtentRecord extent;
    std::unique_ptr<BlockBytes> block;
  };
  struct Commit {
    CatalogueSource* source = nullptr;      // where the job's catalogue changes
    std::function<void(RootRecord&)> edit;  // of anything else; may be empty
    uint64_t job_id = 0;
    std::vector<ExtentRecord> releasable;
    std::vector<PinnedList> pinned;  // no more, afterwards
    size_t unpinned_count = 0;       // of the last of them
    std::function<void(const Status&, double)> done;
    // While it runs:
    Phase phase = Phase::encoding;
    std::vector<std::byte> catalogue;
    RootRecord root;
    std::vector<Write> writes;  // of the catalogue, and the root's last
    uint64_t root_bytes = 0;
    uint64_t started_ns = 0;  // and before, since when it waits
  };

  using Turn = std::function<Status()>;
  Result<std::vector<JobRecord>> load_records(const Turn& turn);
  Status load_snapshot(const SnapshotEntry& entry, const Turn& turn);
  /// The record in these extents, which are reserved or pinned.
  Result<std::vector<std::byte>> read(std::span<const ExtentRecord> from,
                                      uint64_t length_bytes,
                                      const std::string& what,
                                      const Turn& turn);
  void enqueue(std::shared_ptr<Commit> commit);
  void start_next();
  void encode(TurnBudget& turn);
  Status allocate(Commit& commit);
  Status allocate(Commit& commit, size_t bytes);
  /// On a worker.
  static void fill_blocks(Commit& commit);
  void fill();
  void write();
  void write_superblock();
  void abandon(const Status& status);
  void written(const Status& status);
  void release(TurnBudget& turn);
  /// One extent; false where none is left.
  bool unpin_next(Commit& commit);
  void finish(const Status& status);

  ExtentStore& extents_;
  Workers& workers_;
  const Clock& clock_;
  RootRecord root_;
  ExtentRecord root_extent_;
  std::vector<LoadedSnapshot> loaded_snapshots_;
  std::deque<std::shared_ptr<Commit>> waiting_;
  std::shared_ptr<Commit> running_;
  SecondsHistogram seconds_{kStepSecondsBounds};
};

}  // namespace memd
