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
#include "base/workers.h"
#include "io/io_queue.h"
#include "optim/adam.h"
#include "store/cache/sessions.h"
#include "store/dropped_memory.h"
#include "store/job.h"
#include "store/jobs.h"
#include "store/journal/keepsakes.h"
#include "store/journal/step_request.h"
#include "store/recovery/remembered_job.h"
#include "store/space/commit.h"
#include "store/space/extent_store.h"
#include "store/statistics.h"
#include "store/verify/extent_walk.h"
#include "store/verify/live_check.h"
#include "store/verify/scrub.h"

namespace memd {

struct OpenJobRequest {
  std::string name;
  uint32_t uid = 0;
  uint64_t host_bytes = 0;  // 0: ShardStoreParts::jobs_expected decides
  uint64_t nvme_bytes = 0;
  bool fresh = false;
  /// An existing job keeps its own where nothing is said.
  std::optional<Durability> durability;
};

struct ShardStoreParts {
  Pool& pool;
  IoQueue& io;
  ExtentStore& extents;
  UpdateWorkers& workers;
  const Clock& clock;
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

  /// Finds the job or admits it; who wants it `fresh` drops it first.
  Result<JobInfo> open_job(const OpenJobRequest& request);
  Result<JobInfo> find_job(const std::string& name) const;
  std::vector<JobInfo> jobs() const;
  /// In the order of their ids: from `first` on, at most `count_max`.
  Result<std::vector<ShardInfo>> shards(uint64_t job_id,
                                        uint32_t first = 0,
                                        size_t count_max = std::numeric_limits<size_t>::max());
  /// not_found where the job has none of that name.
  Result<ShardInfo> find_shard(uint64_t job_id, const std::string& name);
  /// What the job gets of devices and workers that others want as well, from now on.
  Status set_job_weight(uint64_t job_id, JobWeight weight);
  /// Refused while sessions are attached, unless `force`. The memory it held is handed to
  /// `released` for the pool.
  void drop_job(uint64_t job_id, bool force, Done done);
  std::vector<Segment> take_released_segments() { return dropped_memory_.take_segments(); }
  void put_back_released(std::vector<Segment> segments) {
    dropped_memory_.put_back(std::move(segments));
  }
  void add_to_pool(Segment old_segment);

  Result<std::shared_ptr<Session>> attach(uint64_t job_id, const SessionOwner& owner = {});
  /// Sessions that load() took over and nobody resumed yet. Whoever knows that an owner is dead
  /// detaches its session.
  std::vector<KeptSession> kept_sessions() const { return sessions_.kept(); }
  /// After load(), once sessions of dead owners are detached, whose leases would be in the way: the
  /// steps that were closed in the daemon before are made.
  void redo_steps() { may_redo_ = true; }
  /// Its process is back: what it asked for before is dropped, and its rings are served again.
  /// Refused where the session is not there or belongs to another process.
  Result<std::shared_ptr<Session>> resume_session(uint64_t session_id, const SessionOwner& owner);
  /// The number of the step that the job is finishing or has still to do; 0: none.
  uint64_t closing_step(uint64_t job_id) const;
  /// What load() could not take over, and why; one sentence each.
  const std::vector<std::string>& load_notes() const { return load_notes_; }
  /// Drops the session's leases, its unsealed gradients and what it had half written; returns how
  /// many leases there were.
  Result<uint32_t> detach(uint64_t session_id);
  void detach_all();
  Result<Job*> job_of(uint64_t session_id) const;

  Result<std::pair<std::vector<ShardInfo>, bool>> declare(uint64_t session_id,
                                                          const std::vector<ShardSpec>& specs);
  void lease(const LeaseRequest& request, LeaseReply reply);
  void release_service_lease(uint64_t job_id, const LeaseGrant& grant, bool discard);
  Status drop_gradients(uint64_t session_id, const std::vector<uint32_t>& shard_ids);
  /// Removes a blob, once it stands still; false where there is no such shard.
  void delete_shard(uint64_t session_id,
                    const std::string& name,
                    const std::function<void(Result<bool>)>& done);

