// Questions of a job's leases to its steps, operations and private state.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "store/cache/lease_gates.h"
#include "store/job/job.h"

namespace memd {

/// Owned by its Job, on the server thread.
class JobGates final : public LeaseGates {
 public:
  /// The ShardStore's part in a job.
  struct Calls {
    std::function<void(std::optional<uint32_t> bucket)> ask_for_flush;
  };

  JobGates(Job& job, Calls calls) : job_(job), calls_(std::move(calls)) {}

  std::optional<WaitsFor> step_before(const LeaseRequest& request,
                                      const Entry& entry) const override {
    return job_.steps().before(request, entry);
  }
  bool is_operating() const override { return job_.operations().is_running(); }
  bool holds_writers() const override { return job_.operations().holds_writers(); }

  void discard_early(const Entry& entry, uint32_t shard_id) override;
  void pause_early(const Entry& value) override { early().pause(value); }
  const Slot* early_slot_to_spare(const Entry& entry) const override {
    return early().slot_to_spare(entry);
  }
  void free_early_slot(const Entry& value) override { early().free_slot(value); }

  bool is_tile_in_memory(const Entry& entry, size_t index) const override;
  void read_tile(Entry& entry, size_t index, std::byte* into, Done done) override;
  bool flush_tiles(std::optional<uint32_t> bucket) override;
  void drop_clean_tiles() override { job_.state().drop_clean_tiles(); }
  void drop_cached_tiles(const Entry& value) override;
  void write_back(Entry& entry, Done done) override {
    job_.state().writeback().write_back(entry, std::make_shared<StepReport>(), std::move(done));
  }

 private:
  EarlyUpdates& early() const { return job_.state().early(); }

  Job& job_;
  const Calls calls_;
};

}  // namespace memd
