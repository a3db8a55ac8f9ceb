// Snapshots that the root lists, and what they keep.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "store/format/catalogue.h"
#include "store/space/job_space.h"

namespace memd {

/// A committed step of a job that later steps leave alone.
struct Snapshot {
  uint64_t id = 0;    // in this daemon's life
  uint64_t turn = 0;  // ascends in the root's order of its job's
  SnapshotEntry entry;
  /// Its catalogue's content; nothing where that is damaged.
  std::shared_ptr<const JobRecord> record;
  PinnedList extents;                 // its catalogue's, and all that this names
  SnapshotSpace space;                // space_of(), once
  std::set<std::string> lost_shards;  // with bytes that are gone
  bool is_catalogue_lost = false;     // on disk: the next daemon cannot read it
  bool is_ending = false;             // the next root does not list it
};

/// The part of its job's quotas that it takes. Walks over all of it; any thread.
SnapshotSpace space_of(const Snapshot& snapshot);

/// All snapshots of a daemon. Each pins its extents in the ExtentStore before it comes here. Owned
/// by the ShardStore; the server thread calls everything; nothing blocks.
class Snapshots {
 public:
  /// One is not whole any more: its job does not go back to that step.
  using StepLost = std::function<void(uint64_t job_id, const KeptStep& step)>;

  explicit Snapshots(StepLost step_lost) : step_lost_(std::move(step_lost)) {}

  const Snapshot& add(Snapshot snapshot);
  /// nullptr where there is none.
  const Snapshot* find(uint64_t id) const;
  const Snapshot* find(uint64_t job_id, const std::string& name) const;
  /// By ascending ids.
  std::vector<const Snapshot*> of_job(uint64_t job_id) const;
  /// The job goes back to it if a load breaks off; nullptr where nothing is loaded into it.
  const Snapshot* of_load(uint64_t job_id) const;
  /// The last of the root's list that is whole and of an earlier step than `step`; nullptr where
  /// there is none.
  const Snapshot* last_before(uint64_t job_id, uint64_t step) const;
  /// The names of the job's, with commas; for an error.
  std::string names_text(uint64_t job_id) const;

  /// The commit that takes it out of the root begins, or has failed.
  void set_ending(uint64_t id, bool is_ending) { all_.at(id).is_ending = is_ending; }
  /// Its job has gone back to it: as Commits::commit_gone_back() has changed the root's list.
  /// Returns those that were moved to the end, in their order.
  std::vector<const Snapshot*> list_last(uint64_t id);
  /// It ends.
  Snapshot take(uint64_t id);
  /// All of the job's end.
  std::vector<Snapshot> take_all(uint64_t job_id);
  /// Bytes of these shards are gone from the disk; of none: its catalogue's.
  void lose(uint64_t id, const std::vector<std::string>& shards);

 private:
  const StepLost step_lost_;
  std::map<uint64_t, Snapshot> all_;  // by id
  uint64_t id_next_ = 1;
  uint64_t turn_next_ = 1;
};

}  // namespace memd
