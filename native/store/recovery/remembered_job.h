// One job as the daemon before had it in memory, read and checked before anything is taken over.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/status.h"
#include "store/cache/sessions.h"
#include "store/format/catalogue.h"
#include "store/journal/job_ledger.h"
#include "store/journal/keepsakes.h"
#include "store/state/tile_words.h"

namespace memd {

/// The ledger and the tile words of one job, brought to what is true by now: closed steps that the
/// last commit has are made, gradients of the others are sealed, and a grant that nobody was told
/// of did not happen. Its descriptors are taken from the Inheritance. The ledger stays the caller's
/// until the job goes on with it. At start, on one thread; an error means that the job starts from
/// disk.
class RememberedJob {
 public:
  /// `disk`: what the catalogue with the tag `tag` says; both outlive this.
  RememberedJob(const JobRecord& disk, uint64_t tag, JobLedger& ledger)
      : disk_(disk), tag_(tag), ledger_(ledger) {}
  RememberedJob(const RememberedJob&) = delete;
  RememberedJob& operator=(const RememberedJob&) = delete;

  Status read(uint64_t segment_bytes, Inheritance& kept, Keepsakes& keepsakes);

  /// The job is restored from this record, with these ids of its shards.
  const JobRecord& record() const { return record_; }
  const std::vector<uint32_t>& shard_ids() const { return contents_.shard_ids; }
  const JobRecord& disk() const { return disk_; }
  JobLedger& ledger() const { return ledger_; }
  /// Its steps are those that have still to be made.
  const LedgerContents& contents() const { return contents_; }
  const std::vector<KeptTile>& tiles() const { return tiles_; }
  std::unique_ptr<TileWords> take_tile_words() { return std::move(tile_words_); }
  const Sessions::List& sessions() const { return sessions_; }
  /// The pin counter of the grant that nobody was told of.
  const std::optional<uint32_t>& untold_pin() const { return untold_pin_; }
  /// Places of closed steps that are made, which the ledger still holds.
  const std::vector<ClosedStep>& made_steps() const { return made_; }

 private:
  Status read_ledger(uint64_t segment_bytes);
  Status read_tile_words(Inheritance& kept);
  Status check_steps() const;
  /// The commit that the rest builds on: the last one in memory, or that on disk.
  const JobRecord& base() const { return in_memory_ ? *in_memory_ : disk_; }
  void sort_steps();
  Status take_sessions(Inheritance& kept, Keepsakes& keepsakes);
  const Session* find_session(uint64_t session_id) const;
  void undo_grant();
  void settle_gradients();
  bool are_there(const Contributors& contributors) const;
  void note_void(const Contributors& contributors);
  Status merge();

  const JobRecord& disk_;
  const uint64_t tag_;
  JobLedger& ledger_;
  LedgerContents contents_;
  std::optional<JobRecord> in_memory_;
  JobRecord record_;
  std::unique_ptr<TileWords> tile_words_;
  std::vector<KeptTile> tiles_;
  std::vector<ClosedStep> made_;
  Sessions::List sessions_;
  std::optional<uint32_t> untold_pin_;
};

}  // namespace memd
