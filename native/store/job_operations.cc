// ShardStore's operations on a job, one at a time: steps, syncs, flushes, access to moments.
#include <memory>
#include <utility>
#include <vector>

#include "store/shard_store.h"

namespace memd {

/// Answers the questions of a job's steps.
class ShardStore::StepCalls final : public StepGate {
 public:
  StepCalls(ShardStore& store, Job& job) : store_(store), job_(job) {}

  bool may_redo() const override { return store_.may_redo_; }
  void note_session(const Session& session) override {
    store_.sessions_.note(job_.journal().ledger().get(), session);
  }
  void drop_gradients(const std::function<bool(const Shard&)>& chosen) override {
    store_.drop_gradients_of(job_, chosen);
  }

 private:
  ShardStore& store_;
  Job& job_;
};

std::unique_ptr<StepGate> ShardStore::step_gate(Job& job) {
  return std::make_unique<StepCalls>(*this, job);
}

// ---- Steps --------------------------------------------------------------------------------------

uint64_t ShardStore::closing_step(uint64_t job_id) const {
  const Job* const job = find(job_id);
  return job == nullptr ? 0 : job->steps().closing_step();
}

void ShardStore::step(StepRequest request, StepDone done) {
  const auto job = job_of(request.session_id);
  if (!job.is_ok()) return done(job.status(), {});
  job.value()->steps().step(std::move(request), std::move(done));
}

void ShardStore::sync(uint64_t session_id, StepDone done) {
  const auto job = job_of(session_id);
  if (!job.is_ok()) return done(job.status(), {});
  job.value()->steps().sync(std::move(done));
}

void ShardStore::sync_job(uint64_t job_id, StepDone done) {
  Job* const job = find(job_id);
  if (job == nullptr)
    return done(error(StatusCode::not_found, "there is no job with id ", job_id), {});
  job->steps().sync(std::move(done));
}

// ---- Other operations ---------------------------------------------------------------------------

void ShardStore::enqueue(Job& job, const char* kind, Operations::Start start) {
  job.operations().enqueue(kind, clock_.now_ns(), std::move(start));
}

void ShardStore::end_operation(uint64_t job_id) {
  Job* const job = find(job_id);
  if (job == nullptr) return;
  job->cache().waits().wake(WaitList::room);
  job->operations().end();
}

void ShardStore::ask_for_flush(Job& job, std::optional<uint32_t> bucket) {
  const uint64_t key = bucket ? *bucket : ~uint64_t{0};
  if (!job.tiles().ask_flush(key)) return;
  enqueue(job, "flush", [this, &job, bucket, key](const Status& turn) {
    if (!turn.is_ok()) return;
    job.state().writeback().flush_tiles(
        bucket, std::make_shared<StepReport>(), [this, &job, bucket, key](const Status& status) {
          job.tiles().end_flush(key);
          if (bucket) job.cache().waits().wake(*job.shards().bucket(*bucket).value);
          if (!status.is_ok()) {
            bucket ? job.cache().waiters().fail(*job.shards().bucket(*bucket).value, status)
                   : job.cache().waiters().fail_for_room(status);
          }
          end_operation(job.job_id());
        });
  });
}

void ShardStore::read_moments(const MomentsRequest& request, Moments::Read done) {
  const auto owner = job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status(), {}, {});
  Job* const job = owner.value();
  enqueue(*job, "moments", [this, job, request, done = std::move(done)](const Status& turn) {
    if (!turn.is_ok()) return done(turn, {}, {});
    job->state().moments().read(
        request,
        [this, job_id = job->job_id(), done](
            const Status& status, std::vector<float> exp_avg, std::vector<float> exp_avg_sq) {
          done(status, std::move(exp_avg), std::move(exp_avg_sq));
          end_operation(job_id);
        });
  });
}

void ShardStore::write_moments(const MomentsRequest& request,
                               uint64_t generation,
                               std::vector<float> exp_avg,
                               std::vector<float> exp_avg_sq,
                               Done done) {
  const auto owner = job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status());
  Job* const job = owner.value();
  auto moments = std::make_shared<std::pair<std::vector<float>, std::vector<float>>>(
      std::move(exp_avg), std::move(exp_avg_sq));
  enqueue(*job,
          "moments",
          [this, job, request, generation, moments, done = std::move(done)](const Status& turn) {
            if (!turn.is_ok()) return done(turn);
            job->state().moments().write(request,
                                         generation,
                                         std::move(moments->first),
                                         std::move(moments->second),
                                         [this, job, done](const Status& status) {
                                           done(status);
                                           end_operation(job->job_id());
                                         });
          });
}

}  // namespace memd
