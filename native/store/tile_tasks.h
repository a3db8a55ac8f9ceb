// Reads part of an entry into private memory, works on it, writes it to new extents: the path of
// updates, writebacks and spills.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "store/job.h"
#include "store/space/extent_store.h"
#include "store/state/workers.h"

namespace memd {

/// What a task's work sees, in memory that only the daemon maps, `arena_value` and an unspilled
/// gradient excepted.
struct TileBytes {
  std::byte* value = nullptr;
  std::byte* rest = nullptr;
  const std::byte* gradient = nullptr;
  std::byte* arena_value =
      nullptr;               // where the value is published, or comes from; nullptr: nowhere
  uint64_t value_bytes = 0;  // whole blocks
  uint64_t rest_bytes = 0;
  uint64_t elements = 0;  // of a bucket's tile

  /// Those before it are updated already.
  uint64_t element_first = 0;
  /// Nothing, or to be called before each piece is changed, by its number; in their order.
  std::function<void(uint64_t piece)> begin_piece;
};

/// Replica `index` of `entry`, and with `bucket` the tile's rest. The bytes that the entry has in
/// the arena are used by `work` alone.
struct TileTask {
  Job* job = nullptr;
  Entry* entry = nullptr;
  size_t index = 0;
  Bucket* bucket = nullptr;

  bool reads_value = false;
  /// The arena's copy may serve instead of a read, after it was copied and its checksum matched.
  bool value_in_arena = false;
  bool writes_value = false;
  bool reads_rest = false;  // zeros where there is none
  bool writes_rest = false;
  /// Where there is room the tile stays in memory, dirty, and is not written.
  bool may_stay = false;
  const Entry* gradient = nullptr;
  /// Of a step that is not closed: takes what was written, and what stays of it in memory; replicas
  /// and the arena's copy stay those of N, and nothing is noted. Without an error, before `done`.
  std::function<void(const EarlyTile&)> keep;
  const Slot* shadow = nullptr;  // where the value is published then, if anywhere
  /// As `value_in_arena`, in the shadow until `work` replaces it.
  bool value_in_shadow = false;

  /// Nothing, or called before the task's memory is looked for: the entry may get a slot then.
  std::function<void()> starting;
  /// On an update worker.
  std::function<void(const TileBytes&)> work;
  std::shared_ptr<StepReport> report;
  /// On the server thread; new extents are in place, not yet committed.
  Done done;
};

/// Tasks of one job that wait, and what those that run hold. Owned by its Job; TileTasks alone uses
/// it.
class TileQueue {
 private:
  friend class TileTasks;

  std::deque<TileTask> waiting_;
  uint32_t running_count_ = 0;
  uint64_t running_bytes_ = 0;  // of the private side, without tiles that are to stay
};

/// Owned by the ShardStore. Tasks of one job start in order, as many at once as its private memory
/// holds (at most kTilesInFlight); a task takes all its memory at once, so that none waits for
/// another while it holds some.
class TileTasks {
 public:
  /// `free_extents` makes room on disk where a task finds none, and says whether there is more.
  TileTasks(ExtentStore& extents,
            UpdateWorkers& workers,
            const Clock& clock,
            std::function<bool(Job&)> free_extents)
      : extents_(extents),
        workers_(workers),
        clock_(clock),
        free_extents_(std::move(free_extents)) {}

  void submit(TileTask task);
  /// Before those that were submitted and did not start.
  void submit_first(TileTask task);
  /// Writes a tile whose newest bytes are in memory alone; it is clean afterwards.
  void submit_flush(Job& job, uint64_t key, const std::shared_ptr<StepReport>& report, Done done);
  /// Starts what can start of the job.
  void advance(Job& job);
  /// Of the job's private side, what no task works in: what stays.
  uint64_t kept_bytes(Job& job) const;

 private:
  struct Running;

  static TileQueue& queue_of(Job& job);
  static TileTask flush_task(Job& job, uint64_t key);
  void make_room(Job& job);
  bool has_room_to_stay(const Running& running);
  bool try_start(TileTask& task);
  std::optional<uint64_t> allocate_private(Job& job, uint64_t bytes);
  /// Names the shard, for an error.
  static std::string describe(const Running& running, const Entry& entry);
  void load(const std::shared_ptr<Running>& running);
  void work(const std::shared_ptr<Running>& running);
  static void prepare_words(const std::shared_ptr<Running>& running);
  void check(const std::shared_ptr<Running>& running);
  void write(const std::shared_ptr<Running>& running);
  static void tell_ledger(const Running& running);
  void finish(const std::shared_ptr<Running>& running, const Status& status);

  ExtentStore& extents_;
  UpdateWorkers& workers_;
  const Clock& clock_;
  std::function<bool(Job&)> free_extents_;
};

}  // namespace memd
