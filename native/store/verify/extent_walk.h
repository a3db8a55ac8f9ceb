// Every extent that a catalogue on disk names, one after the other, while jobs come and go.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/status.h"
#include "store/cache/shards.h"
#include "store/journal/durable_job.h"
#include "store/journal/progress.h"
#include "store/space/commit.h"
#include "store/space/lost_shards.h"
#include "store/space/snapshots.h"
#include "store/state/private_tiles.h"

namespace memd {

/// One job as a walk over its extents sees it, valid while nothing else runs.
struct VerifiedJob {
  const std::string& name;
  const Shards& shards;
  const JobSpace& space;
  const DurableJob& durable;
  const PrivateTiles& tiles;
  const LostShards& lost;
  const JobProgress& progress;
};

/// The jobs whose extents are verified. Implemented by whoever has the jobs; the server thread.
class VerifiedJobs {
 public:
  virtual ~VerifiedJobs() = default;
  virtual std::vector<uint64_t> ids() const = 0;
  /// Nothing where there is no such job, or it is being dropped: nothing of it is missed.
  virtual std::optional<VerifiedJob> verified(uint64_t job_id) const = 0;
  /// Replica `replica` of the entry, or the rest of that tile, is gone from the disk.
  virtual void lose(uint64_t job_id,
                    const Entry& entry,
                    size_t replica,
                    const Status& why) const = 0;
};

/// An extent by its owner's names, which stay what they are while extents change.
struct ExtentPlace {
  /// `catalogue` of job 0 is the root. `bytes`: a piece of a blob or buffer.
  enum class Kind : uint8_t { catalogue, bytes, parameter, rest };
  uint64_t job_id = 0;
  uint64_t snapshot_id = 0;  // 0: the job's last commit
  Kind kind = Kind::catalogue;
  size_t owner = 0;  // entry (of a snapshot: shard) of bytes, bucket of the others
  size_t index = 0;  // in the catalogue or the bytes, or the tile
};

/// The content of each place, by the last commit on disk: a step that replaces tiles changes
/// nothing here until it is committed, so that verification sees what a restart would read. Bytes
/// that are being overwritten are no place meanwhile. Places of a snapshot stay what they are until
/// it is dropped. The server thread.
class ExtentPlaces {
 public:
  ExtentPlaces(const Commits& commits, const VerifiedJobs& jobs, Snapshots& snapshots)
      : commits_(commits), jobs_(jobs), snapshots_(snapshots) {}

  /// Nothing where no catalogue on disk names anything.
  std::optional<ExtentRecord> find(const ExtentPlace& place) const;
  bool names(const ExtentPlace& place, const ExtentRecord& extent) const;
  /// Newer bytes in memory, or in an extent that the next commit will name, take its place; or a
  /// step is about to make them.
  bool is_being_replaced(const ExtentPlace& place) const;
  /// Names the shard, for an error.
  std::string describe(const ExtentPlace& place) const;
  /// As check_volumes() calls it: "parameter of tile 3".
  std::string part(const ExtentPlace& place) const;
  std::vector<std::string> shards(const ExtentPlace& place) const;
  /// The snapshot's name; empty where it is of the job's last commit.
  std::string snapshot_name(const ExtentPlace& place) const;
  /// Its shards are marked lost; nothing for a catalogue of a job.
  void lose(const ExtentPlace& place, const Status& why) const;
  /// Places of one kind and job, and what is in them: how far a walk goes.
  size_t owner_count(const ExtentPlace& place) const;
  size_t index_count(const ExtentPlace& place) const;
  const VerifiedJobs& jobs() const { return jobs_; }
  std::vector<const Snapshot*> snapshots(uint64_t job_id) const {
    return snapshots_.of_job(job_id);
  }
  /// The oldest of the job's snapshots after this one; 0: there is none.
  uint64_t next_snapshot(uint64_t job_id, uint64_t snapshot_id) const;
  /// Bytes of state, also that of snapshots, without catalogues and root.
  uint64_t state_bytes(uint64_t job_id) const;

 private:
  static const Entry& entry(const VerifiedJob& job, const ExtentPlace& place);
  /// nullptr where it is gone, or about to be.
  const Snapshot* snapshot(const ExtentPlace& place) const;

  const Commits& commits_;
  const VerifiedJobs& jobs_;
  Snapshots& snapshots_;
};

/// A cursor over the places: each is met once, in the state it has when its turn comes.
class ExtentWalk {
 public:
  struct Found {
    ExtentPlace place;
    ExtentRecord extent;
  };

  explicit ExtentWalk(const ExtentPlaces& places) : places_(places) {}

  /// From the beginning: these jobs, or all of them and the root.
  void begin(std::optional<std::set<uint64_t>> only = std::nullopt);
  /// Nothing at the end, or where this turn's share was looked through: see at_end().
  std::optional<Found> next();
  bool at_end() const { return at_end_; }

 private:
  bool go_on();

  const ExtentPlaces& places_;
  std::optional<std::set<uint64_t>> only_;
  ExtentPlace cursor_;  // what next() looks at first
  bool at_end_ = true;
};

}  // namespace memd
