#include "store/state/moments.h"

#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {

Result<Moments::Place> Moments::find(const MomentsRequest& request) const {
  if (!parts_.progress.stopped().is_ok()) return parts_.progress.stopped();
  if (parts_.shards.find_entry(request.shard_id, Part::gradient) == nullptr) {
    return error(StatusCode::not_found,
                 "job ",
                 parts_.job_name,
                 " has no parameter with shard id ",
                 request.shard_id);
  }
  const Shard& shard = parts_.shards[request.shard_id];
  const uint64_t first = shard.element_offset + request.element_first;
  const bool inside = request.element_count > 0 && request.element_first < shard.element_count() &&
                      request.element_count <= shard.element_count() - request.element_first;
  if (!inside || first / kTileElements != (first + request.element_count - 1) / kTileElements) {
    return error(StatusCode::invalid_argument,
                 "moments of shard ",
                 parts_.job_name,
                 "/",
                 shard.name(),
                 ": ask for elements of one tile of ",
                 kTileElements,
                 ": first ",
                 request.element_first,
                 ", count ",
                 request.element_count);
  }
  return Place{.bucket = &parts_.shards.bucket(shard.bucket),
               .tile = first / kTileElements,
               .element_in_tile = first % kTileElements};
}

TileTask Moments::task_at(const Place& place) {
  TileTask task;
  task.entry = place.bucket->value;
  task.bucket = place.bucket;
  task.index = place.tile;
  task.reads_rest = true;
  return task;
}

void Moments::submit_when_still(TileTask task) {
  // A spill in flight replaces the same extents.
  const Entry* const entry = task.entry;
  parts_.conditions.add(
      [entry] { return entry->task_count() == 0 && entry->residency() != Residency::draining; },
      [this, later = std::make_shared<TileTask>(std::move(task))] {
        tasks_.submit(std::move(*later));
      });
}

void Moments::read(const MomentsRequest& request, Read done) {
  const auto place = find(request);
  if (!place.is_ok()) return done(place.status(), {}, {});
  auto exp_avg = std::make_shared<std::vector<float>>(request.element_count);
  auto exp_avg_sq = std::make_shared<std::vector<float>>(request.element_count);
  TileTask task = task_at(place.value());
  MEMD_FAILPOINT("moments.before_read");
  task.work = [exp_avg, exp_avg_sq, first = place.value().element_in_tile](const TileBytes& bytes) {
    const auto* const m = reinterpret_cast<const float*>(bytes.rest) + first;
    copy_bytes(exp_avg->data(), m, exp_avg->size() * sizeof(float));
    copy_bytes(exp_avg_sq->data(), m + bytes.elements, exp_avg_sq->size() * sizeof(float));
  };
  task.done = [exp_avg, exp_avg_sq, done = std::move(done)](const Status& status) {
    done(status, std::move(*exp_avg), std::move(*exp_avg_sq));
  };
  submit_when_still(std::move(task));
}

void Moments::write(const MomentsRequest& request,
                    uint64_t generation,
                    std::vector<float> exp_avg,
                    std::vector<float> exp_avg_sq,
                    Done done) {
  const auto place = find(request);
  if (!place.is_ok()) return done(place.status());
  const bool sized =
      exp_avg.size() == request.element_count && exp_avg_sq.size() == request.element_count;
  if (!sized) {
    return done(error(StatusCode::invalid_argument, "moments and element count differ"));
  }
  const uint32_t bucket = place.value().bucket->value->owner();
  early_.discard(bucket, EarlyDiscard::state);
  parts_.admission.begin_updates(*place.value().bucket);
  auto task = std::make_shared<TileTask>(task_at(place.value()));
  task->writes_rest = true;
  MEMD_FAILPOINT("moments.before_write");
  task->work = [exp_avg = std::move(exp_avg),
                exp_avg_sq = std::move(exp_avg_sq),
                first = place.value().element_in_tile](const TileBytes& bytes) {
    auto* const m = reinterpret_cast<float*>(bytes.rest) + first;
    copy_bytes(m, exp_avg.data(), exp_avg.size() * sizeof(float));
    copy_bytes(m + bytes.elements, exp_avg_sq.data(), exp_avg_sq.size() * sizeof(float));
  };
  task->done = [this, shard_id = request.shard_id, generation, done = std::move(done)](
                   const Status& status) {
    MEMD_FAILPOINT("moments.written");
    if (status.is_ok()) {
      parts_.table.withdraw_shard(shard_id);
      parts_.shards[shard_id].generation = generation;
      parts_.table.publish_shard(shard_id);
      if (parts_.ledger != nullptr) parts_.ledger->note_generation(shard_id, generation);
      parts_.durable.note_change();
    }
    done(status);
  };
  // A dirty tile is on disk first, so that a kill leaves the old moments or the new ones.
  writeback_.flush_tiles(
      bucket, std::make_shared<StepReport>(), [this, task](const Status& flushed) {
        if (!flushed.is_ok()) return task->done(flushed);
        submit_when_still(std::move(*task));
      });
}

}  // namespace memd
