#include "store/snapshot/snapshot_readings.h"

#include <algorithm>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/units.h"
#include "optim/bf16_master.h"
#include "store/format/tile_rest.h"

namespace memd {
namespace {

// Below all jobs, and in turn with scrub and checks.
constexpr IoClass kBackground{.job = kDaemonJob, .priority = IoPriority::scrub};

uint64_t identity_of(const Snapshot& snapshot) {
  // Checksums of all extents are in the catalogue, whose own are here.
  RootRecord alone;
  alone.snapshots.edit().push_back(snapshot.entry);
  return std::max<uint64_t>(hash_record(encode(alone)), 1);
}

uint64_t piece_count_of(const JobRecord& record) {
  uint64_t count = 0;
  for (const ShardRecord& shard : record.shards) count += shard.extents.size();
  for (const BucketRecord& bucket : record.buckets) count += bucket.tiles.size();
  return count;
}

bool holds(const PieceMemory& into, uint64_t bytes) {
  const uint64_t all_bytes = into.memory->bytes();
  return into.offset_bytes % kBlockBytes == 0 && into.offset_bytes <= all_bytes &&
         bytes <= all_bytes - into.offset_bytes;
}

std::vector<std::string> names_at(const JobRecord& record, const SnapshotPlace& place) {
  if (!place.is_tile) return {record.shards[place.owner].name};
  return names_in_tile(record, static_cast<uint32_t>(place.owner), place.index);
}

}  // namespace

// ---- Pieces -------------------------------------------------------------------------------------

SnapshotPiece::SnapshotPiece(const JobRecord& record, const SnapshotPlace& place, PieceMemory into)
    : into_(std::move(into)), blocks_(blocks_of(record, place)) {
  if (!place.is_tile) {
    const ShardRecord& shard = record.shards[place.owner];
    const uint64_t bytes = element_count_of(shard) * dtype_bytes(shard.dtype);
    const uint64_t offset_bytes = place.index * uint64_t{kBlobExtentBytes};
    value_bytes_ = std::min<uint64_t>(bytes - offset_bytes, kBlobExtentBytes);
    return;
  }
  const BucketRecord& bucket = record.buckets[place.owner];
  dtype_ = bucket.dtype;
  element_count_ = tile_elements(bucket, place.index);
  value_bytes_ = element_count_ * dtype_bytes(bucket.dtype);
  keeps_maxima_ = bucket.keeps_maxima;
}

std::span<const std::byte> SnapshotPiece::value() const {
  if (blocks_.value_bytes == 0) return {};
  return value_blocks().first(value_bytes_);
}

std::span<const std::byte> SnapshotPiece::moment(size_t index) const {
  if (blocks_.rest_bytes == 0) return {};
  const uint64_t bytes = element_count_ * sizeof(float);
  return rest_blocks().subspan(index * bytes, bytes);
}

std::span<const std::byte> SnapshotPiece::max_exp_avg_sq() const {
  if (blocks_.rest_bytes == 0 || !keeps_maxima_) return {};
  const uint64_t offset_bytes = maxima_offset_bytes(dtype_, element_count_);
  const uint64_t bytes = element_count_ * sizeof(float);
  // Written before the bucket kept maxima: they are zero.
  if (blocks_.rest_bytes < offset_bytes + bytes) return {};
  return rest_blocks().subspan(offset_bytes, bytes);
}

std::span<const std::byte> SnapshotPiece::master() const {
  if (blocks_.master_bytes == 0) return {};
  return {master_data(), element_count_ * sizeof(float)};
}

void SnapshotPiece::join_master() {
  if (blocks_.master_bytes == 0) return;
  const std::byte* const halves = value_blocks().data();
  const std::byte* const remainders =
      blocks_.rest_bytes == 0 ? nullptr : rest_blocks().data() + element_count_ * 2 * sizeof(float);
  auto* const masters = reinterpret_cast<uint32_t*>(master_data());
  for (size_t i = 0; i < element_count_; ++i) {
    const auto half = field_at<uint16_t>(halves + i * sizeof(uint16_t));
    const int16_t remainder =
        remainders == nullptr ? int16_t{0} : field_at<int16_t>(remainders + i * sizeof(int16_t));
    masters[i] = bf16_master(half, remainder);
  }
}

// ---- Readings -----------------------------------------------------------------------------------

struct SnapshotReadings::Pending {
  const uint64_t reading_id;
  const uint64_t snapshot_id;
  const std::string what;
  const std::shared_ptr<const JobRecord> record;
  const SnapshotPlace place;
  const Read done;
  std::shared_ptr<SnapshotPiece> piece{};
  struct Part {
    ExtentRecord extent;
    std::span<std::byte> into;
  };
  std::vector<Part> parts{};
  size_t part_next = 0;
  bool matches = false;

