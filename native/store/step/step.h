// One step or sync of a job, from its request to its answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/join.h"
#include "store/cache/lease_request.h"
#include "store/cache/lease_waiters.h"
#include "store/journal/step_request.h"
#include "store/state/step_report.h"
#include "store/step/staged_buffers.h"
#include "store/step/step_commit.h"
#include "store/step/step_parts.h"
#include "store/step/step_shards.h"
#include "store/step/step_space.h"

namespace memd {

class Steps;

using StepDone = std::function<void(const Status&, const StepReport&)>;

/// The states of a step. Each waits for something, and advance() says what follows.
enum class StepState : uint8_t {
  queued,        // its turn among the job's operations
  settling,      // nothing that it names is being read, filled or written back
  preparing,     // the disk says what the step may return to
  writing_back,  // what users wrote is on disk
  updating,      // every tile of every bucket
  committing,    // the commit, in memory or on disk
  publishing,    // where a commit in memory is due on disk as well: that commit
  undoing,       // nobody reads uncommitted values any more
  over,
};
/// As in_flight() says it.
const char* step_state_text(StepState state);

/// One state machine. A sync is a step without shards. Owned by its Steps, and by what it waits
/// for; the server thread calls everything; nothing blocks.
///
///   queued → settling → preparing → writing_back → updating → committing → publishing → over
///                  └────────────┴──────────┴────────────┴───────────┴→ undoing → over
///
/// Until the commit step N stays what it is, and undoing returns to it; only a step that is
/// committed in memory cannot be undone once it updates: then the job stops.
class Step : public std::enable_shared_from_this<Step> {
 public:
  struct Origin {
    std::optional<size_t> place;  // in the job's ledger
    bool is_redo = false;         // an earlier daemon has accepted it
  };

  /// A sync.
  Step(const StepParts& parts, Steps& owner, StepCommit::Sync kind, StepDone done);
  /// A step: seals its gradients, and withdraws the values that it will replace.
  /// `others`: ranks that close it with the request's session.
  Step(const StepParts& parts,
       Steps& owner,
       StepRequest request,
       std::vector<StepCall> others,
       Origin origin,
       StepDone done);

  /// Its turn has come.
  void start();
  /// To everybody who asked.
  void answer(const Status& status) const;
  const StepReport& report() const { return *report_; }
  uint64_t started_ns() const { return started_ns_; }
  StepState state() const { return state_; }

  const StepRequest& request() const { return request_; }
  /// The sessions that close it: that of the request, and other ranks.
  std::vector<StepCall> calls() const;
  bool is_step() const { return is_step_; }
  const std::set<uint32_t>& buckets() const { return shards_.buckets(); }
  void set_update_order(std::vector<uint32_t> order) { update_order_ = std::move(order); }
  /// Asked for again, with new calls of the same sessions. `others`: none but those of ranks.
  void join(uint64_t call, const std::vector<StepCall>& others, StepDone done);
  bool is_undoing() const { return state_ == StepState::undoing; }
  /// In the job's committed step, while the commit is under way.
  bool is_counted() const { return commit_.is_counted(); }
  StagedBuffers& staged() { return staged_; }
  const StagedBuffers& staged() const { return staged_; }
  /// The reason for a lease of a parameter's value to wait: its update, or the commit of it.
  std::optional<WaitsFor> before(const LeaseRequest& request, const Entry& entry) const;
  /// The ledger knows it no longer: it is made and all that it replaced is dropped, or it failed.
  void leave_ledger();
  /// From here on they are told that it is made, if they ask again.
  void note_committed() const;

 private:
  void enter(StepState state);
  /// The state's condition holds, or cannot.
  void advance(const Status& status);
  /// advance(), from what is waited for.
  Done advances();
  void fail(const Status& status);
  void stop_job(const Status& status);

  void settle();
  void prepare();
  void prepare_disk();
  void write_back();
  void update();
  void begin_update();
  void update_buckets();
  /// Number `at` of the order; the next one in this turn or, where that has no more time, the next.
  void update_bucket(size_t at, const std::shared_ptr<Join>& all);
  /// All of its tiles are made.
  void end_bucket(const Bucket& bucket);

  void commit();
  void publish();
  void undo(const Status& why);
  void restore();
  void drop_new_values();
  void finish(const Status& status);
  const StepParts& parts_;
  Steps& owner_;
  StepRequest request_;
  std::vector<StepCall> others_;
  StepDone done_;
  std::vector<StepDone> also_done_;  // the same step, asked for again
  std::optional<size_t> place_;      // in the job's ledger
  const uint64_t started_ns_;
  const bool is_step_;
  const bool is_redo_;
  StepState state_ = StepState::queued;
  std::shared_ptr<StepReport> report_ = std::make_shared<StepReport>();
  std::vector<uint32_t> update_order_;  // of its buckets
  uint64_t later_bytes_ = 0;            // of tiles of those whose update did not begin
  StepShards shards_;
  StepSpace space_;
  StagedBuffers staged_;
  StepCommit commit_;
  bool is_begun_ = false;     // an earlier daemon has updated tiles to it
  bool has_updated_ = false;  // some tile may have been
};

}  // namespace memd
