// A job's notes in its ledger, if there is one: shards, layout, extents and tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "store/cache/entry.h"
#include "store/cache/shards.h"
#include "store/format/catalogue.h"
#include "store/journal/ledger.h"
#include "store/state/job_recorder.h"
#include "store/state/private_tiles.h"

namespace memd {

/// Owns the job's ledger: nothing where nobody keeps descriptors, or before the job has memory, and
/// then nothing is told. Slots are told by Slots, segments by JobMemory, sessions by Sessions,
/// extents and tiles by ExtentLog. Owned by the Job; the server thread calls everything; nothing
/// blocks.
class JobJournal {
 public:
  struct Parts {
    uint64_t job_id;
    const std::string& job_name;
    const JobRecorder& recorder;
    const Shards& shards;
    const PrivateTiles& tiles;
  };

  explicit JobJournal(const Parts& parts) : parts_(parts) {}
  JobJournal(const JobJournal&) = delete;
  JobJournal& operator=(const JobJournal&) = delete;

  const std::unique_ptr<Ledger>& ledger() const { return ledger_; }
  bool is_open() const { return ledger_ != nullptr; }
  void open(std::unique_ptr<Ledger> ledger) { ledger_ = std::move(ledger); }
  void close() { ledger_.reset(); }
  std::unique_ptr<Ledger> take() { return std::move(ledger_); }
  /// No daemon goes on with what is in memory.
  void give_up();

  /// There are tile words beside the ledger from here on.
  void note_tile_words();

  // Shards.
  /// The shard with this id is gone, or a new one has it: from here on it has no bytes.
  void reset_shard(uint32_t shard_id);
  /// "written", and the contributors to its gradient.
  void note_shard(uint32_t shard_id);
  void note_generation(uint32_t shard_id, uint64_t generation);
  /// Which shards there are, and what a catalogue says of the job itself.
  void note_layout();
  /// The same, where these shards were declared, parameters in buckets from `bucket_begin` on; at
  /// their cost.
  void note_added(const std::vector<uint32_t>& shard_ids, size_t bucket_begin);
  void note_removed(uint32_t shard_id);
  /// All of it, where the ledger is new, or was adopted and the job stands as it will go on.
  void note_shards();

  // Extents.
  /// During an update too, whatever becomes of it: the entry ends.
  void forget_extents(const Entry& entry);

  // Commits.
  /// One, on disk or in memory, describes the job as it is now.
  void begin_commit();
  /// Forgets extents that the last commit on disk made old, `count_max` at most; true where none is
  /// left. The next one is on disk only after that.
  bool forget_old_extents(size_t count_max);
  /// One on disk: the catalogue `tag` names what was told of extents.
  void committed_on_disk(uint64_t tag);

 private:
  void change_layout(LayoutChange change);

  const Parts parts_;
  std::unique_ptr<Ledger> ledger_;
};

}  // namespace memd
