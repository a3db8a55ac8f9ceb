// The steps and syncs of one job, and the calls of its sessions that close them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "store/cache/lease_request.h"
#include "store/cache/lease_waiters.h"
#include "store/journal/step_request.h"
#include "store/step/step.h"
#include "store/step/step_parts.h"

namespace memd {

/// Owned by its Job from the moment that a store has it; the server thread calls everything;
/// nothing blocks. A step is closed when it is accepted, and waits for its turn among the job's
/// operations. A session may ask for the same step again, after its answer was lost: it is made
/// once.
class Steps {
 public:
  explicit Steps(const StepParts& parts) : parts_(parts) {}
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  /// Closes the step, or joins the one that it repeats.
  void step(StepRequest request, StepDone done) { step(std::move(request), {}, std::move(done)); }
  /// `others`: ranks that close it with the request's session.
  void step(StepRequest request, std::vector<StepCall> others, StepDone done);
  /// On disk with what was put since the last step; tier host stays in memory.
  void sync(StepDone done) { sync(StepCommit::Sync::plain, std::move(done)); }
  /// The same of all tiers.
  void sync_all_tiers(StepDone done) { sync(StepCommit::Sync::all_tiers, std::move(done)); }
  /// A step that an earlier daemon has accepted.
  void redo(const StepRequest& request, size_t place);

  /// Whether sessions that have ended have closed a step that is not over.
  bool has_orphaned_step() const;
  /// The number of the step that the job is finishing or has still to do; 0: none.
  uint64_t closing_step() const;
  /// The reason for a lease of a parameter's value to wait: its update, or the commit of it.
  std::optional<WaitsFor> before(const LeaseRequest& request, const Entry& entry) const;
  /// Whether a closed step names the staged shard or buffer.
  bool names(uint32_t shard_id) const;

 private:
  friend class Step;

  bool joins_earlier(const StepRequest& request,
                     const std::vector<StepCall>& others,
                     StepDone& done);
  void join(Step& earlier,
            const StepRequest& request,
            const std::vector<StepCall>& others,
            StepDone& done);
  /// The job has committed a step of that number.
  void answer_repeated(const StepRequest& request,
                       const std::vector<StepCall>& others,
                       const StepDone& done);
  void sync(StepCommit::Sync kind, StepDone done);
  void accept(StepRequest request,
              std::vector<StepCall> others,
              Step::Origin origin,
              StepDone done);
  /// ok, or why these ranks, and no others, cannot close a step.
  Status check_ranks(const StepRequest& request, const std::vector<StepCall>& others) const;
  void note_call(const StepCall& caller);
  void let_lease_after(const StepCall& caller);
  void note_call_failed(const StepCall& caller, const Status& why);
  void refuse(const StepRequest& request,
              const std::vector<StepCall>& others,
              const StepDone& done,
              const Status& why);
  void enqueue(const char* kind, const std::shared_ptr<Step>& step);
  /// Called by the step, as the last thing that it does.
  void finished(Step& step, const Status& status);

  const StepParts parts_;
  /// Accepted and not finished, in their order.
  std::vector<std::shared_ptr<Step>> closed_;
};

}  // namespace memd
