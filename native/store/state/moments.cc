#include "store/state/moments.h"

#include <bit>
#include <optional>
#include <span>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "optim/bf16_master.h"
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

size_t bytes_of(std::span<const float> values) { return values.size_bytes(); }

/// Replaces the elements of a tile from `first` on.
void write_moments(const NewMoments& values, const TileBytes& bytes, DType dtype, uint64_t first) {
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
}

/// Replaces the remainders of a tile from element `first` on; or nothing, and returns the number of
/// the first master of which another value is published.
std::optional<uint64_t> write_masters(std::span<const float> masters,
                                      const TileBytes& bytes,
                                      uint64_t first) {
  const auto* const halves = reinterpret_cast<const uint16_t*>(bytes.value) + first;
  auto* const remainders = reinterpret_cast<int16_t*>(bytes.rest + bytes.elements * 8) + first;
  for (size_t i = 0; i < masters.size(); ++i) {
    if (!bf16_remainder(std::bit_cast<uint32_t>(masters[i]), halves[i])) return i;
  }
  for (size_t i = 0; i < masters.size(); ++i)
    remainders[i] = *bf16_remainder(std::bit_cast<uint32_t>(masters[i]), halves[i]);
  return std::nullopt;
}

/// Reads the elements of a tile from `first` on.
void read_moments(const TileBytes& bytes, DType dtype, uint64_t first, MomentValues& values) {
  const MomentArrays arrays(bytes, dtype, first);
  copy_bytes(values.exp_avg.data(), arrays.exp_avg, bytes_of(values.exp_avg));
  copy_bytes(values.exp_avg_sq.data(), arrays.exp_avg_sq, bytes_of(values.exp_avg_sq));
  // Zeros, where no update has made a place for them.
  if (arrays.maximum != nullptr)
    copy_bytes(values.max_exp_avg_sq.data(), arrays.maximum, bytes_of(values.max_exp_avg_sq));
}

/// Without a rest they are the values.
void read_masters(const TileBytes& bytes, uint64_t first, std::vector<float>& masters) {
  const auto* const halves = reinterpret_cast<const uint16_t*>(bytes.value) + first;
  const auto* const remainders =
      bytes.rest == nullptr
          ? nullptr
          : reinterpret_cast<const int16_t*>(bytes.rest + bytes.elements * 8) + first;
  for (size_t i = 0; i < masters.size(); ++i) {
    const int16_t remainder = remainders == nullptr ? int16_t{0} : remainders[i];
    masters[i] = std::bit_cast<float>(bf16_master(halves[i], remainder));
  }
}

}  // namespace

NewMoments::NewMoments(MomentValues values) {
  const auto kept = std::make_shared<const MomentValues>(std::move(values));
  exp_avg = kept->exp_avg;
  exp_avg_sq = kept->exp_avg_sq;
  max_exp_avg_sq = kept->max_exp_avg_sq;
  masters = kept->masters;
  owner = kept;
}

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

size_t Moments::writing_count(uint32_t bucket) const {
  const auto found = writing_.find(bucket);
  return found == writing_.end() ? 0 : found->second.size();
}

bool Moments::is_still(const Entry& entry) const {
  // A spill in flight replaces the same extents.
  return entry.task_count() == writing_count(entry.owner()) &&
         entry.residency() != Residency::draining;
}

bool Moments::may_write(const TileTask& task, bool keeps_maxima) const {
  const uint32_t bucket = task.entry->owner();
  if (!is_still(*task.entry)) return false;
  if (writing_count(bucket) == 0) return true;
  // With maxima all tiles of the bucket get another form.
  const bool changes_form = keeps_maxima && !task.bucket->keeps_maxima;
  return task.writes_rest && !changes_form && !writing_.at(bucket).contains(task.index);
}

void Moments::submit_when_still(TileTask task, bool keeps_maxima) {
  const auto later = std::make_shared<TileTask>(std::move(task));
  parts_.conditions.add([this, keeps_maxima, later] { return may_write(*later, keeps_maxima); },
                        [this, keeps_maxima, later] {
                          if (keeps_maxima) keep_maxima(parts_, {later->entry->owner()});
                          // A trainer may scribble there: without an extent there is no checksum to
                          // compare with.
                          later->value_in_arena = later->reads_value &&
                                                  later->entry->residency() == Residency::clean &&
                                                  later->entry->replicas()[later->index].exists();
                          if (later->writes_rest) begin_writing(*later);
                          tasks_.submit(std::move(*later));
                        });
}

void Moments::begin_writing(TileTask& task) {
  const uint32_t bucket = task.entry->owner();
  writing_[bucket].insert(task.index);
  task.done =
      [this, bucket, index = task.index, done = std::move(task.done)](const Status& status) {
        const auto found = writing_.find(bucket);
        found->second.erase(index);
        if (found->second.empty()) writing_.erase(found);
        done(status);
      };
}

