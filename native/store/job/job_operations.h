// Operations on jobs: steps, syncs, flushes, access to moments. Those of one job wait for each
// other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "store/job/gradients.h"
#include "store/job/store_parts.h"
#include "store/journal/step_request.h"
#include "store/state/moments.h"
#include "store/step/operations.h"
#include "store/step/step.h"
#include "store/step/step_gate.h"

namespace memd {

/// Owns the times of steps, and whether steps that an earlier daemon closed may run; each job has
/// its own queue, Operations. Owned by the ShardStore; the server and rings call it on the server
/// thread. Nothing blocks: replies run at once or later.
class JobOperations {
 public:
  JobOperations(const StoreParts& parts, Gradients& gradients)
      : parts_(parts), gradients_(gradients) {}
  JobOperations(const JobOperations&) = delete;
  JobOperations& operator=(const JobOperations&) = delete;

  /// Once for each job: its owners that need the store's devices and clock.
  void connect(Job& job);
  /// After load(), once sessions of dead owners are detached, whose leases would be in the way: the
  /// steps that were closed in the daemon before are made.
  void redo_steps() { may_redo_ = true; }

  /// `others`: ranks that close it with the request's session.
  void step(StepRequest request, std::vector<StepCall> others, StepDone done);
  void step(StepRequest request, StepDone done) { step(std::move(request), {}, std::move(done)); }
  void sync(uint64_t session_id, StepDone done);
  void sync_job(uint64_t job_id, StepDone done);
  /// As Steps::has_orphaned_step().
  bool has_orphaned_step(uint64_t job_id) const;
  /// The number of the step that the job is finishing or has still to do; 0: none.
  uint64_t closing_step(uint64_t job_id) const;
  /// Adam's moments, of elements within one tile.
  void read_moments(const MomentsRequest& request, Moments::Read done);
  /// As Moments::write().
  void write_moments(const MomentsRequest& request,
                     uint64_t generation,
                     NewMoments values,
                     Done done);
  void write_moments(const MomentsRequest& request,
                     uint64_t generation,
                     MomentValues values,
                     Done done) {
    write_moments(request, generation, NewMoments(std::move(values)), std::move(done));
  }

  /// `start` runs with ok when it is its turn, or with the reason why that never comes.
  /// `kind` is what in_flight() calls it; see Operations for `at_once_max`.
  void enqueue(Job& job, const char* kind, Operations::Start start, size_t at_once_max = 1);
  /// An operation of the job that runs has ended.
  void end(uint64_t job_id);
  const StepTimes& times() const { return times_; }

 private:
  class StepCalls;

  /// Writes dirty tiles, of all buckets or one, for leases that wait for it.
  void ask_for_flush(Job& job, std::optional<uint32_t> bucket);

  const StoreParts& parts_;
  Gradients& gradients_;
  StepTimes times_;
  bool may_redo_ = false;
};

}  // namespace memd
