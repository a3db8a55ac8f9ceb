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
  /// These were declared, parameters in buckets from `bucket_begin` on. This and the next four cost
  /// what has changed. Now and then one of them tells all that the job is by then: a call after it
  /// must bear to be told again.
  void note_added(const std::vector<uint32_t>& shard_ids, size_t bucket_begin);
  void note_removed(uint32_t shard_id);
  /// Their optimizer state has a maximum by now, or has none.
  void note_maxima(const std::vector<uint32_t>& shard_ids);
  /// Their tiles have a place for maxima.
  void note_places_of_maxima(const std::vector<uint32_t>& buckets);
  /// A catalogue would say something else of the job itself.
  void note_terms();
  /// All of it, where the ledger is new, or was adopted and the job stands as it will go on.
  void note_shards();

  // Extents.
  /// During an update too, whatever becomes of it: the entry ends.
  void forget_extents(const Entry& entry);

 private:
  /// Which shards there are, and the job itself as a catalogue describes it.
  void note_layout();
  void change_layout(LayoutChange change);
  void change_facts(const LayoutFacts& facts);

  const Parts parts_;
};

}  // namespace memd