void Moments::write_back(Bucket& bucket, Done done) {
  Entry& entry = *bucket.value;
  const auto holds = [this, &entry] {
    return is_still(entry) &&
           (entry.residency() != Residency::dirty || writing_count(entry.owner()) == 0);
  };
  parts_.conditions.add(holds, [this, &entry, done = std::move(done)] {
    if (entry.slot() != nullptr && parts_.slots.has_writer(*entry.slot())) {
      return done(error(StatusCode::invalid_argument,
                        "shard ",
                        parts_.shards.describe(entry),
                        " is still leased for writing; let go of the tensor first"));
    }
    if (entry.residency() != Residency::dirty) return done(Status::ok());
    writeback_.write_back(entry, std::make_shared<StepReport>(), done);
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
  Bucket& bucket = *place.value().bucket;
  const bool reads_masters = request.reads_masters && bucket.dtype == DType::bfloat16;
  if (reads_masters) values->masters.resize(count);
  // They are zero, and a read makes no place for them.
  const bool is_zero = bucket.is_host() && !parts_.host_tiles.has_rest(bucket, place.value().tile);
  if (is_zero && !reads_masters) return done(Status::ok(), std::move(*values));
  TileTask task = task_at(place.value());
  task.reads_value = reads_masters;
  MEMD_FAILPOINT("moments.before_read");
  task.work = [values, dtype = bucket.dtype, first = place.value().element_in_tile](
                  const TileBytes& bytes) {
    if (bytes.rest != nullptr) read_moments(bytes, dtype, first, *values);
    if (!values->masters.empty()) read_masters(bytes, first, values->masters);
  };
  task.done = [values, done = std::move(done)](const Status& status) {
    done(status, std::move(*values));
  };
  if (!reads_masters) return submit_when_still(std::move(task), false);
  const auto later = std::make_shared<TileTask>(std::move(task));
  write_back(bucket, [this, later](const Status& status) {
    status.is_ok() ? submit_when_still(std::move(*later), false) : later->done(status);
  });
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

Status Moments::check(const MomentsRequest& request,
                      const NewMoments& values,
                      const Bucket& bucket) const {
  const uint64_t count = request.element_count;
  const auto fits = [count](std::span<const float> some) {
    return some.empty() || some.size() == count;
  };
  if (values.exp_avg.size() != count || values.exp_avg_sq.size() != count ||
      !fits(values.max_exp_avg_sq) || !fits(values.masters)) {
    return error(StatusCode::invalid_argument, "moments and element count differ");
  }
  if (values.masters.empty() || bucket.dtype == DType::bfloat16) return Status::ok();
  return error(StatusCode::invalid_argument,
               "shard ",
               parts_.job_name,
               "/",
               parts_.shards[request.shard_id].name(),
               " is float32, and fp32 values belong to bfloat16 parameters");
}

Status Moments::misfit(uint32_t shard_id, uint64_t element) const {
  return error(StatusCode::invalid_argument,
               "shard ",
               parts_.job_name,
               "/",
               parts_.shards[shard_id].name(),
               " has other bfloat16 values than training publishes of these fp32 values; write the "
               "values first that belong to them: element ",
               element);
}

void Moments::write(const MomentsRequest& request,
                    uint64_t generation,
                    NewMoments values,
                    Done done) {
  const auto place = find(request);
  if (!place.is_ok()) return done(place.status());
  Bucket& bucket = *place.value().bucket;
  if (Status status = check(request, values, bucket); !status.is_ok()) return done(status);
  const bool keeps_maximum = !values.max_exp_avg_sq.empty();
  const bool has_masters = !values.masters.empty();
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
  // A tile that is replaced whole is not read before. Masters are compared first, and remainders
  // stay.
  task->reads_rest =
      bucket.dtype != DType::float32 || request.element_count != bucket.tile_elements(task->index);
  task->reads_value = has_masters;
  task->writes_rest = true;
  const auto refused = std::make_shared<std::optional<uint64_t>>();  // an element of the request
  MEMD_FAILPOINT("moments.before_write");
  task->work = [values = std::move(values),
                dtype = bucket.dtype,
                first = place.value().element_in_tile,
                refused](const TileBytes& bytes) {
    *refused = write_masters(values.masters, bytes, first);
    if (!*refused) write_moments(values, bytes, dtype, first);
  };
  task->done = [this, request, generation, keeps_maximum, refused, done = std::move(done)](
                   const Status& status) {
    MEMD_FAILPOINT("moments.written");
    if (!status.is_ok()) return done(status);
    if (*refused) {
      parts_.durable.note_change();  // the same bytes are in a new extent
      return done(misfit(request.shard_id, request.element_first + **refused));
    }
    note_written(request.shard_id, generation, keeps_maximum);
    done(status);
  };
  const auto submit = [this, task, keeps_maximum](const Status& status) {
    if (!status.is_ok()) return task->done(status);
    submit_when_still(std::move(*task), keeps_maximum);
  };
  // A dirty tile is on disk first, so that a kill leaves the old moments or the new ones.
  writeback_.flush_tiles(std::vector{index},
                         std::make_shared<StepReport>(),
                         [this, &bucket, has_masters, submit](const Status& flushed) {
                           if (!flushed.is_ok() || !has_masters) return submit(flushed);
                           write_back(bucket, submit);
                         });
}

}  // namespace memd
