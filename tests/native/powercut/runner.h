// A ShardStore over any queue, turned by hand in the same order every time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arena/pool.h"
#include "base/owned_fd.h"
#include "powercut/state.h"
#include "store/shard_store.h"
#include "twin.h"

namespace memd::powercut {

/// One run of the daemon's heart. Needs no test framework, so that programs can use it as well.
/// There is one update worker, and no I/O completes beside it: the order of events depends on
/// nothing but the queue.
class Runner {
 public:
  /// `wake` was given to the queue as its wake_fd. `taken`: by leave_free() of the run before, and
  /// no more free in this one.
  Runner(IoQueue& io, int wake_fd, VolumeSet set, const std::vector<ExtentRecord>& taken = {});
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  const Status& loaded() const { return loaded_; }
  ShardStore& store() { return *store_; }
  /// Takes free space until at most `bytes` are left, for as long as this runs; what it took.
  std::vector<ExtentRecord> leave_free(uint64_t bytes);

  /// Admits the job where it is not there, and attaches; the session's id.
  Result<uint64_t> attach(const std::string& job);
  Status declare(uint64_t session, const std::vector<ShardSpec>& specs);
  uint32_t shard_id(uint64_t session, const std::string& name);
  Status write(uint64_t session,
               const std::string& name,
               std::span<const std::byte> bytes,
               Part part = Part::value);
  Status expect_step(uint64_t session, const std::vector<StepGroup>& groups);
  /// And goes on for `turns` turns: what is updated early may be made meanwhile.
  void gradient_is_final(uint64_t session, const std::string& name, uint64_t turns);
  Status step(StepRequest request);
  Status sync(uint64_t session);
  /// A step, and while it runs, after `turns` turns, a sync of another session. Each is told when
  /// it is acknowledged.
  Status step_beside_sync(StepRequest request,
                          uint64_t other_session,
                          uint64_t turns,
                          const std::function<void()>& stepped,
                          const std::function<void()>& synced);
  Status remove(uint64_t session, const std::string& name);
  Status drop(const std::string& job);
  Status write_moments(uint64_t session, const std::string& name, const testing::Twin& twin);
  /// `written`: the job's step is on disk, in all tiers, and that is all so far. `load_session`:
  /// the one that will load something, or 0.
  Status make_snapshot(const std::string& job,
                       const std::string& name,
                       const std::function<void()>& written,
                       uint64_t load_session = 0);
  Status end_load(uint64_t session, const std::string& name);
  /// The session ends, and the job is what it was before its load.
  void break_off(uint64_t session);
  Status drop_snapshot(const std::string& job, const std::string& name);
  /// Its session ends before. `written`: as of make_snapshot().
  Status restore(const std::string& job,
                 const std::string& name,
                 const std::function<void()>& written);

  /// Everything, read as a client does: leases and moments. A bfloat16 shard's remainder, which
  /// nobody outside sees, is left out.
  SetState read_all();

 private:
  void turn();
  void until(const char* what, const std::function<bool()>& holds);
  void wait_for_return(uint64_t job_id);
  /// The job's operation of that kind runs: the sync before it has ended.
  bool is_running(uint64_t job_id, const char* kind) const;
  Status await(uint64_t job_id,
               const char* kind,
               const std::optional<Status>& answer,
               const std::function<void()>& written);
  std::pair<Status, LeaseGrant> lease(uint64_t session, uint32_t id, LeaseMode mode, Part part);
  void release(uint64_t session, const LeaseGrant& grant);
  ShardState read(uint64_t session, const ShardInfo& info);
  Status read_moments(uint64_t session, const ShardInfo& info, ShardState& into);

  ManualClock clock_;
  std::unique_ptr<Pool> pool_;
  IoQueue& io_;
  Workers workers_;
  ExtentStore extents_;
  std::unique_ptr<ShardStore> store_;
  Status loaded_;
};

}  // namespace memd::powercut
