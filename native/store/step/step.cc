#include "store/step/step.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/state/maxima.h"
#include "store/step/bucket_update.h"
#include "store/step/step_checks.h"
#include "store/step/steps.h"

namespace memd {
namespace {

/// Why a step that is half made cannot be undone, and how its job goes on. As Job::restore() says
/// it.
std::string way_on(const StepParts& parts) {
  const StateParts& job = parts.job;
  const uint64_t since = parts.durable.catalogue().undurable_since();
  const bool has_host_tier = job.shards.declared().has_host_tier();
  const std::string kept = has_host_tier
                               ? "parameters in tier host"
                               : concat("durability \"", job.admission.durability().text(), "\"");
  if (since == 0) {
    return concat(kept,
                  "; connect again to go on from the last step on disk, which is ",
                  parts.progress.durable_step());
  }
  const std::vector<KeptStep>& snapshots = job.space.snapshots().steps;
  const bool has_snapshot =
      std::any_of(snapshots.begin(), snapshots.end(), [since](const KeptStep& snapshot) {
        return snapshot.step < since;
      });
  if (has_host_tier && has_snapshot) {
    return concat(kept,
                  "; connect again to go on from its last snapshot, at step ",
                  parts.progress.durable_step());
  }
  return concat(kept,
                has_host_tier ? ", which have been in memory alone since step "
                              : ", and it ran on without durability since step ",
                since,
                ": what is on disk is no step; go back to a snapshot (memd snapshot restore), "
                "start over with connect(fresh=True), or drop it with `memd job drop`");
}

/// The bytes of its tiles that may stay in the private side.
uint64_t private_bytes(const Bucket& bucket) { return bucket.is_host() ? 0 : bucket.state_bytes(); }

}  // namespace

const char* step_state_text(StepState state) {
  switch (state) {
    case StepState::queued:
      return "";
    case StepState::settling:
      return "waits until nothing it names is being read or written";
    case StepState::preparing:
      return "prepares the disk";
    case StepState::writing_back:
      return "writes back what is dirty";
    case StepState::updating:
      return "updates tiles";
    case StepState::committing:
      return "commits";
    case StepState::publishing:
      return "is committed in memory, and commits on disk";
    case StepState::undoing:
      return "is being undone";
    case StepState::over:
      return "is over";
  }
  MEMD_CHECK(false);
  return "";
}

Step::Step(const StepParts& parts, Steps& owner, StepCommit::Sync kind, StepDone done)
    : parts_(parts),
      owner_(owner),
      done_(std::move(done)),
      started_ns_(parts.job.clock.now_ns()),
      is_step_(false),
      is_redo_(false),
      shards_(parts, request_, false),
      space_(parts, shards_),
      staged_(parts, {}),
      commit_(parts, request_, shards_, staged_, false, kind) {}

Step::Step(const StepParts& parts,
           Steps& owner,
           StepRequest request,
           std::vector<StepCall> others,
           Origin origin,
           StepDone done)
    : parts_(parts),
      owner_(owner),
      request_(std::move(request)),
      others_(std::move(others)),
      done_(std::move(done)),
      place_(origin.place),
      started_ns_(parts.job.clock.now_ns()),
      is_step_(true),
      is_redo_(origin.is_redo),
      shards_(parts, request_, is_redo_),
      space_(parts, shards_),
      staged_(parts, request_.staged_buffers),
      commit_(parts, request_, shards_, staged_, true, StepCommit::Sync::plain) {
  shards_.seal();
}

void Step::join(uint64_t call, const std::vector<StepCall>& others, StepDone done) {
  also_done_.push_back(std::move(done));
  request_.call = call;
  if (!others.empty()) others_ = others;
}

std::vector<StepCall> Step::calls() const {
  std::vector<StepCall> calls = others_;
  calls.push_back({.session_id = request_.session_id, .call = request_.call});
  return calls;
}

void Step::answer(const Status& status) const {
  done_(status, *report_);
  for (const StepDone& also : also_done_) also(status, *report_);
}

std::optional<WaitsFor> Step::before(const LeaseRequest& request, const Entry& entry) const {
  return shards_.before(request, entry, is_undoing());
}

void Step::leave_ledger() {
  if (!place_) return;
  if (const Session* const session = parts_.session(request_.session_id)) {
    parts_.gate.note_session(*session);
  }
  MEMD_FAILPOINT("ledger.step_done");
  parts_.job.ledger.forget_step(*std::exchange(place_, std::nullopt));
}

// ---- The machine --------------------------------------------------------------------------------

void Step::enter(StepState state) {
  state_ = state;
  parts_.operations.set_phase(step_state_text(state));
}

Done Step::advances() {
  return [self = shared_from_this()](const Status& status) { self->advance(status); };
}

void Step::start() { advance(Status::ok()); }

void Step::advance(const Status& status) {
  if (state_ == StepState::updating) {
    MEMD_FAILPOINT("update.finished");
  }
  if (!status.is_ok() && state_ != StepState::undoing) return fail(status);
  switch (state_) {
    case StepState::queued:
      return settle();
    case StepState::settling:
      return prepare();
    // A daemon before this one has written back what was dirty when it began the step.
    // Later writes belong to the next commit.
    case StepState::preparing:
      return is_begun_ ? update() : write_back();
    case StepState::writing_back:
      return update();
    case StepState::updating:
      return commit();
    case StepState::committing:
      return publish();
    case StepState::publishing:
    case StepState::undoing:
      return finish(status);
    case StepState::over:
      break;
  }
  MEMD_CHECK(false);
}

void Step::fail(const Status& status) {
  // The commit's failure leaves N on disk, and all that was updated can be undone.
  if (state_ == StepState::committing) return undo(status);
  const bool is_half_updated =
      (commit_.is_in_memory() && has_updated_) || parts_.job.tiles.has_made();
  if (!is_half_updated) return undo(status);
  stop_job(status);
  undo(parts_.job.progress.stopped());
}

// ---- Beginning ----------------------------------------------------------------------------------

void Step::settle() {
  enter(StepState::settling);
  const auto is_settled = [self = shared_from_this()] {
    if (self->is_redo_ && !self->parts_.gate.may_redo()) return false;
    return self->shards_.are_settled();
  };
  parts_.job.conditions.add(is_settled,
                            [self = shared_from_this()] { self->advance(Status::ok()); });
}

void Step::prepare() {
  MEMD_FAILPOINT("step.started");
  const StateParts& job = parts_.job;
  // A step that an earlier daemon began to update can only be finished.
  is_begun_ = job.tiles.has_made();
  Status status = check_start(parts_, request_);
  if (status.is_ok() && !is_begun_) status = check_writers(parts_);
  if (status.is_ok()) status = check_staged(job.shards, job.job_name, request_);
  if (!status.is_ok()) return advance(status);
  commit_.begin();
  shards_.hold(staged_);
  if (is_step_) parts_.group.begin_step(request_.session_id);
  MEMD_FAILPOINT("step.entries_held");
  parts_.operations.hold_writers(!is_begun_);
  job.waits.wake(WaitList::writers);
  enter(StepState::preparing);
  prepare_disk();
}

void Step::prepare_disk() {
  const Done prepared = [self = shared_from_this()](const Status& status) {
    self->parts_.operations.hold_writers(false);
    self->parts_.job.waits.wake(WaitList::writers);
    self->advance(status.is_ok() ? self->staged_.swap() : status);
  };
  Writeback& writeback = parts_.state.writeback();
  // A step that can be undone returns to what is on disk.
  if (!commit_.is_in_memory()) return writeback.flush_tiles(std::nullopt, report_, prepared);
  if (!parts_.job.admission.durability().is_none() || parts_.job.progress.undurable_since() != 0) {
    return prepared(Status::ok());
  }
  // Memory builds on what the disk has: dirty tiles of an earlier durability are written first.
  writeback.flush_tiles(
      std::nullopt, report_, [self = shared_from_this(), prepared](const Status& flushed) {
        flushed.is_ok() ? self->commit_.declare_undurable(prepared) : prepared(flushed);
      });
}

void Step::write_back() {
  enter(StepState::writing_back);
  parts_.state.writeback().write_back_all(commit_.is_on_disk(), report_, advances());
}

// ---- Updating -----------------------------------------------------------------------------------

void Step::update() {
  const std::vector<uint32_t> wanting = shards_.buckets_without_maxima();
  const Done placed = [self = shared_from_this()](const Status& status) {
    status.is_ok() ? self->begin_update() : self->fail(status);
  };
  if (wanting.empty()) return parts_.state.host().give_places(shards_.buckets(), report_, placed);
  for (const uint32_t bucket : wanting) parts_.state.early().discard(bucket, EarlyDiscard::state);
  // Tiles that are in memory alone have no place for maxima.
  parts_.state.writeback().flush_tiles(
      wanting, report_, [self = shared_from_this(), wanting, placed](const Status& flushed) {
        if (!flushed.is_ok()) return self->fail(flushed);
        keep_maxima(self->parts_.job, wanting);
        self->parts_.state.host().give_places(self->shards_.buckets(), self->report_, placed);
      });
}

void Step::begin_update() {
  if (is_step_) space_.take_speculative(request_.session_id);
  if (!commit_.is_in_memory()) return update_buckets();
  space_.promise([self = shared_from_this()](const Status& room) {
    room.is_ok() ? self->update_buckets() : self->fail(room);
  });
}

void Step::update_buckets() {
  enter(StepState::updating);
  if (is_step_) {
    if (!commit_.is_in_memory()) space_.begin_update();
    has_updated_ = true;
  }
  for (const uint32_t index : update_order_)
    later_bytes_ += private_bytes(parts_.job.shards.bucket(index));
  update_bucket(0, Join::start(advances()));
}

void Step::update_bucket(size_t at, const std::shared_ptr<Join>& all) {
  if (at == update_order_.size()) return all->finish(Status::ok());
  const uint32_t index = update_order_[at];
  Bucket& bucket = parts_.job.shards.bucket(index);
  MEMD_CHECK_GE(later_bytes_, private_bytes(bucket));
  later_bytes_ -= private_bytes(bucket);
  auto updated =
      Join::start([self = shared_from_this(), &bucket, done = all->branch()](const Status& status) {
        if (status.is_ok() && self->is_step_) self->end_bucket(bucket);
        done(status);
      });
  // An empty one has empty tensors only.
  if (bucket.value->bytes() != 0) {
    const BucketUpdateParts update{
        .settings_of = [this](uint32_t shard_id) { return shards_.settings_of(shard_id); },
        .make_slot = [self = shared_from_this()](Entry& value) { self->shards_.make_slot(value); },
        .report = report_,
        .may_stay = commit_.is_in_memory(),
        .later_bytes = later_bytes_};
    BucketUpdate(parts_, update, bucket, space_.take(index)).submit(*updated);
  }
  updated->finish(Status::ok());
  parts_.job.conditions.go_on(
      [self = shared_from_this(), at, all] { self->update_bucket(at + 1, all); });
}

void Step::end_bucket(const Bucket& bucket) {
  shards_.publish_bucket(bucket);
  // A step that can be undone is made again with it. Of any other the next daemon takes made tiles
  // as they are.
  if (commit_.is_in_memory()) shards_.drop_gradient(bucket);
}

// ---- Committing and publishing ------------------------------------------------------------------

void Step::commit() {
  enter(StepState::committing);
  if (commit_.is_needed(*report_)) return commit_.make(place_, report_, advances());
  shards_.release();
  finish(Status::ok());
}

/// After the commit: its parameters can be read, and its gradients go.
void Step::publish() {
  enter(StepState::publishing);
  shards_.release();
  staged_.drop();
  shards_.note_slots();
  shards_.publish_values();
  MEMD_FAILPOINT("step.before_gradients_dropped");
  parts_.gate.drop_gradients(buckets(), [this](const Shard& shard) {
    return shards_.contains(parts_.job.shards.id_of(shard));
  });
  for (const StepCall& each : calls()) parts_.plans.end_updates(each.session_id, request_.step);
  if (!commit_.is_in_memory()) return finish(Status::ok());
  note_committed();
  // While the disk is written its buffers may be put again: those bytes are not the step's.
  leave_ledger();
  commit_.is_on_disk() ? commit_.mirror(report_, advances()) : finish(Status::ok());
}

// ---- Undoing ------------------------------------------------------------------------------------

// Memory is between two steps: no daemon goes on with it.
void Step::stop_job(const Status& status) {
  const StateParts& job = parts_.job;
  JobProgress& progress = parts_.progress;
  job.ledger.give_up();
  progress.stop(error(status.code(),
                      "job ",
                      job.job_name,
                      ": step ",
                      progress.committed_step() + 1,
                      " failed while its state was updated in place, and cannot be undone with ",
                      way_on(parts_),
                      ": ",
                      status.message()));
  progress.return_to_disk();
  job.table.withdraw_all();
  job.waits.wake_all();
}

void Step::undo(const Status& why) {
  // Published values may be on their way from the disk, from extents that go back now.
  enter(StepState::undoing);
  for (const StepCall& each : calls()) {
    if (Session* const session = parts_.session(each.session_id))
      session->ring.set_resident_call(0);
  }
  shards_.withdraw_uncommitted();
  parts_.job.conditions.add(
      [self = shared_from_this()] { return self->shards_.are_uncommitted_still(); },
      [self = shared_from_this(), why] {
        self->restore();
        self->advance(why);
      });
}

void Step::restore() {
  MEMD_FAILPOINT("step.undoing");
  // N stays: nothing of N + 1 may be seen.
  shards_.release();
  if (has_updated_) drop_new_values();
  if (staged_.is_swapped()) staged_.exchange(false);
  shards_.publish_values();
  shards_.unseal();
  // A session that has ended meanwhile tries no second time, and without bytes none does.
  const auto is_dropped = [this](const Shard& shard) { return shards_.is_gradient_over(shard); };
  const Shards& all = parts_.job.shards;
  if (std::none_of(all.begin(), all.end(), is_dropped)) return;
  // The next daemon would miss gradients of a step that is still closed.
  leave_ledger();
  parts_.gate.drop_gradients(buckets(), is_dropped);
}

void Step::drop_new_values() {
  // In memory there is nothing to go back to: the job is stopped.
  if (!commit_.is_in_memory()) parts_.state.drop_clean_tiles();
  shards_.drop_new_values();
  if (!commit_.is_in_memory()) space_.roll_back();
}

void Step::note_committed() const {
  if (request_.step == 0) return;
  for (const StepCall& each : calls()) {
    if (Session* const session = parts_.session(each.session_id))
      session->step_committed = request_.step;
  }
}

void Step::finish(const Status& status) {
  const StateParts& job = parts_.job;
  space_.end();
  report_->committed_step = job.progress.committed_step();
  report_->durable_step = job.progress.durable_step();
  report_->disk_error = job.progress.disk_error().message();
  state_ = StepState::over;
  owner_.finished(*this, status);
}

}  // namespace memd
