// Facts that the next daemon needs to go on with a job whose memory outlived this one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/shared_memory.h"
#include "store/format/catalogue.h"
#include "store/journal/job_layout.h"
#include "store/journal/ledger_contents.h"
#include "store/journal/loose_extents.h"
#include "store/journal/shard_states.h"

namespace memd {

struct LedgerLayout;

/// One memfd a job, `ledger.<job id>`, mapped by daemons only. Each fact is written down at the
/// moment it becomes true, so that a kill between any two instructions leaves what a reader can
/// use: words change with one release store, records of any length have two places that take turns,
/// each with a sequence number and a checksum. The only other observer is the next daemon, after
/// this one is dead. Owned by its Job; the server thread writes; nothing blocks.
class Ledger {
 public:
  static Result<std::unique_ptr<Ledger>> create(uint64_t job_id, uint64_t segment_bytes);
  /// Takes what another daemon left. Refused: another version, another job.
  static Result<std::unique_ptr<Ledger>> adopt(OwnedFd fd, uint64_t job_id);

  int fd() const { return memory_.fd(); }

  /// The memory is dropped, or what a commit left on disk is not known: no daemon goes on with it.
  void give_up();
  bool is_given_up() const;

  /// There are TileWords beside it from here on, and without them it says too little.
  void note_tile_words();
  bool has_tile_words() const;

  /// Written before a segment is used, and taken away after it was destroyed.
  Status claim(uint64_t segment_id, Side side, uint32_t index);
  Result<std::vector<SegmentClaim>> claims() const;

  /// Which shards the job has, by their ids; `record` has no extents.
  Status write_layout(const JobRecord& record, const std::vector<uint32_t>& shard_ids);
  /// Appends a change, at the cost of the change. False: write_layout() has to be called with all
  /// of it, which happens now and then.
  bool change_layout(const LayoutChange& change);
  bool change_facts(const LayoutFacts& facts);
  void note_shard(uint32_t shard_id, bool written, Contributors contributors) {
    shards_.note(shard_id, written, contributors);
  }
  void note_generation(uint32_t shard_id, uint64_t generation) {
    shards_.note_generation(shard_id, generation);
  }
  /// The shard with this id is gone, or a new one has it.
  void reset_shard(uint32_t shard_id) { shards_.reset(shard_id); }
  /// From `from` on, the first id that no shard ever had. All that shards have now are below
  /// `from`.
  uint32_t given_ids_end(uint32_t from) const { return shards_.given_ids_end(from); }

  void note_slot(const SlotRecord& slot);

  /// Extents that only memory knows; `extent` that does not exist: none any more.
  void note_loose(const LooseKey& key, const ExtentRecord& extent);
  /// A commit, on disk or in memory, describes the job as it is now; of shards that come and go
  /// from here on it says nothing. It ends with rebase() or publish_record(), or nothing comes of
  /// it.
  void begin_commit() { shards_.begin_commit(); }
  /// A commit is durable: the catalogue `tag` names what was loose, gradients excepted.
  void rebase(uint64_t tag);
  /// See LooseExtents::empty_old().
  bool empty_old_places(size_t count_max) { return loose_.empty_old(count_max); }
  uint64_t base() const { return shards_.base(); }

  Status note_session(const SessionRecord& session);
  void forget_session(uint64_t session_id);
  void note_seat(size_t seat, const SeatRecord& record);

  void begin_grant(const GrantRecord& grant);
  void end_grant();

  /// Returns the step's place; refused where too many steps wait.
  Result<size_t> close_step(const StepRequest& request);
  void note_committing(size_t place, uint64_t number);
  void forget_step(size_t place);

  /// The job as of a commit in memory, where it is newer than the catalogue on disk. The record
  /// before it stays valid until this one is published. Room for its `bytes`, which any thread may
  /// write.
  Result<std::span<std::byte>> open_record(size_t bytes);
  /// It is there. `base` says on which catalogue it builds: Commits::catalogue_tag() of the job.
  void publish_record(size_t bytes, uint64_t checksum, uint64_t base);
  /// The last one that was written in full, if it builds on `base`. An error where it cannot be
  /// understood: what is on disk is older than what else the ledger says.
  Result<std::optional<JobRecord>> read_record(uint64_t base) const;

  /// Everything, checked: sizes, bounds, numbers that are no value of their type. Where bytes
  /// overlap is found when they are taken. From now on this daemon writes; `base` is the tag of the
  /// catalogue on disk.
  Result<LedgerContents> read(uint64_t base);

  /// Bytes of the layouts, their changes, commits and closed steps that this daemon wrote, without
  /// facts of one word each.
  uint64_t record_bytes_written() const { return record_bytes_written_; }

 private:
  explicit Ledger(SharedMemory memory);
  /// `bytes`: a change of the layout that this daemon wrote last.
  bool append_to_layout(std::span<const std::byte> bytes);
  Status read_layout(LedgerContents& contents);
  Status read_slots(LedgerContents& contents) const;
  Status read_steps(LedgerContents& contents);

  SharedMemory memory_;
  LedgerLayout* layout_;
  ShardStates shards_;
  uint64_t record_bytes_written_ = 0;
  std::optional<size_t> layout_at_;  // the place of the layout that this daemon wrote last
  uint64_t sequence_next_ = 1;       // of slots, loose extents and steps
  LooseExtents loose_;
  std::unordered_map<uint64_t, uint32_t> claim_of_;
  std::unordered_map<uint64_t, uint32_t> session_place_of_;
};

}  // namespace memd
