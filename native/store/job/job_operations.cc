#include "store/job/job_operations.h"

#include <memory>
#include <set>
#include <utility>

#include "store/job/job_gates.h"

namespace memd {
namespace {

/// The parameter's; none where the write of moments is refused.
std::set<uint32_t> buckets_of(const Job& job, const MomentsRequest& request) {
  const Shards& shards = job.shards();
  const bool is_known = job.progress().stopped().is_ok() &&
                        shards.find_entry(request.shard_id, Part::gradient) != nullptr;
  return is_known ? std::set{shards[request.shard_id].bucket} : std::set<uint32_t>{};
}

}  // namespace

/// Answers the questions of a job's steps.
class JobOperations::StepCalls final : public StepGate {
 public:
  StepCalls(JobOperations& operations, Job& job) : operations_(operations), job_(job) {}

  bool may_redo() const override { return operations_.may_redo_; }
  void note_session(const Session& session) override {
    operations_.parts_.sessions.note(job_.kept().ledger(), session);
  }
  void drop_gradients(const std::set<uint32_t>& buckets,
                      const std::function<bool(const Shard&)>& chosen) override {
    operations_.gradients_.drop(job_, buckets, chosen);
  }
  void drop_gradient_bytes(Entry& gradient) override {
    job_.drop_gradient(gradient, operations_.parts_.extents);
  }

 private:
  JobOperations& operations_;
  Job& job_;
};

void JobOperations::connect(Job& job) {
  auto lease_gates = std::make_unique<JobGates>(
      job,
      JobGates::Calls{.ask_for_flush = [this, &job](auto bucket) { ask_for_flush(job, bucket); }});
  job.connect({.extents = parts_.extents,
               .workers = parts_.workers,
               .clock = parts_.clock,
               .commits = parts_.commits,
               .times = times_,
               .lease_gates = std::move(lease_gates),
               .step_gate = std::make_unique<StepCalls>(*this, job)});
}

// ---- Steps --------------------------------------------------------------------------------------

bool JobOperations::has_orphaned_step(uint64_t job_id) const {
  const Job* const job = parts_.jobs.find(job_id);
  return job != nullptr && job->steps().has_orphaned_step();
}

uint64_t JobOperations::closing_step(uint64_t job_id) const {
  const Job* const job = parts_.jobs.find(job_id);
  return job == nullptr ? 0 : job->steps().closing_step();
}

void JobOperations::step(StepRequest request, std::vector<StepCall> others, StepDone done) {
  const auto job = parts_.job_of(request.session_id);
  if (!job.is_ok()) return done(job.status(), {});
  job.value()->steps().step(std::move(request), std::move(others), std::move(done));
}

void JobOperations::sync(uint64_t session_id, StepDone done) {
  const auto job = parts_.job_of(session_id);
  if (!job.is_ok()) return done(job.status(), {});
  job.value()->steps().sync(std::move(done));
}

void JobOperations::sync_job(uint64_t job_id, StepDone done) {
  Job* const job = parts_.jobs.find(job_id);
  if (job == nullptr)
    return done(error(StatusCode::not_found, "there is no job with id ", job_id), {});
  job->steps().sync(std::move(done));
}

// ---- Other operations ---------------------------------------------------------------------------

void JobOperations::enqueue(Job& job,
                            const char* kind,
                            Operations::Start start,
                            size_t at_once_max) {
  job.operations().enqueue(kind, parts_.clock.now_ns(), std::move(start), at_once_max);
}

void JobOperations::end(uint64_t job_id) {
  Job* const job = parts_.jobs.find(job_id);
  if (job == nullptr) return;
  job->cache().waits().wake(WaitList::room);
  job->operations().end();
}

void JobOperations::ask_for_flush(Job& job, std::optional<uint32_t> bucket) {
  const uint64_t key = bucket ? *bucket : ~uint64_t{0};
  if (!job.tiles().ask_flush(key)) return;
  enqueue(job, "flush", [this, &job, bucket, key](const Status& turn) {
    if (!turn.is_ok()) return;
    const auto buckets = bucket ? std::optional(std::vector{*bucket}) : std::nullopt;
    job.state().writeback().flush_tiles(
        buckets, std::make_shared<StepReport>(), [this, &job, bucket, key](const Status& status) {
          job.tiles().end_flush(key);
          if (bucket) job.cache().waits().wake(*job.shards().bucket(*bucket).value);
          if (!status.is_ok()) {
            bucket ? job.cache().waiters().fail(*job.shards().bucket(*bucket).value, status)
                   : job.cache().waiters().fail_for_room(status);
          }
          end(job.job_id());
        });
  });
}

void JobOperations::read_moments(const MomentsRequest& request, Moments::Read done) {
  const auto owner = parts_.job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status(), {});
  Job* const job = owner.value();
  enqueue(*job, "moments", [this, job, request, done = std::move(done)](const Status& turn) {
    if (!turn.is_ok()) return done(turn, {});
    job->state().moments().read(
        request, [this, job_id = job->job_id(), done](const Status& status, MomentValues values) {
          done(status, std::move(values));
          end(job_id);
        });
  });
}

void JobOperations::write_moments(const MomentsRequest& request,
                                  uint64_t generation,
                                  NewMoments values,
                                  Done done) {
  const auto owner = parts_.job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status());
  Job* const job = owner.value();
  const auto shared = std::make_shared<NewMoments>(std::move(values));
  // Places of tier host move for one at a time.
  const bool has_host = job->shards().declared().has_host_tier();
  enqueue(
      *job,
      "moments",
      [this, job, request, generation, shared, done = std::move(done)](const Status& turn) {
        if (!turn.is_ok()) return done(turn);
        const Done written = [this, job, done](const Status& status) {
          done(status);
          end(job->job_id());
        };
        // All tiles of tier host are in memory before one of them has no extents any more.
        job->state().host().give_places(
            buckets_of(*job, request),
            std::make_shared<StepReport>(),
            [job, request, generation, shared, written](const Status& placed) {
              if (!placed.is_ok()) return written(placed);
              job->state().moments().write(request, generation, std::move(*shared), written);
            });
      },
      has_host ? 1 : Moments::kWritesAtOnce);
}

}  // namespace memd
