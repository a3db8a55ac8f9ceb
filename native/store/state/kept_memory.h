// The memory of one job that outlives the daemon, and what the next one is told of it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "arena/segment.h"
#include "base/status.h"
#include "io/io_queue.h"
#include "store/cache/job_cache.h"
#include "store/cache/job_memory.h"
#include "store/cache/shards.h"
#include "store/format/durability.h"
#include "store/journal/job_ledger.h"
#include "store/journal/keepsakes.h"
#include "store/state/host_tiles.h"
#include "store/state/job_journal.h"
#include "store/state/private_tiles.h"

namespace memd {

/// Owns the job's segments and what lies in their host side, and opens and ends what belongs to
/// them: the ledger, whose facts JobJournal and others tell, and the tile words, which PrivateTiles
/// has. Where nobody keeps descriptors there is neither. The next daemon takes for the job's memory
/// what its kept ledger claims, so that a ledger is opened before a segment is taken and kept after
/// all are claimed. Owned by the Job; the ShardStore and an adoption call it on the server thread;
/// blocks no longer than the DescriptorKeeper does.
class KeptMemory {
 public:
  struct Parts {
    const uint64_t job_id;
    const Shards& shards;
    const Durability& durability;
    JobLedger& ledger;
    JobJournal& journal;
    PrivateTiles& tiles;
    JobCache& cache;
  };
  /// A dropped job leaves these; `memory` is nullptr where the job had none.
  struct Left {
    JobLedger ledger;
    std::unique_ptr<JobMemory> memory;
  };

  explicit KeptMemory(const Parts& parts) : parts_(parts) {}
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  /// Nothing before the first session attaches: an idle job holds disk only.
  const std::unique_ptr<JobMemory>& memory() const { return memory_; }
  /// Open while somebody keeps the memory's descriptors.
  JobLedger& ledger() { return parts_.ledger; }
  /// They lie in the memory's host side.
  HostTiles& host_tiles() { return host_tiles_; }
  /// Tells the memory what the arena would like to hold. A shard more costs no look at the others:
  /// blobs are declared one by one.
  void expect_shards();

  // Memory from the pool, in this order.
  /// A ledger that builds on the catalogue `tag`, if somebody keeps it.
  Status open_ledger(const Keepsakes& keepsakes, uint64_t segment_bytes, uint64_t tag);
  /// If it fails, the segments are where they were and the ledger is closed.
  Status give(std::vector<Segment>& segments, uint64_t segment_bytes, IoQueue& io);
  /// The ledger claims all segments by now.
  void keep(Keepsakes& keepsakes);

  /// Durability may have changed to one with commits in memory. Nothing happens without a ledger.
  Status open_tile_words();
  /// The same before parameters of tier host are declared.
  Status open_host_words();
  /// Before anything is said in them.
  void keep_tile_words(Keepsakes& keepsakes);

  /// Takes over the memory that the daemon before left.
  void adopt(std::unique_ptr<JobMemory> memory) { memory_ = std::move(memory); }
  /// The memory and the table of a job whose place this one takes; nothing of it is in use. Its
  /// descriptors are kept anew, with a ledger of this job's. If that cannot be opened, nothing is
  /// kept.
  Status take_over(KeptMemory& before, Keepsakes& keepsakes, uint64_t segment_bytes, uint64_t tag);

  /// Frees every slot and every tile of a job that nobody uses any more.
  void free_all();
  /// The daemon ends: the ledger stays with its keeper, and is told of nothing from here on.
  void end();
  /// The job is dropped.
  Left take();

 private:
  const Parts parts_;
  std::unique_ptr<JobMemory> memory_;
  HostTiles host_tiles_;
};

}  // namespace memd
