// The parts that the server thread works with, and how they start.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "arena/pool.h"
#include "base/clock.h"
#include "base/descriptor_keeper.h"
#include "base/owned_fd.h"
#include "base/status.h"
#include "base/turn_budget.h"
#include "base/turn_circle.h"
#include "base/turn_phases.h"
#include "base/workers.h"
#include "io/io_queue.h"
#include "store/shard_store.h"
#include "store/space/extent_store.h"

namespace memd {

struct ServerOptions {
  std::vector<std::string> directories;
  uint64_t nvme_bytes = 0;
  uint64_t host_bytes = 0;
  bool lock_required = true;
  bool huge_pages = true;
  IoEngine io_engine = IoEngine::automatic;
  std::vector<IoPathLimits> path_limits;  // one for each of `directories`; none: those of a path
  uint32_t update_thread_count = 0;       // 0: one for each core
  uint32_t jobs_expected = 2;  // a job that names no quota gets this part of what is free
  std::function<void(uint64_t, uint64_t)> progress;  // of formatting, in bytes
  /// Keeps what must outlive this process; without one nothing does.
  std::shared_ptr<DescriptorKeeper> keeper;
  std::function<Result<IoQueueChoice>(const IoQueueOptions&)> make_queue = make_io_queue;
};

struct StartReport {
  PoolReport pool;
  std::string io_engine;
  std::string io_engine_reason;
  std::vector<std::string> volume_paths;
  std::vector<uint64_t> volume_bytes;
  bool formatted = false;
  double format_seconds = 0;
  uint32_t job_count = 0;
  std::string kept_note;  // why what an earlier daemon left was not used; empty where it was
  std::vector<std::string> load_notes;  // as ShardStore::load_notes()
};

/// Owns the pool, the I/O queue, the volumes, the workers and the store over them. Used by
/// the thread that starts it, then by the server thread alone. The I/O queue and the workers wake
/// the thread by wake_fd(). Destroyed only while nothing is in flight; otherwise see abandon().
class Engine {
 public:
  /// Opens the volumes, makes the pool and loads the jobs. `kept` is what the daemon before left
  /// with the keeper.
  static Result<std::unique_ptr<Engine>> start(const ServerOptions& options, KeptDescriptors kept);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const StartReport& report() const { return report_; }
  int wake_fd() const { return wake_.get(); }
  const Clock& clock() const { return clock_; }
  ShardStore& store() { return *store_; }
  /// The oldest operations that no device has finished, for an error.
  std::string describe_in_flight() const;

  /// Without bound until the server thread begins its first turn.
  TurnBudget& turn() { return turn_; }
  /// Takes what the devices and the workers have done, lets the store go on, and gives the devices
  /// what it submitted; or as much of that as the turn has time for. True where something
  /// happened, or there was no time for all of it.
  bool advance(TurnPhases& phases);
  /// Neither a device nor a worker uses the jobs' memory.
  bool is_idle() const;
  /// Wakes the thread that sleeps on wake_fd(). Any thread.
  void wake() const;
  /// Keeps all of it until the process ends: a device may read and write this memory at any time,
  /// and its engine's threads wake us.
  static void abandon(std::unique_ptr<Engine> engine);

 private:
  Engine() = default;
  Status prepare(const ServerOptions& options, KeptDescriptors kept);
  /// While load() waits: until something is done, or a tenth of a second. An error where a device
  /// does not answer.
  Status turn_of_start();
  bool take_completions(TurnPhases& phases);
  bool take_finished_work(TurnPhases& phases);
  bool advance_store(TurnPhases& phases);
  bool give_to_devices(TurnPhases& phases);
  void keep_to_one_volume_set(const std::array<uint8_t, 16>& uuid, KeptDescriptors& kept);

  using TurnPart = bool (Engine::*)(TurnPhases&);
  static constexpr std::array<TurnPart, 4> kParts{&Engine::take_completions,
                                                  &Engine::take_finished_work,
                                                  &Engine::advance_store,
                                                  &Engine::give_to_devices};

  SteadyClock clock_;
  TurnBudget turn_{clock_};
  TurnCircle circle_;
  StartReport report_;
  std::shared_ptr<DescriptorKeeper> keeper_;
  OwnedFd wake_;
  // Destroyed in reverse: the store before what it uses.
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<IoQueue> io_;
  std::unique_ptr<Workers> workers_;
  std::unique_ptr<ExtentStore> extents_;
  std::unique_ptr<ShardStore> store_;
};

}  // namespace memd
