// ShardStore's moments: Adam's state of one parameter, read and replaced a tile at a time.
#include <algorithm>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/shard_store.h"

namespace memd {

namespace {

struct MomentsPlace {
  Bucket* bucket = nullptr;
  size_t tile = 0;
  uint64_t element_in_tile = 0;
};

Result<MomentsPlace> find_moments(Job& job, const MomentsRequest& request) {
  if (!job.progress.stopped().is_ok()) return job.progress.stopped();
  if (job.shards().find_entry(request.shard_id, Part::gradient) == nullptr) {
    return error(StatusCode::not_found,
                 "job ",
                 job.name,
                 " has no parameter with shard id ",
                 request.shard_id);
  }
  const Shard& shard = job.shards()[request.shard_id];
  const uint64_t first = shard.element_offset + request.element_first;
  const bool inside = request.element_count > 0 && request.element_first < shard.element_count() &&
                      request.element_count <= shard.element_count() - request.element_first;
  if (!inside || first / kTileElements != (first + request.element_count - 1) / kTileElements) {
    return error(StatusCode::invalid_argument,
                 "moments of shard ",
                 job.name,
                 "/",
                 shard.name(),
                 ": ask for elements of one tile of ",
                 kTileElements,
                 ": first ",
                 request.element_first,
                 ", count ",
                 request.element_count);
  }
  return MomentsPlace{.bucket = &job.shards().bucket(shard.bucket),
                      .tile = first / kTileElements,
                      .element_in_tile = first % kTileElements};
}

}  // namespace

void ShardStore::submit_when_still(const std::shared_ptr<TileTask>& task) {
  // A spill in flight replaces the same extents.
  const Entry* const entry = task->entry;
  task->job->conditions.add(
      [entry] { return entry->task_count == 0 && entry->residency() != Residency::draining; },
      [this, task] { tiles_.submit(std::move(*task)); });
}

void ShardStore::read_moments(
    const MomentsRequest& request,
    std::function<void(const Status&, std::vector<float>, std::vector<float>)> done) {
  const auto owner = job_of(request.session_id);
  if (!owner.is_ok()) return done(owner.status(), {}, {});
  Job* const job = owner.value();
  enqueue(*job, "moments", [this, job, request, done = std::move(done)](const Status& turn) {
    if (!turn.is_ok()) return done(turn, {}, {});
    const auto place = find_moments(*job, request);
    if (!place.is_ok()) {
      done(place.status(), {}, {});
      return end_operation(job->job_id);
    }
    auto exp_avg = std::make_shared<std::vector<float>>(request.element_count);
    auto exp_avg_sq = std::make_shared<std::vector<float>>(request.element_count);
    auto task_at = std::make_shared<TileTask>();
    TileTask& task = *task_at;
    task.job = job;
    task.entry = place.value().bucket->value;
    task.bucket = place.value().bucket;
    task.index = place.value().tile;
    task.reads_rest = true;
    MEMD_FAILPOINT("moments.before_read");
    task.work =
        [exp_avg, exp_avg_sq, first = place.value().element_in_tile](const TileBytes& bytes) {
          const auto* const m = reinterpret_cast<const float*>(bytes.rest) + first;
          copy_bytes(exp_avg->data(), m, exp_avg->size() * sizeof(float));
          copy_bytes(exp_avg_sq->data(), m + bytes.elements, exp_avg_sq->size() * sizeof(float));
        };
    task.done = [this, job, exp_avg, exp_avg_sq, done](const Status& status) {
      done(status, std::move(*exp_avg), std::move(*exp_avg_sq));
      end_operation(job->job_id);
    };
    submit_when_still(task_at);
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
            const auto place = find_moments(*job, request);
            const bool sized = moments->first.size() == request.element_count &&
                               moments->second.size() == request.element_count;
            if (!place.is_ok() || !sized) {
              done(place.is_ok()
                       ? error(StatusCode::invalid_argument, "moments and element count differ")
                       : place.status());
              return end_operation(job->job_id);
            }
            early_.discard(*job, place.value().bucket->value->owner, EarlyDiscard::state);
            job->begin_updates(*place.value().bucket);
            auto task_at = std::make_shared<TileTask>();
            TileTask& task = *task_at;
            task.job = job;
            task.entry = place.value().bucket->value;
            task.bucket = place.value().bucket;
            task.index = place.value().tile;
            task.reads_rest = true;
            task.writes_rest = true;
            MEMD_FAILPOINT("moments.before_write");
            task.work = [moments, first = place.value().element_in_tile](const TileBytes& bytes) {
              auto* const m = reinterpret_cast<float*>(bytes.rest) + first;
              copy_bytes(m, moments->first.data(), moments->first.size() * sizeof(float));
              copy_bytes(m + bytes.elements,
                         moments->second.data(),
                         moments->second.size() * sizeof(float));
            };
            task.done = [this, job, request, generation, done](const Status& status) {
              MEMD_FAILPOINT("moments.written");
              if (status.is_ok()) {
                job->table().withdraw_shard(request.shard_id);
                job->shards()[request.shard_id].generation = generation;
                job->table().publish_shard(request.shard_id);
                if (job->ledger != nullptr)
                  job->ledger->note_generation(request.shard_id, generation);
                job->changed = true;
              }
              done(status);
              end_operation(job->job_id);
            };
            // A dirty tile is on disk first, so that a kill leaves the old moments or the new ones.
            flush_tiles(*job,
                        place.value().bucket,
                        std::make_shared<StepReport>(),
                        [this, task_at](const Status& flushed) {
                          if (!flushed.is_ok()) return task_at->done(flushed);
                          submit_when_still(task_at);
                        });
          });
}

}  // namespace memd
