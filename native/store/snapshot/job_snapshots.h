// Snapshots of jobs: made, listed, restored, dropped.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "store/job/job_operations.h"
#include "store/job/statistics.h"
#include "store/job/store_parts.h"
#include "store/snapshot/snapshot_readings.h"
#include "store/space/snapshots.h"

namespace memd {

struct SnapshotRequest {
  uint64_t job_id = 0;
  std::string name;
  uint64_t created_s = 0;  // now, since 1970
  /// Drawn by the caller: a request that got no answer is asked again with the same one.
  uint64_t number = 0;
  /// That will load a checkpoint: the job goes back to this snapshot unless end_load() drops it.
  /// It has a name of a load (is_load_name()), and no other snapshot has. 0: it is no load's.
  uint64_t session_id = 0;
};

/// A snapshot is an operation of its job: it runs between steps, so that the catalogue on disk
/// stays what it is meanwhile. First a sync makes that the committed step. Then the catalogue is
/// read back, everything that it names is pinned, and one commit puts it into the root under the
/// snapshot's name.
///
/// From the moment that one of a load is asked for until it is gone, its job is loading
/// (JobProgress): one session has it, nothing else is kept or gone back to, and no step begins.
/// Owned by the ShardStore; the server thread calls everything; nothing blocks.
class JobSnapshots {
 public:
  using Made = std::function<void(const Result<SnapshotInfo>&)>;

  JobSnapshots(const StoreParts& parts,
               Snapshots& snapshots,
               const SnapshotReadings& readings,
               JobOperations& operations)
      : parts_(parts), snapshots_(snapshots), readings_(readings), operations_(operations) {}
  JobSnapshots(const JobSnapshots&) = delete;
  JobSnapshots& operator=(const JobSnapshots&) = delete;

  /// Keeps the job's last committed step, with what was put since. It is on disk when `made` runs.
  void create(const SnapshotRequest& request, Made made);
  /// Extents that it alone named are free afterwards. Refused while somebody reads it, and for the
  /// one of a load.
  void drop(uint64_t job_id, const std::string& name, Done done);
  /// The session's load counts from here on: after a sync its snapshot is dropped. On disk when
  /// `done` runs. not_found: nothing is loaded, and a request for this snapshot that comes later
  /// is refused.
  void end_load(uint64_t session_id, const std::string& name, Done done);
  /// The job's committed step becomes the snapshot's, as the job was then: with the shards of that
  /// time. What it is now is gone, also in memory. Its quotas, durability and weight stay. Refused
  /// while somebody uses the job. If a load into the job had broken off, its snapshot is dropped.
  void restore(uint64_t job_id, const std::string& name, Made made);
  /// The same for a load that broke off, whose snapshot is dropped then: nobody is attached, and
  /// what is not on disk is given up. not_found: there is nothing to go back to by now, since the
  /// load was ended, or its snapshot was not made.
  void take_back(uint64_t job_id, Made made);
  /// Oldest first.
  Result<std::vector<SnapshotInfo>> list(uint64_t job_id) const;

 private:
  struct Creation;
  using CreationPointer = std::shared_ptr<Creation>;
  struct Restoring;
  using RestoringPointer = std::shared_ptr<Restoring>;

  /// Why there can be none, or the answer to a request that was granted before.
  std::optional<Result<SnapshotInfo>> answer_early(const Job& job,
                                                   const SnapshotRequest& request) const;
  /// ok, or why the one of a load, or another one beside it, is not made.
  Status check_load(const Job& job, const SnapshotRequest& request) const;
  /// ok, or whose sessions are in the way of a load.
  static Status check_alone(const Job& job, uint64_t session_id);
  void begin(const CreationPointer& creation);
  void read_catalogue(const CreationPointer& creation);
  void decode(const CreationPointer& creation);
  void decoded(const CreationPointer& creation);
  void pin(const CreationPointer& creation);
  void commit(const CreationPointer& creation);
  void unpin(const CreationPointer& creation, const Status& why);
  void finish(const CreationPointer& creation, const Result<SnapshotInfo>& answer);
  Status check_unused(const Job& job) const;
  void begin_restore(Job& job, const std::string& name, const Status& synced, const Made& made);
  void built(const RestoringPointer& restoring);
  Status check_memory(const Restoring& restoring) const;
  void committed(const RestoringPointer& restoring, const Status& status);
  /// In memory as in the root.
  void list_last(Job& job, const Snapshot& kept);
  /// The job is what the snapshot says: what a load into it left goes.
  void restored(uint64_t job_id, const SnapshotInfo& info, const Made& made);
  void go_back(const RestoringPointer& restoring,
               std::unique_ptr<Job> fresh,
               const Result<SnapshotInfo>& answer);
  void refuse(const RestoringPointer& restoring, const Status& why);
  void note_ended_early(uint64_t session_id, const Job& job, const std::string& name);
  void begin_drop(Job& job, const std::string& name, const Done& done);
  /// Nothing refers to these any more.
  void end(Snapshot snapshot);
  void end(std::unique_ptr<Job> fresh);
  Status no_such(const Job& job, const std::string& name) const;
  /// Why an operator cannot drop the snapshot of a load.
  static Status ends_with_load(const Job& job, const std::string& name);

  const StoreParts& parts_;
  Snapshots& snapshots_;
  const SnapshotReadings& readings_;
  JobOperations& operations_;
  /// Loads that ended before the request for their snapshot had come: the last of each session.
  std::map<uint64_t, std::string> ended_early_;
};

}  // namespace memd
