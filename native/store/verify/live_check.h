// `memd check` of volumes that a daemon has open: it reads them itself, beside its work.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "store/space/commit.h"
#include "store/step/activity.h"
#include "store/verify/check.h"
#include "store/verify/extent_walk.h"
#include "store/verify/verification.h"

namespace memd {

struct LiveCheckRequest {
  std::set<uint64_t> job_ids;
  /// All jobs instead, root and superblocks.
  bool whole = false;
};

struct LiveCheckProgress {
  uint64_t bytes = 0;  // read and compared
  uint64_t bytes_all = 0;
  std::vector<CheckFinding> findings;  // those that were not told before
  /// At the end: volumes (of a whole check), jobs, and nothing of the above.
  std::optional<CheckReport> report;
};

/// One pass over everything as of the last commits on disk, some extents at a time, below all other
/// I/O, at no other rate. One at a time; whoever began it asks for progress, or it makes none: who
/// does not ask holds back no memory for findings, and is given up for the next one after a while.
/// A loss has the same consequences as one that the scrub finds. Owned by the ShardStore; the
/// server thread; nothing blocks.
class LiveCheck {
 public:
  LiveCheck(const VerificationParts& parts, const Commits& commits, const Clock& clock);

  /// Its number. Refused while another one runs.
  Result<uint64_t> begin(LiveCheckRequest request);
  /// An error ends it: it was ended before, or something could not be read for the moment.
  Result<LiveCheckProgress> progress(uint64_t check_id);
  /// Finishes what is in flight. Nothing if it ended before.
  void end(uint64_t check_id);
  /// At the daemon's end.
  void give_up();

  /// Reads on. True where there is more to look through at once.
  bool advance();
  /// When advance() has something to do that nothing else calls for; 0: never.
  uint64_t next_ns() const;
  bool is_idle() const;
  std::optional<Activity> activity() const;

 private:
  // Two tiles' worth of a bucket are 6 MiB: this keeps an NVMe drive busy, and memory small.
  static constexpr size_t kLanes = 8;

  struct Counted {
    uint64_t extents = 0;
    uint64_t bytes = 0;
  };

  bool read_extents();
  std::optional<ExtentWalk::Found> next_found();
  bool has_walked() const { return walk_.at_end() && !waiting_; }
  /// For another place that names it.
  bool is_being_read(const ExtentRecord& extent) const;
  /// Counts what lies at the place. `is_read`: for this place, and for no other of the same extent.
  void count(const ExtentWalk::Found& found, bool is_read);
  void told(uint64_t check_id,
            const ExtentWalk::Found& found,
            Verdict verdict,
            const Status& status);
  void add_finding(const ExtentWalk::Found& found, Verdict verdict, const Status& status);
  /// Superblocks, one after the other.
  bool read_superblocks();
  void superblock_read(uint64_t check_id, const Status& status);
  void volume_done();
  bool is_done() const;
  Counted counted(uint64_t job_id, uint64_t snapshot_id) const;
  std::vector<CheckedSnapshot> checked_snapshots(uint64_t job_id) const;
  CheckReport report() const;
  void fail(const Status& status);
  void forget();

  VerificationParts parts_;
  const Commits& commits_;
  const Clock& clock_;
  ExtentWalk walk_;
  std::vector<Verification> lanes_;
  std::optional<ExtentPlace> waiting_;  // its extent is being read for another place

  uint64_t id_next_ = 1;
  uint64_t running_ = 0;  // its number; 0: none runs
  uint32_t pass_ = 0;     // of the extents' verification
  LiveCheckRequest request_;
  Status failed_;
  uint64_t started_ns_ = 0;
  uint64_t asked_ns_ = 0;  // when somebody last wanted to know
  uint64_t bytes_ = 0;
  uint64_t bytes_all_ = 0;
  std::vector<CheckFinding> findings_;
  std::map<std::pair<uint64_t, uint64_t>, Counted> counted_;  // by job and snapshot

  // Superblocks: a copy that is damaged counts only where no commit wrote meanwhile.
  BlockBytes block_;
  bool reading_block_ = false;
  uint64_t sequence_ = 0;  // as the read began
  bool was_quiet_ = false;
  bool waits_for_quiet_ = false;
  size_t copy_ = 0;  // of the volume that is looked at
  std::array<SuperblockCopy, 4> copies_;
  Superblock newest_;
  std::vector<CheckedVolume> volumes_;
};

}  // namespace memd
