// A job's notes in its ledger, if there is one: shards, layout, extents and tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "store/cache/entry.h"
#include "store/cache/shards.h"
#include "store/format/catalogue.h"
#include "store/journal/job_ledger.h"
#include "store/state/job_recorder.h"

namespace memd {

/// Tells the job's ledger what takes the job's records to say; nothing where there is none. Slots
/// are told by Slots, segments by JobMemory, sessions by Sessions, extents and tiles by ExtentLog,
/// commits by those who make them. Owned by the Job; the server thread calls everything; nothing
/// blocks.
class JobJournal {
 public:
  struct Parts {
    uint64_t job_id;
    const std::string& job_name;
    const JobRecorder& recorder;
    const Shards& shards;
    JobLedger& ledger;
  };

  explicit JobJournal(const Parts& parts) : parts_(parts) {}
  JobJournal(const JobJournal&) = delete;
  JobJournal& operator=(const JobJournal&) = delete;

  // Shards.
  /// "written", and the contributors to its gradient.
  void note_shard(uint32_t shard_id);
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

 private:
  void change_layout(LayoutChange change);

  const Parts parts_;
};

}  // namespace memd
