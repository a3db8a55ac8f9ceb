#include "store/state/moments.h"

#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/format/tile_rest.h"
#include "store/state/maxima.h"

namespace memd {
namespace {

/// Their places in a tile, from element `first` on.
struct MomentArrays {
  MomentArrays(const TileBytes& bytes, DType dtype, uint64_t first)
      : exp_avg(reinterpret_cast<float*>(bytes.rest) + first),
        exp_avg_sq(exp_avg + bytes.elements) {
    if (!bytes.keeps_maxima) return;
    std::byte* const maxima = bytes.rest + maxima_offset_bytes(dtype, bytes.elements);
    maximum = reinterpret_cast<float*>(maxima) + first;
  }

  float* exp_avg;
  float* exp_avg_sq;
  float* maximum = nullptr;  // stays so where the bucket has no place for it
};

size_t bytes_of(const std::vector<float>& values) { return values.size() * sizeof(float); }

}  // namespace

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

void Moments::submit_when_still(TileTask task, bool keeps_maxima) {
  // A spill in flight replaces the same extents.
  const Entry* const entry = task.entry;
  parts_.conditions.add(
      [entry] { return entry->task_count() == 0 && entry->residency() != Residency::draining; },
      [this, keeps_maxima, later = std::make_shared<TileTask>(std::move(task))] {
        if (keeps_maxima) keep_maxima(parts_, {later->entry->owner()});
        tasks_.submit(std::move(*later));
      });
}

void Moments::read(const MomentsRequest& request, Read done) {
  const auto place = find(request);
  if (!place.is_ok()) return done(place.status(), {});
  const uint64_t count = request.element_count;
  const bool keeps_maximum = parts_.shards[request.shard_id].keeps_maximum;
  auto values = std::make_shared<MomentValues>();
  values->exp_avg.resize(count);
  values->exp_avg_sq.resize(count);
  if (keeps_maximum) values->max_exp_avg_sq.resize(count);
  const Bucket& bucket = *place.value().bucket;
  // They are zero, and a read makes no place for them.
  if (bucket.is_host() && !parts_.host_tiles.has_rest(bucket, place.value().tile))
    return done(Status::ok(), std::move(*values));
  TileTask task = task_at(place.value());
  MEMD_FAILPOINT("moments.before_read");
  task.work = [values, dtype = place.value().bucket->dtype, first = place.value().element_in_tile](
                  const TileBytes& bytes) {
    const MomentArrays arrays(bytes, dtype, first);
    copy_bytes(values->exp_avg.data(), arrays.exp_avg, bytes_of(values->exp_avg));
    copy_bytes(values->exp_avg_sq.data(), arrays.exp_avg_sq, bytes_of(values->exp_avg_sq));
    // Zeros, where no update has made a place for them.
    if (arrays.maximum != nullptr)
      copy_bytes(values->max_exp_avg_sq.data(), arrays.maximum, bytes_of(values->max_exp_avg_sq));
  };
  task.done = [values, done = std::move(done)](const Status& status) {
    done(status, std::move(*values));
  };
  submit_when_still(std::move(task), false);
}

void Moments::note_written(uint32_t shard_id, uint64_t generation, bool keeps_maximum) {
  Shard& shard = parts_.shards[shard_id];
  parts_.table.withdraw_shard(shard_id);
  shard.generation = generation;
  parts_.table.publish_shard(shard_id);
  parts_.ledger.note_generation(shard_id, generation);
  parts_.durable.note_change();
  if (shard.keeps_maximum == keeps_maximum) return;
  shard.keeps_maximum = keeps_maximum;
  MEMD_FAILPOINT("moments.maximum_changed");
  parts_.journal.note_maxima({shard_id});
}

void Moments::write(const MomentsRequest& request,
                    uint64_t generation,
                    MomentValues values,
                    Done done) {
  const auto place = find(request);
  if (!place.is_ok()) return done(place.status());
  const bool keeps_maximum = !values.max_exp_avg_sq.empty();
  const bool sized = values.exp_avg.size() == request.element_count &&
                     values.exp_avg_sq.size() == request.element_count &&
                     (!keeps_maximum || values.max_exp_avg_sq.size() == request.element_count);
  if (!sized) {
    return done(error(StatusCode::invalid_argument, "moments and element count differ"));
  }
  Bucket& bucket = *place.value().bucket;
  const uint32_t index = bucket.value->owner();
  // No step could replace tiles that the quota does not hold twice, and a bucket never gives the
  // place of maxima up.
  const bool begins_in_host = bucket.is_host() && !bucket.is_updated;
  if ((keeps_maximum && !bucket.needs_maxima) || begins_in_host) {
    if (Status room = parts_.admission.make_room_for_state(bucket, keeps_maximum); !room.is_ok())
      return done(room);
  }
  early_.discard(index, EarlyDiscard::state);
  parts_.admission.begin_updates(bucket, keeps_maximum);
  auto task = std::make_shared<TileTask>(task_at(place.value()));
  task->writes_rest = true;
  MEMD_FAILPOINT("moments.before_write");
  task->work = [values = std::move(values),
                dtype = bucket.dtype,
                first = place.value().element_in_tile](const TileBytes& bytes) {
    const MomentArrays arrays(bytes, dtype, first);
    copy_bytes(arrays.exp_avg, values.exp_avg.data(), bytes_of(values.exp_avg));
    copy_bytes(arrays.exp_avg_sq, values.exp_avg_sq.data(), bytes_of(values.exp_avg_sq));
    if (arrays.maximum == nullptr) return;
    if (values.max_exp_avg_sq.empty()) {
      // Should the parameter keep one later, it begins with zeros.
      zero_bytes(arrays.maximum, bytes_of(values.exp_avg_sq));
    } else {
      copy_bytes(arrays.maximum, values.max_exp_avg_sq.data(), bytes_of(values.max_exp_avg_sq));
    }
  };
  task->done =
      [this, shard_id = request.shard_id, generation, keeps_maximum, done = std::move(done)](
          const Status& status) {
        MEMD_FAILPOINT("moments.written");
        if (status.is_ok()) note_written(shard_id, generation, keeps_maximum);
        done(status);
      };
  // A dirty tile is on disk first, so that a kill leaves the old moments or the new ones.
  writeback_.flush_tiles(std::vector{index},
                         std::make_shared<StepReport>(),
                         [this, task, keeps_maximum](const Status& flushed) {
                           if (!flushed.is_ok()) return task->done(flushed);
                           submit_when_still(std::move(*task), keeps_maximum);
                         });
}

}  // namespace memd
