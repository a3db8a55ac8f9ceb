// Questions of leases to the layers above the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/status.h"
#include "store/cache/entry.h"
#include "store/cache/lease_request.h"
#include "store/cache/lease_waiters.h"

namespace memd {

/// For one job. Implemented by JobGates (store/job_gates.h), from the job's steps, its operations,
/// its updates ahead of a step and its private tiles. The server thread calls everything; nothing
/// blocks.
class LeaseGates {
 public:
  virtual ~LeaseGates() = default;

  // Steps and other operations.
  /// The reason for a lease of a parameter's value to wait: its update, or the commit of it.
  virtual std::optional<WaitsFor> step_before(const LeaseRequest& request,
                                              const Entry& entry) const = 0;
  /// A step, sync or the like runs: what its catalogue will name stays where it is.
  virtual bool is_operating() const = 0;
  /// No lease of a parameter's writer begins.
  virtual bool holds_writers() const = 0;

  // Updates ahead of a step.
  /// Somebody is to write the shard's value or gradient.
  virtual void discard_early(const Entry& entry, uint32_t shard_id) = 0;
  /// Somebody waits for the value as it is.
  virtual void pause_early(const Entry& value) = 0;
  /// The slot of a parameter's speculative value, if that may go.
  virtual const Slot* early_slot_to_spare(const Entry& entry) const = 0;
  virtual void free_early_slot(const Entry& value) = 0;

  // Tiles in private memory.
  /// Whether the bytes of the entry's replica `index` are in private memory, or move there with
  /// their next use: the disk may have none, or older ones.
  virtual bool is_tile_in_memory(const Entry& entry, size_t index) const = 0;
  /// Copies them to `into`.
  virtual void read_tile(Entry& entry, size_t index, std::byte* into, Done done) = 0;
  /// False where no tile of the bucket, or of all, is dirty; else they are being written, and
  /// whoever waits for them is told if that fails.
  virtual bool flush_tiles(std::optional<uint32_t> bucket) = 0;
  /// Clean ones, and those that were made for a step to come.
  virtual void drop_clean_tiles() = 0;
  /// A parameter's, of which none is dirty: its value is written anew.
  virtual void drop_cached_tiles(const Entry& value) = 0;
  /// Writes a dirty entry that nobody leases to new extents; it is draining meanwhile and clean
  /// afterwards.
  virtual void write_back(Entry& entry, Done done) = 0;
};

}  // namespace memd