  /// How the session's next steps will update these shards, so that a bucket whose gradients it
  /// says to be final is updated before the step is closed. Undone where the step differs.
  Status expect_step(uint64_t session_id, const std::vector<StepGroup>& groups);
  void gradient_is_final(uint64_t session_id, uint32_t shard_id);
  /// A slot that was leased ahead of it is not used: nothing was written there.
  void gradient_unused(uint64_t session_id, uint32_t shard_id);
  void step(StepRequest request, StepDone done);
  void sync(uint64_t session_id, StepDone done);
  void sync_job(uint64_t job_id, StepDone done);
  /// Adam's moments, fp32, of elements within one tile.
  void read_moments(const MomentsRequest& request, Moments::Read done);
  /// Replaces them, and the generation; durable after the next sync or step.
  void write_moments(const MomentsRequest& request,
                     uint64_t generation,
                     std::vector<float> exp_avg,
                     std::vector<float> exp_avg_sq,
                     Done done);

  /// Serves the rings and retries what waits. True where something happened.
  bool advance();
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
  /// The verification that somebody asked for.
  LiveCheck& live_check() { return live_check_; }
  /// At the end: whoever waits for a lease is told that the daemon stops.
  void give_up_waiting();

  const std::unordered_map<uint64_t, std::shared_ptr<Session>>& sessions() const {
    return sessions_.all();
  }
  ServerStatistics statistics() const;
  /// Work that has been begun and is not done, the oldest first.
  std::vector<Activity> in_flight() const;

 private:
  JobInfo info_of(const Job& job) const;
  Job* find(uint64_t job_id) const;
  Result<Job*> admit(const OpenJobRequest& request);
  Status give_memory(Job& job);

  // At start.
  using Ledgers = std::map<uint64_t, std::unique_ptr<Ledger>>;
  struct ToRedo {
    Job* job;
    ClosedStep step;
  };
  Status reserve_extents(const JobRecord& record);
  /// Those that can be read. `some_claims_unknown`: of another one, nobody knows which segments are
  /// its job's.
  Ledgers take_ledgers(Inheritance& kept, bool& some_claims_unknown);
  /// From memory, where its ledger is in `ledgers` and memory is whole, or else from disk.
  Status load_job(const JobRecord& record,
                  Ledgers& ledgers,
                  Inheritance& kept,
                  std::vector<ToRedo>& to_redo);
  /// The job as the daemon before had it, or why it starts from disk.
  Result<std::unique_ptr<Job>> adopt(RememberedJob& remembered,
                                     std::unique_ptr<Ledger>& ledger,
                                     Inheritance& kept);
  void destroy_claimed(const Ledger& ledger);
  void destroy_unclaimed();
  /// Devices and workers learn it.
  void apply_weight(uint64_t job_id, JobWeight weight);
  Status set_durability(Job& job, const OpenJobRequest& request);
  /// A stopped job that nobody uses any more becomes what the disk says it is.
  void return_to_disk(Job& job);
  bool is_unused(const Job& job) const;
  uint64_t nvme_bytes_free() const;

  /// At most kRequestsATurn of its requests. True where there was one: the next turn serves more.
  bool serve(Session& session);
  bool advance_conditions(uint64_t job_id);
  /// The owners of its cache that need this store's devices and clock.
  void connect(Job& job);
  /// Brings up what comes next.
  bool look_ahead();

  /// Writes dirty tiles, of all buckets or one, for leases that wait for it.
  void ask_for_flush(Job& job, std::optional<uint32_t> bucket);

  void drop_gradients_of(Job& job, const std::function<bool(const Shard&)>& chosen);
  void drop_gradients_of(Job& job,
                         uint32_t bucket,
                         const std::function<bool(const Shard&)>& chosen);
  void drop_now(Job& job, const Done& done);
  /// `start` runs with ok when it is its turn, or with the reason why that never comes.
  /// `kind` is what in_flight() calls it.
  void enqueue(Job& job, const char* kind, Operations::Start start);
  void end_operation(uint64_t job_id);
  void write_catalogue_anew(uint64_t job_id);
  VerificationParts verification_parts();
  class StepCalls;
  std::unique_ptr<StepGate> step_gate(Job& job);

  Pool& pool_;
  IoQueue& io_;
  ExtentStore& extents_;
  UpdateWorkers& workers_;
  const Clock& clock_;
  const uint32_t jobs_expected_;
  Keepsakes keepsakes_;
  Commits commits_;

  Jobs jobs_;
  Sessions sessions_{keepsakes_};
  bool may_redo_ = false;
  DroppedMemory dropped_memory_;
  std::vector<std::string> load_notes_;
  uint64_t ring_protocol_errors_ = 0;
  uint64_t room_wait_ns_of_dropped_ = 0;
  StepTimes step_times_;
  ExtentPlaces places_;
  Scrub scrub_;
  LiveCheck live_check_;
};

}  // namespace memd
