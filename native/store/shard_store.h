// All jobs of a daemon: leases, residency, eviction, writeback, updates and commits.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena/pool.h"
#include "base/clock.h"
#include "base/descriptor_keeper.h"
#include "base/join.h"
#include "base/status.h"
#include "base/turn_budget.h"
#include "base/turn_phases.h"
#include "base/workers.h"
#include "io/io_queue.h"
#include "optim/adam.h"
#include "store/cache/sessions.h"
#include "store/host_memory.h"
#include "store/job/gradients.h"
#include "store/job/job.h"
#include "store/job/job_operations.h"
#include "store/job/jobs.h"
#include "store/job/statistics.h"
#include "store/job/store_parts.h"
#include "store/job_admissions.h"
#include "store/journal/keepsakes.h"
#include "store/snapshot/job_snapshots.h"
#include "store/snapshot/returns_to_snapshots.h"
#include "store/snapshot/snapshot_readings.h"
#include "store/space/commit.h"
#include "store/space/extent_store.h"
#include "store/space/snapshots.h"
#include "store/store_reports.h"
#include "store/turn_parts.h"
#include "store/verify/extent_walk.h"
#include "store/verify/live_check.h"
#include "store/verify/scrub.h"

namespace memd {

struct ShardStoreParts {
  Pool& pool;
  IoQueue& io;
  ExtentStore& extents;
  Workers& workers;
  const Clock& clock;
  /// That advance() is a part of; nullptr: it does all there is.
  TurnBudget* turn = nullptr;
  /// A job that names no quota gets this part of what is free: 1 / jobs_expected.
  uint32_t jobs_expected = 2;
  /// Keeps what jobs and sessions have in memory beyond this process; nullptr: nobody does.
  DescriptorKeeper* keeper = nullptr;
};

/// The heart of the daemon. One thread (the server thread) calls everything; nothing blocks but
/// load(). Replies run on the same thread, at once or later inside advance() or a completion.
class ShardStore {
 public:
  explicit ShardStore(const ShardStoreParts& parts);
  ~ShardStore();

  /// At start: jobs of the newest valid superblock. They hold no memory until somebody attaches,
  /// except for those whose memory is in `kept`: what is used of it is taken out, and closed steps
  /// are finished before anything else of their job. `turn` as in Commits::load().
  Status load(const std::function<Status()>& turn, KeptDescriptors* kept = nullptr);

  // Owners of what they are called.
  JobAdmissions& admissions() { return admissions_; }
  HostMemory& memory() { return memory_; }
  Gradients& gradients() { return gradients_; }
  JobOperations& operations() { return operations_; }
  JobSnapshots& snapshots() { return job_snapshots_; }
  ReturnsToSnapshots& returns_to_snapshots() { return returns_; }
  SnapshotReadings& snapshot_readings() { return snapshot_readings_; }
  StoreReports& reports() { return reports_; }
  const StoreReports& reports() const { return reports_; }
  /// The verification that somebody asked for.
  LiveCheck& live_check() { return live_check_; }

  /// Refused while sessions are attached or it has snapshots, unless `force`, which ends both. Its
  /// memory is released to memory().
  void drop_job(uint64_t job_id, bool force, Done done);

  Result<std::shared_ptr<Session>> attach(uint64_t job_id, const SessionOwner& owner = {});
  /// Sessions that load() took over and nobody resumed yet. The caller detaches
  /// those whose owner is dead.
  std::vector<KeptSession> kept_sessions() const { return sessions_.kept(); }
  /// Its process is back: what it asked for before is dropped, and its rings are served again.
  /// Refused where the session is not there or belongs to another process.
  Result<std::shared_ptr<Session>> resume_session(uint64_t session_id, const SessionOwner& owner);
  /// Reasons why load() could not take something over; one sentence each.
  const std::vector<std::string>& load_notes() const { return load_notes_; }
  /// Drops the session's leases, its unsealed gradients and what it had half written; returns how
  /// many leases there were.
  Result<uint32_t> detach(uint64_t session_id);
  void detach_all();
  /// Its job; fenced where it has ended.
  Result<Job*> job_of(uint64_t session_id) const { return parts_.job_of(session_id); }

  Result<std::pair<std::vector<ShardInfo>, bool>> declare(uint64_t session_id,
                                                          LabelledSpecs declared);
  void lease(const LeaseRequest& request, LeaseReply reply);
  void release_service_lease(uint64_t job_id, const LeaseGrant& grant, bool discard);
  /// Removes a blob, once it stands still; false where there is no such shard.
  void delete_shard(uint64_t session_id,
                    const std::string& name,
                    const std::function<void(Result<bool>)>& done);

  /// Serves the rings and retries what waits, or as much of it as the turn has time for, and notes
  /// in `phases` what it spent its time on. True where something happened.
  bool advance(TurnPhases& phases) { return turn_parts_.advance(phases); }
  /// Grants what waited for slots that workers have filled. To be called when their finished work
  /// was taken, before anything else. True where there was something.
  bool grant_filled() { return turn_parts_.grant_filled(); }
  bool advance() {
    TurnPhases unread;
    return advance(unread);
  }
  /// Somebody waits for pins to be given back: sessions must ring on release.
  bool wants_releases() const;
  /// Looks at all of them, so that the turn that follows finds those that were given back until
  /// now.
  void look_for_releases();
  /// When the first waiting lease runs out, or there is something to verify; 0: neither.
  uint64_t next_deadline_ns() const;
  bool is_idle() const;
  /// Rate of the verification in the background, bytes a second; 0: off, as at the start.
  void set_scrub_rate(uint64_t bytes_per_second) { scrub_.set_rate(bytes_per_second); }
  /// At the end: whoever waits for a lease is told that the daemon stops.
  void give_up_waiting();

  const std::unordered_map<uint64_t, std::shared_ptr<Session>>& sessions() const {
    return sessions_.all();
  }

 private:
  /// A stopped job that nobody uses any more becomes what the disk says it is.
  void return_to_disk(Job& job);

  /// Each session has its uses followed and a request served, and more while there is time; the
  /// next turn begins with the session behind the last one. True where there was something.
  bool serve_sessions();
  /// At most kRequestsATurn of its requests. True where there was one: the next turn serves more.
  bool serve(Session& session);
  bool end_unused_jobs();

  Status check_droppable(const Job& job) const;
  void drop_now(Job& job, const Done& done);
  void write_catalogue_anew(uint64_t job_id);
  VerificationParts verification_parts();

  ExtentStore& extents_;
  const Clock& clock_;
  TurnBudget without_bound_;
  TurnBudget& turn_;
  size_t serve_first_ = 0;  // of the sessions, whose turn it is first
  Keepsakes keepsakes_;
  Commits commits_;
  Jobs jobs_;
  Sessions sessions_{keepsakes_};
  const StoreParts parts_;
  std::vector<std::string> load_notes_;
  Snapshots snapshots_;
  ExtentPlaces places_;
  Scrub scrub_;
  LiveCheck live_check_;
  HostMemory memory_;
  Gradients gradients_;
  JobOperations operations_;
  SnapshotReadings snapshot_readings_;
  JobSnapshots job_snapshots_;
  ReturnsToSnapshots returns_;
  StoreReports reports_;
  JobAdmissions admissions_;
  TurnParts turn_parts_;
};

}  // namespace memd
