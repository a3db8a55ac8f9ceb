#include "store/state/tile_tasks.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"

namespace memd {

struct TileTasks::Running {
  TileTask task;
  uint64_t offset_bytes = 0;  // in the private side
  TileBytes bytes;
  std::byte* gradient_copy = nullptr;  // a spilled gradient's place behind the state
  uint64_t gradient_bytes = 0;
  std::optional<uint64_t> gradient_offset_bytes;  // where it has a place of its own
  bool in_memory = false;                         // value and rest were cached
  bool stays = false;                             // in memory, dirty
  // With tier host, in the host side: where it works; whose bytes go there first, and which is free
  // afterwards; and what holds the old bytes while they change.
  std::optional<HostTiles::Place> place;
  std::optional<HostTiles::Place> old_place;
  std::optional<HostTiles::Place> guard;
  bool has_moved = false;  // the tile words may name `place` instead of the old one
  bool value_from_arena = false;
  bool zeroes_value = false;  // nothing was ever written there
  bool zeroes_rest = false;
  const std::byte* arena_source = nullptr;  // where from
  // For an update that may stay in memory, in the job's TileWords:
  std::optional<uint32_t> record;
  std::optional<uint32_t> scratch;
  ExtentRecord value_extent;  // to be written
  ExtentRecord rest_extent;
  // Found by the worker, acted upon by the server thread.
  bool value_mismatch = false;
  bool rest_mismatch = false;
  bool gradient_mismatch = false;
  uint64_t started_ns = 0;
  uint64_t work_ns = 0;