  const Part& part() const { return parts[part_next]; }
};

Status SnapshotReadings::check_bounds(const Job& job, const SnapshotReadingRequest& request) const {
  size_t of_owner = 0;
  for (const auto& [id, each] : readings_) {
    if (each.job_id == job.job_id()) {
      return error(StatusCode::in_use,
                   "snapshot ",
                   each.name,
                   " of job ",
                   job.name(),
                   " is being exported, one of a job at a time; wait for its end, or end process ",
                   each.pid);
    }
    if (each.owner == request.owner) ++of_owner;
  }
  if (of_owner < kReadingsOfOwnerMax) return Status::ok();
  return error(StatusCode::capacity,
               request.owner,
               " exports as many snapshots as it may at a time; wait for one to end: ",
               of_owner);
}

Result<SnapshotReading> SnapshotReadings::begin(const SnapshotReadingRequest& request) {
  const Job* const job = parts_.jobs.find(request.job_id);
  if (job == nullptr) {
    return error(StatusCode::not_found, "there is no job with id ", request.job_id);
  }
  if (is_stopping_) return error(StatusCode::unavailable, "the daemon is stopping");
  const Snapshot* const snapshot = snapshots_.find(request.job_id, request.name);
  if (snapshot == nullptr || snapshot->is_ending) {
    const std::string names = snapshots_.names_text(request.job_id);
    return error(StatusCode::not_found,
                 "job ",
                 job->name(),
                 " has no snapshot ",
                 request.name,
                 names.empty() ? "; it has none" : concat("; it has ", names));
  }
  if (snapshot->record == nullptr || snapshot->is_catalogue_lost ||
      !snapshot->lost_shards.empty()) {
    return error(StatusCode::integrity,
                 "snapshot ",
                 request.name,
                 " of job ",
                 job->name(),
                 " is not whole any more (memd snapshot list); export another one");
  }
  if (Status bounds = check_bounds(*job, request); !bounds.is_ok()) return bounds;
  const uint64_t identity = identity_of(*snapshot);
  const uint64_t piece_count = piece_count_of(*snapshot->record);
  const bool goes_on = request.identity == identity && request.piece_first <= piece_count;
  const uint64_t piece_first = goes_on ? request.piece_first : 0;
  const uint64_t reading_id = id_next_++;
  readings_.emplace(reading_id,
                    Reading{.snapshot_id = snapshot->id,
                            .job_id = request.job_id,
                            .owner = request.owner,
                            .uid = request.uid,
                            .pid = request.pid,
                            .job_name = job->name(),
                            .name = request.name,
                            .record = snapshot->record,
                            .started_ns = parts_.clock.now_ns(),
                            .piece_count = piece_count,
                            .piece_done_count = piece_first});
  return SnapshotReading{.reading_id = reading_id,
                         .snapshot = {.job_id = request.job_id,
                                      .name = request.name,
                                      .step = snapshot->entry.step,
                                      .created_s = snapshot->entry.created_s,
                                      .bytes = snapshot->space.bytes,
                                      .extent_count = snapshot->extents->size(),
                                      .lost_shards = {}},
                         .identity = identity,
                         .piece_first = piece_first,
                         .record = snapshot->record};
}

Status SnapshotReadings::check_unread(const Snapshot& snapshot, const std::string& job_name) const {
  for (const auto& [id, each] : readings_) {
    if (each.snapshot_id != snapshot.id) continue;
    return error(StatusCode::in_use,
                 "snapshot ",
                 each.name,
                 " of job ",
                 job_name,
                 " is being exported; wait for its end, or end process ",
                 each.pid);
  }
  return Status::ok();
}

std::optional<double> SnapshotReadings::part_read(uint64_t snapshot_id) const {
  for (const auto& [id, each] : readings_) {
    if (each.snapshot_id != snapshot_id) continue;
    return static_cast<double>(each.piece_done_count) /
           static_cast<double>(std::max<uint64_t>(each.piece_count, 1));
  }
  return std::nullopt;
}

std::vector<Activity> SnapshotReadings::activities() const {
  std::vector<Activity> all;
  for (const auto& [id, each] : readings_) {
    all.push_back({.kind = "export",
                   .job_id = each.job_id,
                   .job = each.job_name,
                   .what = concat("snapshot ",
                                  each.name,
                                  ", piece ",
                                  each.piece_done_count,
                                  " of ",
                                  each.piece_count,
                                  ", for process ",
                                  each.pid),
                   .priority = io_priority_name(kBackground.priority),
                   .age_ns = parts_.clock.now_ns() - each.started_ns});
    const Job* const job = parts_.jobs.find(each.job_id);
    all.back().uid = job != nullptr ? job->uid() : 0;
  }
  return all;
}

SnapshotReadingStatistics SnapshotReadings::statistics() const {
  return {.count = readings_.size(), .bytes = bytes_, .errors = errors_};
}

// ---- Reads --------------------------------------------------------------------------------------

void SnapshotReadings::read(uint64_t reading_id,
                            const SnapshotPlace& place,
                            PieceMemory into,
                            Read done) {
  const auto found = readings_.find(reading_id);
  if (found == readings_.end()) {
    return done(error(StatusCode::not_found, "this export has ended: ", reading_id));
  }
  if (is_stopping_) return done(error(StatusCode::unavailable, "the daemon is stopping"));
  const Reading& reading = found->second;
  const JobRecord& record = *reading.record;
  if (!is_in(record, place)) {
    return done(error(StatusCode::invalid_argument,
                      "snapshot ",
                      reading.name,
                      " has no such piece: ",
                      place.owner,
                      ", ",
                      place.index));
  }
  if (!holds(into, blocks_of(record, place).bytes())) {
    return done(error(StatusCode::invalid_argument,
                      "a piece has no room in its export's memory at ",
                      into.offset_bytes));
  }
  auto pending = std::make_shared<Pending>(
      Pending{.reading_id = reading_id,
              .snapshot_id = reading.snapshot_id,
              .what = concat("snapshot ", reading.name, " of job ", reading.job_name),
              .record = reading.record,
              .place = place,
              .done = std::move(done)});
  pending->piece = std::make_shared<SnapshotPiece>(record, place, std::move(into));
  const SnapshotPiece& piece = *pending->piece;
  if (place.is_tile) {
    const TileRecord& tile = record.buckets[place.owner].tiles[place.index];
    if (tile.parameter.exists()) pending->parts.push_back({tile.parameter, piece.value_blocks()});
    if (tile.rest.exists()) pending->parts.push_back({tile.rest, piece.rest_blocks()});
  } else {
    const ShardRecord& shard = record.shards[place.owner];
    pending->parts.push_back({shard.extents[place.index], piece.value_blocks()});
  }
  ++in_flight_count_;
  read_next(pending);
}

void SnapshotReadings::read_next(const PendingPointer& pending) {
  if (pending->part_next == pending->parts.size()) {
    // A place that holds nothing costs no worker.
    if (pending->parts.empty()) return finish(pending, Piece(pending->piece));
    return parts_.workers.submit(
        {.job = kDaemonJob, .bytes = pending->piece->value().size()},
        [pending] { pending->piece->join_master(); },
        [this, pending] { finish(pending, Piece(pending->piece)); });
  }
  parts_.extents.read_unverified(
      pending->part().extent,
      pending->part().into,
      kBackground,
      [this, pending](const Status& status) {
        if (status.is_ok()) return verify(pending);
        fail(pending, parts_.extents.unreadable(pending->part().extent, pending->what, status));
      });
}

void SnapshotReadings::verify(const PendingPointer& pending) {
  parts_.workers.submit(
      {.job = kDaemonJob, .bytes = pending->part().extent.length_bytes},
      [pending] {
        pending->matches = ExtentStore::matches(pending->part().extent, pending->part().into);
      },
      [this, pending] {
        if (!pending->matches) return read_twice(pending);
        bytes_ += pending->part().extent.length_bytes;
        ++pending->part_next;
        read_next(pending);
      });
}

void SnapshotReadings::read_twice(const PendingPointer& pending) {
  parts_.extents.count_checksum_failure(pending->part().extent);
  parts_.extents.read_again(pending->part().extent,
                            pending->part().into,
                            kBackground,
                            pending->what,
                            [this, pending](const Status& status) {
                              if (!status.is_ok()) return fail(pending, status);
                              ++pending->part_next;
                              read_next(pending);
                            });
}

void SnapshotReadings::fail(const PendingPointer& pending, const Status& status) {
  const Snapshot* const snapshot = snapshots_.find(pending->snapshot_id);
  // Its places may hold anything then.
  if (snapshot == nullptr) {
    return finish(pending, error(StatusCode::fenced, pending->what, " was dropped with its job"));
  }
  ++errors_;
  const std::vector<std::string> names = names_at(*pending->record, pending->place);
  if (status.code() == StatusCode::integrity) snapshots_.lose(pending->snapshot_id, names);
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  finish(pending,
         Status(status.code(),
                concat("the export stops at shard ", text, ": ", status.message()),
                status.error_number()));
}

void SnapshotReadings::finish(const PendingPointer& pending, Result<Piece> answer) {
  --in_flight_count_;
  if (const auto found = readings_.find(pending->reading_id); found != readings_.end()) {
    if (answer.is_ok()) ++found->second.piece_done_count;
    if (answer.is_ok() && snapshots_.find(pending->snapshot_id) == nullptr) {
      return pending->done(error(StatusCode::fenced, pending->what, " was dropped with its job"));
    }
  }
  pending->done(std::move(answer));
}

}  // namespace memd
