#include "store/step/steps.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "store/step/step_checks.h"

namespace memd {
namespace {

/// That of the request, and those of other ranks.
std::vector<StepCall> calls_of(const StepRequest& request, std::vector<StepCall> others) {
  others.push_back({.session_id = request.session_id, .call = request.call});
  return others;
}

}  // namespace

// ---- Accepting ----------------------------------------------------------------------------------

void Steps::step(StepRequest request, std::vector<StepCall> others, StepDone done) {
  for (const StepCall& each : calls_of(request, others)) note_call(each);
  // An answer to what is asked for again is one to all ranks.
  if (joins_earlier(request, others, done)) return;
  Status status = parts_.group.check_step(request.session_id);
  if (const auto notice = parts_.group.take_notice(request.session_id)) status = *notice;
  // Says more than a notice does.
  if (Status ranks = check_ranks(request, others); !ranks.is_ok()) status = std::move(ranks);
  if (status.is_ok()) status = check_not_loading(parts_);
  if (status.is_ok()) status = check_step(parts_, request);
  if (!status.is_ok()) return refuse(request, others, done, status);
  request.summed = summed_gradients(parts_, request);
  std::optional<size_t> place;
  if (!MEMD_PLANTED("ledger.step_not_recorded")) {
    const auto closed = parts_.job.ledger.close_step(request);
    if (!closed.is_ok()) return refuse(request, others, done, closed.status());
    place = closed.value();
  }
  if (place) {
    MEMD_FAILPOINT("ledger.step_closed");
  }
  accept(
      std::move(request), std::move(others), {.place = place, .is_redo = false}, std::move(done));
}

Status Steps::check_ranks(const StepRequest& request, const std::vector<StepCall>& others) const {
  const Ranks& ranks = parts_.group.ranks();
  if (!ranks.rank_of(request.session_id)) return Status::ok();
  if (Status whole = ranks.check_whole(parts_.job.job_name); !whole.is_ok()) return whole;
  if (others.size() + 1 == ranks.world_size()) return Status::ok();
  return error(StatusCode::invalid_argument,
               "job ",
               parts_.job.job_name,
               ": its ",
               ranks.world_size(),
               " ranks close a step together, and this one is of ",
               others.size() + 1);
}

void Steps::redo(const StepRequest& request, size_t place) {
  // Its trainer is told when it asks again.
  accept(request, {}, {.place = place, .is_redo = true}, [](const Status&, const StepReport&) {});
}

void Steps::accept(StepRequest request,
                   std::vector<StepCall> others,
                   Step::Origin origin,
                   StepDone done) {
  const auto step = std::make_shared<Step>(
      parts_, *this, std::move(request), std::move(others), origin, std::move(done));
  const StepRequest& its = step->request();
  std::vector<uint32_t> order = parts_.plans.in_order_of_use(its.session_id, step->buckets());
  for (const StepCall& each : step->calls()) {
    note_call(each);
    let_lease_after(each);
    parts_.plans.close_step(each.session_id, its.step, order);
  }
  parts_.group.ranks().begin_gradients();
  step->set_update_order(std::move(order));
  closed_.push_back(step);
  MEMD_FAILPOINT("step.closed");
  enqueue("step", step);
}

void Steps::sync(StepCommit::Sync kind, StepDone done) {
  // Nothing of it can be made durable, and nobody is left who could be told.
  if (!parts_.progress.stopped().is_ok() && parts_.sessions.empty()) return done(Status::ok(), {});
  enqueue("sync", std::make_shared<Step>(parts_, *this, kind, std::move(done)));
}

void Steps::enqueue(const char* kind, const std::shared_ptr<Step>& step) {
  parts_.operations.enqueue(kind, parts_.job.clock.now_ns(), [step](const Status& turn) {
    turn.is_ok() ? step->start() : step->answer(turn);
  });
}

// ---- Steps that are asked for again -------------------------------------------------------------

bool Steps::joins_earlier(const StepRequest& request,
                          const std::vector<StepCall>& others,
                          StepDone& done) {
  if (request.step == 0 || MEMD_PLANTED("step.made_again_when_repeated")) return false;
  const auto same = std::find_if(closed_.begin(), closed_.end(), [&](const auto& step) {
    return step->request().session_id == request.session_id && step->request().step == request.step;
  });
  if (same != closed_.end()) {
    join(**same, request, others, done);
    return true;
  }
  if (request.step > parts_.progress.committed_step()) return false;
  answer_repeated(request, others, done);
  return true;
}

void Steps::join(Step& earlier,
                 const StepRequest& request,
                 const std::vector<StepCall>& others,
                 StepDone& done) {
  if (!is_same_step(earlier.request(), request)) {
    return refuse(request,
                  others,
                  done,
                  error(StatusCode::invalid_argument,
                        "this session closes step ",
                        request.step,
                        " of job ",
                        parts_.job.job_name,
                        " twice, each time over other shards; wait for the answer to one step "
                        "before the next is asked for"));
  }
  earlier.join(request.call, others, std::move(done));
  if (earlier.is_undoing()) return;
  for (const StepCall& each : calls_of(request, others)) let_lease_after(each);
}

void Steps::answer_repeated(const StepRequest& request,
                            const std::vector<StepCall>& others,
                            const StepDone& done) {
  const JobProgress& progress = parts_.progress;
  const Session* const session = parts_.session(request.session_id);
  if (session == nullptr || request.step > session->step_committed) {
    // That its own gradients made this step is not known: silence could lose one.
    return refuse(request,
                  others,
                  done,
                  error(StatusCode::fenced,
                        "job ",
                        parts_.job.job_name,
                        " stands at step ",
                        progress.committed_step(),
                        ", which another session made; go on from there: this one closes step ",
                        request.step));
  }
  const Status repeated = check_repeated(parts_, request);
  StepReport report;
  report.committed_step = progress.committed_step();
  report.durable_step = progress.durable_step();
  report.disk_error = progress.disk_error().message();
  for (const StepCall& each : calls_of(request, others)) {
    repeated.is_ok() ? let_lease_after(each) : note_call_failed(each, repeated);
  }
  done(repeated, report);
}

// ---- Calls of sessions --------------------------------------------------------------------------

void Steps::note_call(const StepCall& caller) {
  Session* const session = parts_.session(caller.session_id);
  if (session == nullptr) return;
  session->call_seen = std::max(session->call_seen, caller.call);
  parts_.job.waits.wake(WaitList::calls);
  // Asked again it may well be made.
  if (caller.call == session->call_failed) session->call_failed = 0;
}

// A parameter that the step updates is in the table for nobody, or as the step has made it.
void Steps::let_lease_after(const StepCall& caller) {
  Session* const session = parts_.session(caller.session_id);
  if (session != nullptr) session->ring.set_resident_call(caller.call);
}

// A lease that follows it in the ring would compute with what it was to replace.
void Steps::note_call_failed(const StepCall& caller, const Status& why) {
  Session* const session = parts_.session(caller.session_id);
  if (session == nullptr || caller.call == 0) return;
  session->call_failed = caller.call;
  parts_.job.waits.wake(WaitList::calls);
  session->call_failure = error(why.code(),
                                "the step before it was not made; the job stands at step ",
                                parts_.progress.committed_step(),
                                ": ",
                                why.message());
}

void Steps::refuse(const StepRequest& request,
                   const std::vector<StepCall>& others,
                   const StepDone& done,
                   const Status& why) {
  for (const StepCall& each : calls_of(request, others)) note_call_failed(each, why);
  done(why, {});
}

// ---- What others ask ----------------------------------------------------------------------------

bool Steps::has_orphaned_step() const {
  return std::any_of(closed_.begin(), closed_.end(), [this](const auto& step) {
    const std::vector<StepCall> calls = step->calls();
    return std::none_of(calls.begin(), calls.end(), [this](const StepCall& each) {
      return parts_.session(each.session_id) != nullptr;
    });
  });
}

uint64_t Steps::closing_step() const {
  if (closed_.empty()) return 0;
  return parts_.progress.committed_step() + (closed_.front()->is_counted() ? 0 : 1);
}

std::optional<WaitsFor> Steps::before(const LeaseRequest& request, const Entry& entry) const {
  for (const auto& step : closed_) {
    if (auto what = step->before(request, entry)) return what;
  }
  return std::nullopt;
}

bool Steps::names(uint32_t shard_id) const {
  return std::any_of(closed_.begin(), closed_.end(), [shard_id](const auto& step) {
    return step->staged().names(shard_id);
  });
}

// ---- Ending -------------------------------------------------------------------------------------

void Steps::finished(Step& step, const Status& status) {
  if (step.is_step()) {
    if (status.is_ok()) {
      count_step(parts_.times.phases, step.report());
      parts_.plans.count_moved(step.report().read_bytes + step.report().written_bytes);
      parts_.times.seconds.add(static_cast<double>(parts_.job.clock.now_ns() - step.started_ns()) *
                               1e-9);
    }
    std::erase_if(closed_, [&step](const auto& each) { return each.get() == &step; });
    if (status.is_ok()) {
      step.note_committed();
    } else {
      for (const StepCall& each : step.calls()) note_call_failed(each, status);
    }
    step.leave_ledger();
  }
  MEMD_FAILPOINT("step.before_acknowledgement");
  step.answer(status);
  MEMD_FAILPOINT("step.acknowledged");
  parts_.job.waits.wake(WaitList::room);
  parts_.operations.end();
}

}  // namespace memd
