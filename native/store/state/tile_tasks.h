// Reads part of an entry into private memory, works on it, writes it to new extents: the path of
// updates, writebacks and spills.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/turn_budget.h"
#include "store/state/state_parts.h"
#include "store/state/tile_task.h"
#include "store/state/tile_words.h"

namespace memd {

/// One job's tile tasks. Owned by its PrivateState; the server thread calls everything; nothing
/// blocks. Tasks start in order, as many at once as the job's private memory holds (at most
/// kTilesInFlight); a task takes all its memory at once, so that none waits for another while it
/// holds some.
///
/// A task waits for memory, then reads, waits for extents and a worker, works, and writes. It reads
/// again what does not match its checksum.
class TileTasks {
 public:
  /// Gives up speculative values where a task finds no room. False: there are none.
  struct Reclaim {
    std::function<bool()> memory;
    std::function<bool()> extents;
  };

  TileTasks(const StateParts& parts, Reclaim reclaim)
      : parts_(parts), reclaim_(std::move(reclaim)) {}

  void submit(TileTask task);
  /// Before those that were submitted and did not start.
  void submit_first(TileTask task);
  /// Writes a tile whose newest bytes are in memory alone; it is clean afterwards.
  void submit_flush(uint64_t key, const std::shared_ptr<StepReport>& report, Done done);
  /// Starts what can start, and what `turn` has time for. True where something did.
  bool advance(TurnBudget& turn);
  /// Bytes that stay in the private side: all that no task works in.
  uint64_t kept_bytes() const;

 private:
  struct Running;

  void begin(TileTask& task) const;
  TileTask flush_task(uint64_t key);
  void make_room();
  void fail_waiting(const Status& why);
  bool has_room_to_stay(const Running& running) const;
  bool try_start(TileTask& task);
  void set_sizes(Running& running, const TileTask& task) const;
  bool take_memory(Running& running, const TileTask& task);
  bool take_cached(Running& running, const TileTask& task);
  bool take_host(Running& running, const TileTask& task);
  bool take_host_places(Running& running, const TileTask& task);
  void set_places(Running& running, const TileTask& task);
  std::optional<uint64_t> allocate_private(uint64_t bytes);
  /// Names the shard, for an error.
  std::string describe(const Running& running, const Entry& entry) const;
  void load(const std::shared_ptr<Running>& running);
  void work(const std::shared_ptr<Running>& running);
  void decide_whether_it_stays(Running& running);
  Status reserve_extents(Running& running);
  Status reserve(const TileTask& task, uint64_t length_bytes, ExtentRecord* extent);
  bool may_find_extents_later(const Running& running, const Status& status) const;
  void try_short_of_extents();
  void prepare_words(Running& running);
  void prepare_pieces(Running& running);
  void guard(const Running& running, const TileState& state) const;
  void settle_host_memory(const Running& running, const Status& status);
  TileState state_in_memory(const Running& running) const;
  void run_on_worker(Running& running, const TileState& state) const;
  void check(const std::shared_ptr<Running>& running);
  void write(const std::shared_ptr<Running>& running);
  void log(const Running& running);
  void finish(const std::shared_ptr<Running>& running, const Status& status);
  void settle_extents(const Running& running, const Status& status);
  void settle(const Running& running,
              const Status& status,
              const ExtentRecord& extent,
              ReplicaPlace place);
  void settle_memory(const Running& running, const Status& status);

  const StateParts parts_;
  const Reclaim reclaim_;
  std::deque<TileTask> waiting_;
  std::deque<std::shared_ptr<Running>> short_of_extents_;  // of those that run
  uint32_t running_count_ = 0;
  uint64_t running_bytes_ = 0;  // of the private side, without tiles that are to stay
};

}  // namespace memd
