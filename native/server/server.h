// The daemon's native half: a face that any thread may call, over the thread that owns the store.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor_keeper.h"
#include "base/owned_fd.h"
#include "base/status.h"
#include "server/engine.h"
#include "server/moment_calls.h"
#include "server/rank_calls.h"
#include "server/server_thread.h"
#include "server/service_lease.h"
#include "server/snapshot_calls.h"
#include "store/shard_store.h"

namespace memd {

/// Descriptors for a client; closed when this is destroyed.
struct SessionGrant {
  uint64_t session_id = 0;
  // The steps at which the job stood when it was granted.
  uint64_t committed_step = 0;
  uint64_t durable_step = 0;
  OwnedFd session;
  OwnedFd table;
  OwnedFd doorbell;
  uint64_t segment_bytes = 0;
  uint64_t arena_reserved_bytes = 0;
};

/// Every public method may be called from any thread and waits for the server thread, at most its
/// timeout, or one of ours where it has none: the request goes on after that, and the error says
/// what was in flight.
class Server : public std::enable_shared_from_this<Server> {
 public:
  /// Opens the volumes, makes the pool, loads the jobs and starts the threads. `kept` is what the
  /// daemon before left with the keeper: memory of jobs and of sessions goes on from there.
  static Result<std::shared_ptr<Server>> start(const ServerOptions& options,
                                               KeptDescriptors kept = {});
  ~Server();

  const StartReport& report() const { return report_; }

  Result<JobInfo> open_job(const OpenJobRequest& request);
  Result<JobInfo> find_job(const std::string& name);
  Result<std::vector<JobInfo>> jobs();
  /// As ShardStore's.
  Result<std::vector<ShardInfo>> shards(uint64_t job_id,
                                        uint32_t first = 0,
                                        size_t count_max = std::numeric_limits<size_t>::max());
  Result<ShardInfo> find_shard(uint64_t job_id, const std::string& name);
  Status drop_job(uint64_t job_id, bool force);
  SnapshotCalls snapshots() { return SnapshotCalls(*thread_); }
  RankCalls ranks() { return RankCalls(*thread_); }
  /// From now on, and on disk with the job's next commit; stop() makes one.
  Status set_job_weight(uint64_t job_id, JobWeight weight);

  /// If it is not done in time, there is no session.
  Result<SessionGrant> attach(uint64_t job_id,
                              const SessionOwner& owner = {},
                              double timeout_s = 60);
  /// Sessions of the daemon before whose processes have not come back yet.
  Result<std::vector<KeptSession>> kept_sessions();
  /// Once, when those of them whose process is dead are detached: steps that were closed in the
  /// daemon before are made from here on.
  void redo_steps();
  /// For the process that the session belongs to. No descriptors: it has them.
  Result<SessionGrant> resume_session(uint64_t session_id, const SessionOwner& owner);
  /// A step that was closed and that the daemon is finishing; 0: none.
  Result<uint64_t> closing_step(uint64_t job_id);
  Result<std::vector<OwnedFd>> segment_fds(uint64_t session_id, uint64_t first);
  Result<uint32_t> detach(uint64_t session_id);

  Result<std::pair<std::vector<ShardInfo>, bool>> declare(uint64_t session_id,
                                                          const std::vector<ShardSpec>& specs);
  /// `others`: ranks that close it with the request's session.
  Result<StepReport> step(const StepRequest& request,
                          const std::vector<StepCall>& others,
                          double timeout_s);
  Status expect_step(uint64_t session_id, const std::vector<StepGroup>& groups);
  Result<StepReport> sync(uint64_t session_id, double timeout_s);
  Status drop_gradients(uint64_t session_id, const std::vector<uint32_t>& shard_ids);
  Result<bool> delete_shard(uint64_t session_id, const std::string& name);
  Result<std::unique_ptr<ServiceLease>> lease(
      uint64_t session_id, uint32_t shard_id, Part part, LeaseMode mode, double timeout_s);
  MomentCalls moments() { return MomentCalls(*thread_); }

  Result<ServerStatistics> statistics();
  /// Work that has been begun and is not done, the oldest first.
  Result<std::vector<Activity>> in_flight();
  /// Whether the jobs' memory outlives this process; false also if a keeper failed.
  bool outlives_process() const { return keeper_ != nullptr && !keeper_->has_failed(); }
  /// See ShardStore::set_scrub_rate().
  void set_scrub_rate(uint64_t bytes_per_second);
  /// See LiveCheck.
  Result<uint64_t> begin_check(const LiveCheckRequest& request);
  Result<LiveCheckProgress> check_progress(uint64_t check_id);
  void end_check(uint64_t check_id);
  uint64_t heartbeat() const { return thread_->heartbeat(); }

  /// Finishes what was begun, makes what was written durable, ends the threads. Sessions end,
  /// unless they outlive the process: then the next daemon goes on with them. Where a device does
  /// not answer in time, a deadline error says on what it waited; the disk is at the last commit
  /// then, and what the device may still write to is kept until the process ends. Idempotent.
  Status stop(double timeout_s);

 private:
  Server(std::shared_ptr<DescriptorKeeper> keeper, std::unique_ptr<Engine> engine);
  /// On the server thread.
  ShardStore& store();
  /// Ends what a caller that is gone has left. On any thread.
  void give_up_session(uint64_t session_id);
  void refill_pool();
  void refill_pool_after(const Status& refusal);
  /// If the job goes back to a snapshot by itself.
  Status wait_for_return(const std::string& job);

  const StartReport report_;
  const std::shared_ptr<DescriptorKeeper> keeper_;
  std::mutex stop_mutex_;
  std::unique_ptr<ServerThread> thread_;
};

}  // namespace memd