  bool has_mismatch() const { return value_mismatch || rest_mismatch || gradient_mismatch; }
  bool is_speculative() const { return task.keep != nullptr; }
  bool is_host() const { return place.has_value(); }
  bool changes_state() const {
    return (task.writes_value || task.writes_rest) && !task.copies_to_disk;
  }
  bool writes_value() const { return task.writes_value && !stays; }
  bool writes_rest() const { return task.writes_rest && !stays; }
  /// Value and rest are in the place that starts at `offset_bytes`, which ends with them.
  bool is_whole() const {
    const bool alone = gradient_copy == nullptr || gradient_offset_bytes.has_value();
    return bytes.rest_bytes > 0 && alone && (task.reads_value || task.writes_value);
  }
  /// Bytes that it works in.
  uint64_t held_bytes() const {
    const bool has_gradient = gradient_copy != nullptr;
    return bytes.value_bytes + bytes.rest_bytes + (has_gradient ? gradient_bytes : 0);
  }
  /// Those of the private side.
  uint64_t private_bytes() const { return is_host() ? gradient_bytes : held_bytes(); }
  /// The part of the rest that its extent has: without the maxima, where it is older than they are.
  std::span<std::byte> rest_on_disk() const {
    MEMD_CHECK_LE(uint64_t{rest_source().length_bytes}, bytes.rest_bytes);
    return rest_span().first(rest_source().length_bytes);
  }
  uint64_t key() const { return tile_key(task.entry->owner(), task.index); }
  ExtentRecord value_source() const { return task.entry->replicas()[task.index].extent(); }
  ExtentRecord rest_source() const { return task.bucket->rest[task.index].extent(); }
  ExtentRecord gradient_source() const { return task.gradient->replicas()[task.index].extent(); }
  bool reads_rest() const { return task.reads_rest && rest_source().exists(); }
  std::span<std::byte> value_span() const { return {bytes.value, bytes.value_bytes}; }
  std::span<std::byte> rest_span() const { return {bytes.rest, bytes.rest_bytes}; }
  std::span<std::byte> gradient_span() const { return {gradient_copy, gradient_bytes}; }
};

// ---- Waiting ------------------------------------------------------------------------------------

void TileTasks::begin(TileTask& task) const {
  parts_.residencies.begin_task(*task.entry);
  parts_.activities.begin();
  if (task.report == nullptr) task.report = std::make_shared<StepReport>();
}

void TileTasks::submit(TileTask task) {
  begin(task);
  waiting_.push_back(std::move(task));
}

void TileTasks::submit_first(TileTask task) {
  begin(task);
  waiting_.push_front(std::move(task));
}

TileTask TileTasks::flush_task(uint64_t key) {
  TileTask task;
  task.bucket = &parts_.shards.bucket(bucket_of(key));
  task.entry = task.bucket->value;
  task.index = tile_of(key);
  task.reads_value = true;
  task.writes_value = true;
  task.reads_rest = true;
  task.writes_rest = true;
  task.work = [](const TileBytes&) {};
  return task;
}

void TileTasks::submit_flush(uint64_t key, const std::shared_ptr<StepReport>& report, Done done) {
  TileTask task = flush_task(key);
  task.report = report;
  task.done = std::move(done);
  submit(std::move(task));
}

void TileTasks::fail_waiting(const Status& why) {
  std::deque<TileTask> waiting = std::exchange(waiting_, {});
  for (TileTask& each : waiting) {
    parts_.residencies.end_task(*each.entry);
    parts_.activities.end();
    const Done done = std::move(each.done);
    done(why);
  }
}

void TileTasks::make_room() {
  // Places of tier host never make room for each other.
  if (!parts_.tiles.has_dirty()) {
    return fail_waiting(error(StatusCode::capacity,
                              "job ",
                              parts_.job_name,
                              ": its memory has no place in one piece for a tile of tier host; "
                              "start it anew with a larger host_bytes: free ",
                              parts_.host_side().free_bytes(),
                              ", in one piece ",
                              parts_.host_side().largest_free_bytes()));
  }
  // A tile in memory needs no more of it: this one starts now, before those that wait.
  TileTask task = flush_task(parts_.tiles.next_to_flush());
  task.report = std::make_shared<StepReport>();
  task.done = [this](const Status& status) {
    if (status.is_ok()) return;
    // No room will come: whoever waits for it hears why.
    fail_waiting(status);
  };
  parts_.residencies.begin_task(*task.entry);
  parts_.activities.begin();
  MEMD_CHECK(try_start(task));
}

bool TileTasks::advance(TurnBudget& turn) {
  bool progress = false;
  while (!waiting_.empty() && running_count_ < kTilesInFlight) {
    // Taken out first: a task that fails at once finishes, and its continuation may submit others.
    TileTask task = std::move(waiting_.front());
    waiting_.pop_front();
    if (try_start(task)) {
      progress = true;
      if (turn.is_spent()) break;
      continue;
    }
    waiting_.push_front(std::move(task));
    // The private floor holds two tiles, but those that stay may lie in the way.
    if (running_count_ == 0) make_room();
    break;
  }
  return progress;
}

// ---- Starting -----------------------------------------------------------------------------------

std::optional<uint64_t> TileTasks::allocate_private(uint64_t bytes) {
  JobMemory& memory = *parts_.memory;
  Arena& side = memory.private_side();
  for (;;) {
    if (const auto offset_bytes = side.allocate(bytes)) return offset_bytes;
    if (memory.grow_private()) continue;
    if (reclaim_.memory()) continue;
    if (!parts_.tiles.drop_any_clean(side)) return std::nullopt;
  }
}

// State stays in memory where there is room: for a trace that repeats, a fixed part that stays
// beats a least recently used one, which would be evicted just before its next use.
uint64_t TileTasks::kept_bytes() const {
  return parts_.private_side().used_bytes() - running_bytes_;
}

bool TileTasks::has_room_to_stay(const Running& running) const {
  const JobMemory& memory = *parts_.memory;
  const uint64_t with_it_bytes = kept_bytes() + (running.stays ? 0 : running.held_bytes());
  const uint64_t with_later_bytes = running.task.later_bytes + running.held_bytes();
  return running.is_whole() && std::max(with_it_bytes, with_later_bytes) + memory.working_bytes() <=
                                   memory.private_bytes_max();
}

bool TileTasks::try_start(TileTask& task) {
  if (task.starting) std::exchange(task.starting, nullptr)();
  auto running = std::make_shared<Running>();
  set_sizes(*running, task);
  if (!take_memory(*running, task)) return false;
  set_places(*running, task);
  running->started_ns = parts_.clock.now_ns();
  running->task = std::move(task);
  if (running->is_host()) running->task.reads_value = running->task.reads_rest = true;
  ++running_count_;
  running_bytes_ += running->private_bytes();
  MEMD_FAILPOINT("tile.started");
  load(running);
  return true;
}

void TileTasks::set_sizes(Running& running, const TileTask& task) const {
  TileBytes& bytes = running.bytes;
  bytes.value_bytes = task.entry->replica_bytes(task.index);
  if (task.bucket != nullptr && task.bucket->is_host()) {
    // One that no step updates takes no memory for it.
    const bool has_rest = parts_.host_tiles.has_rest(*task.bucket, task.index);
    bytes.rest_bytes = has_rest ? task.bucket->rest_bytes(task.index) : 0;
  } else if (task.reads_rest || task.writes_rest) {
    bytes.rest_bytes = task.bucket->rest_bytes(task.index);
  }
  if (task.bucket != nullptr) {
    bytes.elements = task.bucket->tile_elements(task.index);
    bytes.keeps_maxima = task.bucket->keeps_maxima;
  }
  const bool gradient_spilled = task.gradient != nullptr && !task.gradient->is_resident();
  if (gradient_spilled) running.gradient_bytes = bytes.value_bytes;
}

bool TileTasks::take_memory(Running& running, const TileTask& task) {
  const TileBytes& bytes = running.bytes;
  if (task.bucket != nullptr && task.bucket->is_host()) return take_host(running, task);
  if (bytes.rest_bytes > 0 && !take_cached(running, task)) return false;
  if (running.in_memory) return true;
  const auto offset_bytes =
      allocate_private(bytes.value_bytes + bytes.rest_bytes + running.gradient_bytes);
  if (offset_bytes) running.offset_bytes = *offset_bytes;
  return offset_bytes.has_value();
}

/// The tile where it is cached, with room for a spilled gradient. False: the task can't start yet.
bool TileTasks::take_cached(Running& running, const TileTask& task) {
  const uint64_t key = tile_key(task.entry->owner(), task.index);
  const auto cached = parts_.tiles.take(key);
  const bool dirty = parts_.tiles.is_dirty(key);
  // Another task works on it; the disk has older bytes.
  if (dirty && !cached) return false;
  if (!cached) return true;
  running.in_memory = true;
  running.offset_bytes = *cached;
  if (running.gradient_bytes == 0) return true;
  running.gradient_offset_bytes = allocate_private(running.gradient_bytes);
  if (running.gradient_offset_bytes) return true;
  if (dirty) {
    parts_.tiles.put(key, *cached);
    return false;
  }
  running.in_memory = false;
  parts_.private_side().free(*cached);
  return true;
}

bool TileTasks::take_host(Running& running, const TileTask& task) {
  const uint64_t key = tile_key(task.entry->owner(), task.index);
  if (!parts_.host_tiles.begin_task(key)) return false;
  if (running.gradient_bytes > 0) {
    running.gradient_offset_bytes = allocate_private(running.gradient_bytes);
    if (!running.gradient_offset_bytes) {
      parts_.host_tiles.end_task(key);
      return false;
    }
  }
  if (take_host_places(running, task)) return true;
  if (running.gradient_offset_bytes) parts_.private_side().free(*running.gradient_offset_bytes);
  parts_.host_tiles.end_task(key);
  return false;
}

bool TileTasks::take_host_places(Running& running, const TileTask& task) {
  Arena& side = parts_.host_side();
  const auto allocate = [&side](uint64_t bytes) -> std::optional<HostTiles::Place> {
    const auto offset_bytes = side.allocate(bytes);
    if (!offset_bytes) return std::nullopt;
    return HostTiles::Place{.offset_bytes = *offset_bytes, .bytes = bytes};
  };
  const uint64_t wanted_bytes = running.bytes.value_bytes + running.bytes.rest_bytes;
  const HostTiles::Place* const held =
      parts_.host_tiles.find(tile_key(task.entry->owner(), task.index));
  running.in_memory = held != nullptr;
  if (held == nullptr || held->bytes < wanted_bytes) {
    running.place = allocate(wanted_bytes);
    if (running.place && held != nullptr) running.old_place = *held;
    return running.place.has_value();
  }
  running.place = *held;
  // A step names its pieces; what else changes the only copy leaves the old bytes or the new ones.
  const bool is_guarded = (task.writes_value || task.writes_rest) && !task.copies_to_disk &&
                          !task.may_stay && parts_.tiles.words() != nullptr;
  if (!is_guarded) return true;
  running.guard = allocate(held->bytes);
  if (!running.guard) running.place.reset();
  return running.guard.has_value();
}

void TileTasks::set_places(Running& running, const TileTask& task) {
  JobMemory& memory = *parts_.memory;
  Arena& side = memory.private_side();
  TileBytes& bytes = running.bytes;
  bytes.value = running.is_host() ? memory.host_side().at(running.place->offset_bytes)
                                  : side.at(running.offset_bytes);
  bytes.rest = bytes.rest_bytes > 0 ? bytes.value + bytes.value_bytes : nullptr;
  if (running.gradient_bytes > 0) {
    running.gradient_copy = running.gradient_offset_bytes
                                ? side.at(*running.gradient_offset_bytes)
                                : bytes.value + bytes.value_bytes + bytes.rest_bytes;
    bytes.gradient = running.gradient_copy;
  } else if (task.gradient != nullptr) {
    bytes.gradient = memory.arena().at(task.gradient->slot()->offset_bytes) +
                     task.index * task.gradient->stride_bytes();
  }
  const auto in_arena = [&](const Slot* slot) {
    if (slot == nullptr) return static_cast<std::byte*>(nullptr);
    return memory.arena().at(slot->offset_bytes) + task.index * task.entry->stride_bytes();
  };
  running.arena_source = in_arena(task.value_in_shadow ? task.shadow : task.entry->slot());
  bytes.arena_value = in_arena(task.keep ? task.shadow : task.entry->slot());
  running.value_from_arena =
      (task.value_in_arena || task.value_in_shadow) && running.arena_source != nullptr;
}

// ---- Reading ------------------------------------------------------------------------------------

std::string TileTasks::describe(const Running& running, const Entry& entry) const {
  return concat("shard ",
                parts_.shards.describe(entry, running.task.index),
                ", step ",
                parts_.progress.committed_step());
}

void TileTasks::load(const std::shared_ptr<Running>& running) {
  TileTask& task = running->task;
  auto join = Join::start([this, running](const Status& status) {
    running->task.report->read_seconds +=
        static_cast<double>(parts_.clock.now_ns() - running->started_ns) * 1e-9;
    MEMD_FAILPOINT("tile.loaded");
    status.is_ok() ? work(running) : finish(running, status);
  });
  const auto read = [&](const Entry& entry, const ExtentRecord& extent, std::span<std::byte> into) {
    task.report->read_bytes += extent.length_bytes;
    parts_.extents.read_unverified(
        extent,
        into,
        {.job = JobId{parts_.job_id}, .priority = IoPriority::state},
        [this, running, &entry, extent, done = join->branch()](const Status& status) {
          if (status.is_ok()) return done(status);
          done(parts_.extents.unreadable(extent, describe(*running, entry), status));
        });
  };
  if (!running->in_memory) {
    if (task.reads_value && !running->value_from_arena) {
      if (running->value_source().exists()) {
        read(*task.entry, running->value_source(), running->value_span());
      } else {
        running->zeroes_value = true;
      }
    }
    if (running->reads_rest()) {
      read(*task.entry, running->rest_source(), running->rest_on_disk());
    } else if (running->bytes.rest_bytes > 0) {
      running->zeroes_rest = true;
    }
  }
  if (running->gradient_copy != nullptr) {
    read(*task.gradient, running->gradient_source(), running->gradient_span());
  }
  join->finish(Status::ok());
}

// ---- Working ------------------------------------------------------------------------------------

// A kill of the daemon must lose nothing: if a tile's only copy is in memory, each piece is copied
// before it changes.
void TileTasks::prepare_words(Running& running) {
  PrivateTiles& tiles = parts_.tiles;
  const uint64_t key = running.key();
  running.record = parts_.log.tile_record(key);
  if (!running.task.may_stay) return;
  if (const MadeTile* const made = tiles.made(key)) {
    running.bytes.element_first = made->piece * piece_elements(running.bytes.keeps_maxima);
    // Once: a tile that is read again has it already.
    if (const auto scratch = tiles.take_made_scratch(key)) running.scratch = scratch;
  }
  const bool is_only_copy = running.in_memory && (running.is_host() ? !running.old_place.has_value()
                                                                    : tiles.is_dirty(key));
  if (running.record && is_only_copy && !running.bytes.begin_piece) prepare_pieces(running);
}

void TileTasks::prepare_pieces(Running& running) {
  PrivateTiles& tiles = parts_.tiles;
  if (!running.scratch) running.scratch = tiles.words()->take_scratch();
  MEMD_CHECK(running.scratch.has_value());  // there are more than tiles in flight
  const TileArrays tile{.dtype = running.task.bucket->dtype,
                        .elements = running.bytes.elements,
                        .keeps_maxima = running.bytes.keeps_maxima,
                        .value = running.bytes.value,
                        .rest = running.bytes.rest};
  running.bytes.begin_piece =
      [words = tiles.words(), record = *running.record, scratch = *running.scratch, tile](
          uint64_t piece) { words->begin_piece(record, tile, piece, scratch); };
}

void TileTasks::decide_whether_it_stays(Running& running) {
  if (running.is_host()) {
    running.stays = !running.task.copies_to_disk;
    return;
  }
  // Once it has extents it is written, also where it was read again meanwhile.
  const bool stays =
      running.task.may_stay && !running.value_extent.exists() && has_room_to_stay(running);
  if (stays == running.stays) return;
  // Others that look for room to stay see it as what is kept.
  stays ? running_bytes_ -= running.held_bytes() : running_bytes_ += running.held_bytes();
  running.stays = stays;
}

// Before the work: an extent's address is part of the checksum that the worker computes.
Status TileTasks::reserve_extents(Running& running) {
  Status status;
  if (running.writes_value()) {
    status = reserve(running.task, running.bytes.value_bytes, &running.value_extent);
  }
  if (status.is_ok() && running.writes_rest()) {
    status = reserve(running.task, running.bytes.rest_bytes, &running.rest_extent);
  }
  return status;
}

Status TileTasks::reserve(const TileTask& task, uint64_t length_bytes, ExtentRecord* extent) {
  if (extent->exists()) return Status::ok();
  JobSpace& space = parts_.space;
  const SpaceUse use = space_use_of(*task.entry);
  // Speculative values are made again later; for their sake nothing goes.
  const auto find_more = [&] { return task.keep == nullptr && reclaim_.extents(); };
  while (!space.has_room(use, length_bytes)) {
    if (find_more()) continue;
    return error(StatusCode::capacity,
                 "job ",
                 parts_.job_name,
                 " has used up its disk quota: a blob that is written again needs room beside its "
                 "old bytes until the next commit; delete it and commit before it is put again, "
                 "drop snapshots (memd snapshot list), or start it anew with a larger nvme_bytes: ",
                 length_bytes,
                 " bytes more are wanted than ",
                 space.taken_text(use),
                 "; nvme_bytes ",
                 space.quota_bytes())
        .about({"nvme_bytes", space.quota_bytes()});
  }
  auto allocated = parts_.extents.allocate(static_cast<uint32_t>(length_bytes));
  while (allocated.status().code() == StatusCode::capacity && find_more())
    allocated = parts_.extents.allocate(static_cast<uint32_t>(length_bytes));
  if (!allocated.is_ok()) return allocated.status();
  *extent = allocated.value();
  space.take(use, length_bytes);
  return Status::ok();
}

/// A tile's old extents go when its new ones are written: where several are replaced at once, those
/// that find no room wait for the others.
bool TileTasks::may_find_extents_later(const Running& running, const Status& status) const {
  return status.code() == StatusCode::capacity && !running.is_speculative() &&
         running_count_ > short_of_extents_.size() + 1;
}

void TileTasks::try_short_of_extents() {
  for (size_t count = short_of_extents_.size(); count > 0 && !short_of_extents_.empty(); --count) {
    const std::shared_ptr<Running> running = std::move(short_of_extents_.front());
    short_of_extents_.pop_front();
    work(running);
  }
}

/// The state that a worker publishes for a tile that stays; without an offset, none.
TileState TileTasks::state_in_memory(const Running& running) const {
  if (running.record && running.is_host()) {
    const uint64_t step = parts_.progress.committed_step();
    // The next daemon needs all of an entry in memory, or all on disk.
    const bool has_extents = !running.changes_state();
    return {.step = running.task.may_stay ? step + 1 : step,
            .private_offset_bytes = running.place->offset_bytes,
            .host_bytes = running.place->bytes,
            .value = has_extents ? running.value_source() : ExtentRecord{},
            .rest = has_extents ? running.rest_source() : ExtentRecord{}};
  }
  if (!running.record || (!running.stays && !running.bytes.begin_piece)) return {};
  return {.step = parts_.progress.committed_step() + 1,
          .private_offset_bytes = running.offset_bytes,
          .host_bytes = 0,
          .value = running.value_source(),
          .rest = running.rest_source()};
}

void TileTasks::work(const std::shared_ptr<Running>& running) {
  decide_whether_it_stays(*running);
  if (Status reserved = reserve_extents(*running); !reserved.is_ok()) {
    if (may_find_extents_later(*running, reserved)) return short_of_extents_.push_back(running);
    return finish(running, reserved);
  }
  MEMD_FAILPOINT("tile.extents_reserved");
  // In tier host, a task that only reads a tile in its place says nothing new.
  const bool says_more = running->changes_state() || running->old_place || !running->in_memory;
  if (running->is_host() ? says_more : running->task.may_stay) prepare_words(*running);
  parts_.workers.submit(
      {.job = JobId{parts_.job_id}, .bytes = running->held_bytes()},
      [this, running, state = state_in_memory(*running)] { run_on_worker(*running, state); },
      [this, running] {
        running->task.report->update_seconds += static_cast<double>(running->work_ns) * 1e-9;
        check(running);
      });
}

void TileTasks::run_on_worker(Running& running, const TileState& state) const {
  MEMD_FAILPOINT("tile.before_verify");
  const uint64_t start_ns = parts_.clock.now_ns();
  const TileTask& task = running.task;
  const bool disk = !running.in_memory;
  if (running.old_place) {
    const std::byte* const old = parts_.host_side().at(running.old_place->offset_bytes);
    const uint64_t old_bytes = running.old_place->bytes;
    copy_bytes(running.bytes.value, old, old_bytes);
    zero_bytes(running.bytes.value + old_bytes, running.place->bytes - old_bytes);
  }
  if (running.zeroes_value) zero_bytes(running.bytes.value, running.bytes.value_bytes);
  if (running.zeroes_rest) zero_bytes(running.bytes.rest, running.bytes.rest_bytes);
  if (running.value_from_arena && disk && task.reads_value) {
    // A trainer may write there at any time: copied first, then compared with what was written to
    // disk.
    copy_bytes(running.bytes.value, running.arena_source, running.bytes.value_bytes);
  }
  running.value_mismatch = disk && task.reads_value && running.value_source().exists() &&
                           !ExtentStore::matches(running.value_source(), running.value_span());
  running.rest_mismatch = disk && running.reads_rest() &&
                          !ExtentStore::matches(running.rest_source(), running.rest_on_disk());
  running.gradient_mismatch =
      running.gradient_copy != nullptr &&
      !ExtentStore::matches(running.gradient_source(), running.gradient_span());
  if (MEMD_PLANTED("tile.checksum_not_verified")) {
    running.value_mismatch = running.rest_mismatch = running.gradient_mismatch = false;
  }
  if (!running.has_mismatch()) {
    if (disk && running.reads_rest()) {
      const auto missing = running.rest_span().subspan(running.rest_on_disk().size());
      zero_bytes(missing.data(), missing.size());
    }
    MEMD_FAILPOINT("tile.before_update");
    if (running.guard && state.private_offset_bytes) guard(running, state);
    task.work(running.bytes);
    if (state.private_offset_bytes) {
      parts_.tiles.words()->publish(*running.record, state, parts_.ledger.base());
    }
    running.has_moved = running.is_host() && (running.old_place || disk);
    MEMD_FAILPOINT("tile.before_checksums");
    if (running.writes_value()) {
      running.value_extent.checksum =
          hash_extent(running.value_span(), running.value_extent.address);
    }
    if (running.writes_rest()) {
      running.rest_extent.checksum = hash_extent(running.rest_span(), running.rest_extent.address);
    }
  }
  running.work_ns = parts_.clock.now_ns() - start_ns;
}

/// From here on the next daemon finds the tile as it is now, whatever becomes of its place.
void TileTasks::guard(const Running& running, const TileState& state) const {
  std::byte* const into = parts_.host_side().at(running.guard->offset_bytes);
  copy_bytes(into, running.bytes.value, running.guard->bytes);
  TileState kept = state;
  kept.private_offset_bytes = running.guard->offset_bytes;
  kept.host_bytes = running.guard->bytes;
  parts_.tiles.words()->publish(*running.record, kept, parts_.ledger.base());
  MEMD_FAILPOINT("host.guarded");
}

void TileTasks::check(const std::shared_ptr<Running>& running) {
  if (!running->has_mismatch()) return write(running);
  TileTask& task = running->task;
  auto join = Join::start([this, running](const Status& status) {
    status.is_ok() ? work(running) : finish(running, status);
  });
  const auto read = [&](const Entry& entry,
                        const ExtentRecord& extent,
                        std::span<std::byte> into,
                        bool first_read) {
    std::string what = describe(*running, entry);
    Done done = [this, running, &entry, done = join->branch()](const Status& status) {
      // The step meets what is lost itself, and says so.
      const bool is_lost = status.code() == StatusCode::integrity && !running->is_speculative();
      if (is_lost) parts_.gate.lose(entry, running->task.index, status);
      done(status);
    };
    const JobId job{parts_.job_id};
    if (first_read) {
      return parts_.extents.read(extent, into, {.job = job}, std::move(what), std::move(done));
    }
    parts_.extents.count_checksum_failure(extent);
    parts_.extents.read_again(extent, into, {.job = job}, std::move(what), std::move(done));
  };
  if (running->value_mismatch) {
    // The arena's copy was scribbled on: what is on disk counts, and was not read yet.
    const bool first_read = std::exchange(running->value_from_arena, false);
    read(*task.entry, running->value_source(), running->value_span(), first_read);
  }
  if (running->rest_mismatch) {
    read(*task.entry, running->rest_source(), running->rest_on_disk(), false);
  }
  if (running->gradient_mismatch) {
    read(*task.gradient, running->gradient_source(), running->gradient_span(), false);
  }
  join->finish(Status::ok());
}

// ---- Writing and ending -------------------------------------------------------------------------

void TileTasks::write(const std::shared_ptr<Running>& running) {
  TileTask& task = running->task;
  MEMD_FAILPOINT("tile.before_write");
  const uint64_t start_ns = parts_.clock.now_ns();
  auto join = Join::start([this, running, start_ns](const Status& status) {
    MEMD_FAILPOINT("tile.written");
    running->task.report->write_seconds +=
        static_cast<double>(parts_.clock.now_ns() - start_ns) * 1e-9;
    finish(running, status);
  });
  const JobId job{parts_.job_id};
  if (running->writes_value()) {
    task.report->written_bytes += running->value_extent.length_bytes;
    parts_.extents.write(job, running->value_extent, running->value_span(), join->branch());
  }
  MEMD_FAILPOINT("tile.between_writes");
  if (running->writes_rest() && !MEMD_PLANTED("tile.rest_not_written")) {
    task.report->written_bytes += running->rest_extent.length_bytes;
    parts_.extents.write(job, running->rest_extent, running->rest_span(), join->branch());
  }
  join->finish(Status::ok());
}

/// For the next daemon.
void TileTasks::log(const Running& running) {
  const TileTask& task = running.task;
  const PrivateTiles& tiles = parts_.tiles;
  // A next daemon goes on with the place, whatever a snapshot names beside it.
  if (running.is_host()) return;
  if (tiles.words() == nullptr || task.entry->kind() != EntryKind::parameter) {
    // The rest first: written back again, the same parameter gives the same rest.
    if (running.writes_rest()) parts_.log.note_rest(*task.bucket, task.index);
    if (running.writes_value()) parts_.log.note_value(*task.entry, task.index);
    return;
  }
  if (!running.writes_value() && !running.writes_rest()) return;
  // One store says both. A tile that is only written out stays at its step.
  const bool was_dirty = task.bucket != nullptr && tiles.is_dirty(running.key());
  const auto record = was_dirty ? parts_.log.tile_record(running.key()) : std::nullopt;
  uint64_t step = parts_.progress.committed_step();
  if (task.may_stay) {
    ++step;
  } else if (record) {
    step = tiles.words()->step_of(*record);
  }
  parts_.log.note_tile(parts_.shards.bucket(task.entry->owner()),
                       task.index,
                       step,
                       task.may_stay ? std::nullopt : tiles.half_made_piece(running.key()));
}

void TileTasks::settle(const Running& running,
                       const Status& status,
                       const ExtentRecord& extent,
                       ReplicaPlace place) {
  const bool is_kept = status.is_ok() && running.is_speculative();
  if (!extent.exists() || is_kept) return;
  const TileTask& task = running.task;
  if (status.is_ok() && space_use_of(*task.entry) == SpaceUse::gradient) {
    parts_.space.replace_gradient(task.entry->replica_place(task.index), extent, parts_.extents);
  } else if (status.is_ok()) {
    parts_.space.replace(place, extent, parts_.extents);
  } else {
    parts_.space.give_back(space_use_of(*task.entry), extent.length_bytes);
    parts_.extents.release(extent);
  }
}

void TileTasks::settle_extents(const Running& running, const Status& status) {
  const TileTask& task = running.task;
  if (running.is_host() && running.changes_state() && status.is_ok()) {
    // Bytes that a snapshot wrote are the snapshot's alone from here on.
    const ReplicaPlace value = value_place(*task.bucket, task.index);
    const ReplicaPlace rest = rest_place(*task.bucket, task.index);
    if (value->exists()) parts_.space.release(value, parts_.extents);
    if (rest->exists()) parts_.space.release(rest, parts_.extents);
  }
  if (running.writes_value()) {
    settle(running,
           status,
           running.value_extent,
           task.entry->replica_place(task.index, running.is_host()));
  }
  if (running.writes_rest()) {
    settle(running, status, running.rest_extent, rest_place(*task.bucket, task.index));
  }
}

void TileTasks::settle_host_memory(const Running& running, const Status& status) {
  HostTiles& tiles = parts_.host_tiles;
  Arena& side = parts_.host_side();
  if (running.gradient_offset_bytes) parts_.private_side().free(*running.gradient_offset_bytes);
  if (running.guard) side.free(running.guard->offset_bytes);
  const bool is_new = running.old_place || !running.in_memory;
  const uint64_t key = running.key();
  // A write to disk that fails leaves the bytes whole in their new place.
  if (status.is_ok() || running.has_moved) {
    if (running.old_place) side.free(running.old_place->offset_bytes);
    tiles.put(key, *running.place);
    if (tiles.contains_all(*running.task.bucket)) running.task.entry->set_in_host_tiles();
  } else if (is_new) {
    side.free(running.place->offset_bytes);
  }
  tiles.end_task(key);
}

void TileTasks::settle_memory(const Running& running, const Status& status) {
  if (running.is_host()) return settle_host_memory(running, status);
  const TileTask& task = running.task;
  PrivateTiles& tiles = parts_.tiles;
  Arena& side = parts_.private_side();
  const bool keeps = status.is_ok() && has_room_to_stay(running);
  if (running.gradient_offset_bytes) side.free(*running.gradient_offset_bytes);
  const uint64_t key = running.key();
  if (task.bucket != nullptr && status.is_ok() && !running.is_speculative()) {
    if (running.stays) tiles.set_dirty(key);
    if (running.writes_value() && running.writes_rest()) tiles.set_clean(key);
  }
  const bool dirty = task.bucket != nullptr && tiles.is_dirty(key);
  if (running.is_speculative()) {
    std::optional<uint64_t> stays_at;
    // With commits in memory the room is for tiles that need not be written.
    if (keeps && !parts_.admission.durability().is_in_memory()) stays_at = running.offset_bytes;
    if (!stays_at) side.free(running.offset_bytes);
    if (!status.is_ok()) return;
    task.keep({.value = running.value_extent,
               .rest = running.rest_extent,
               .private_offset_bytes = stays_at});
  } else if (dirty || keeps) {
    // Two tasks may have read one clean tile.
    if (!dirty) tiles.drop(key, side);
    tiles.put(key, running.offset_bytes);
  } else {
    side.free(running.offset_bytes);
  }
}

void TileTasks::finish(const std::shared_ptr<Running>& running, const Status& status) {
  settle_extents(*running, status);
  if (running->scratch) parts_.tiles.words()->give_back_scratch(*running->scratch);
  // The next daemon knows nothing of speculative values.
  if (status.is_ok() && !running->is_speculative()) log(*running);
  settle_memory(*running, status);
  parts_.residencies.end_task(*running->task.entry);
  parts_.activities.end();
  --running_count_;
  if (running->is_host() || !running->stays) running_bytes_ -= running->private_bytes();
  MEMD_FAILPOINT("tile.recorded");
  try_short_of_extents();
  const Done done = std::move(running->task.done);
  done(status);
}

}  // namespace memd
