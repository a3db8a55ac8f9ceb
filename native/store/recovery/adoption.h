// A job takes over the memory that outlived the daemon before.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arena/pool.h"
#include "base/status.h"
#include "io/io_queue.h"
#include "store/cache/attached_sessions.h"
#include "store/cache/gradient_buckets.h"
#include "store/cache/job_memory.h"
#include "store/cache/residencies.h"
#include "store/cache/sessions.h"
#include "store/cache/shard_table.h"
#include "store/cache/shards.h"
#include "store/cache/slots.h"
#include "store/cache/training_group.h"
#include "store/format/durability.h"
#include "store/journal/job_ledger.h"
#include "store/journal/keepsakes.h"
#include "store/journal/progress.h"
#include "store/recovery/remembered_job.h"
#include "store/space/extent_store.h"
#include "store/space/job_space.h"
#include "store/state/durable_state.h"
#include "store/state/host_tiles.h"
#include "store/state/job_journal.h"
#include "store/state/kept_memory.h"
#include "store/state/private_tiles.h"

namespace memd {

/// Owners that all jobs share.
struct AdoptionParts {
  Pool& pool;
  IoQueue& io;
  ExtentStore& extents;
  Keepsakes& keepsakes;
  Sessions& sessions;
};

/// The job that was restored from RememberedJob::record(), by its owners.
struct AdoptedJob {
  Shards& shards;
  JobProgress& progress;
  DurableState& durable;
  JobLedger& ledger;
  JobJournal& journal;
  ShardTable& table;
  Slots& slots;
  Residencies& residencies;
  JobSpace& space;
  PrivateTiles& tiles;
  HostTiles& host_tiles;
  KeptMemory& kept;
  AttachedSessions& sessions;
  TrainingGroup& group;
  GradientBuckets& gradient_buckets;
  const Durability& durability;
  /// Whether the buffers that a closed step names can be exchanged.
  std::function<Status(const StepRequest&)> check_staged;
};

/// One adoption of one job, at start. All that memory claims is checked against what is there:
/// bytes that lie in two places, or outside of their memory or volume, end it. If it fails,
/// nothing is taken, and the job is thrown away. One thread; nothing blocks.
class Adoption {
 public:
  Adoption(const AdoptionParts& parts, RememberedJob& remembered, const AdoptedJob& job)
      : parts_(parts), remembered_(remembered), job_(job) {}
  Adoption(const Adoption&) = delete;
  Adoption& operator=(const Adoption&) = delete;

  /// RememberedJob's ledger becomes the job's where all goes well.
  Status run(Inheritance& kept);

 private:
  void begin_shards();
  Status take_table(Inheritance& kept);
  Status take_segments();
  Status take_state();

  Status take_slots();
  Status take_slot(const SlotRecord& record);
  void place_slot(const SlotRecord& record, Entry* entry, std::unique_ptr<Slot> slot);
  bool may_be_pending(const SlotRecord& record, const Entry& entry) const;
  bool may_be_current(const SlotRecord& record, const Entry& entry) const;
  Entry* find_entry(const SlotRecord& record) const;
  bool fits(const SlotRecord& record, const Entry& entry) const;
  bool has_gradient(const Bucket& bucket) const;

  struct Place {
    std::optional<ReplicaPlace> replica;  // none: of a shard or a gradient that was dropped
    uint32_t length_bytes = 0;
    uint32_t length_bytes_narrow =
        0;  // as well: of a rest extent from before its bucket kept maxima

    bool may_be(uint32_t bytes) const {
      return bytes == length_bytes || bytes == length_bytes_narrow;
    }
  };
  Status place_loose_extents();
  Place find_place(const LooseKey& key);
  Entry* find_loose_entry(const LooseKey& key);
  Status place_tile_extents();
  Status reserve_extents();

  Status take_tiles();
  Status check_tile(const KeptTile& tile) const;
  Status take_private_tile(const KeptTile& tile);
  Status take_host_tile(const KeptTile& tile);
  void restore_piece(const KeptTile& tile, std::byte* value) const;
  bool is_made(uint32_t bucket) const;
  Status check_steps_can_be_made() const;
  /// After an error.
  void give_back();

  void settle_values();
  void tell_ledger();
  void note_freed_slots();

  const AdoptionParts parts_;
  RememberedJob& remembered_;
  const AdoptedJob job_;
  /// By entry, the sequence of its newest current slot.
  std::map<const Entry*, uint64_t> newest_;
  /// Extents that it reserved, since no catalogue names them.
  std::vector<ExtentRecord> reserved_;
};

}  // namespace memd
