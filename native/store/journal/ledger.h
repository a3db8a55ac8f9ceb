// Facts that the next daemon needs to go on with a job whose memory outlived this one.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/owned_fd.h"
#include "base/status.h"
#include "ring/layout.h"
#include "ring/shared_memory.h"
#include "store/format/catalogue.h"
#include "store/journal/contributors.h"
#include "store/journal/residency.h"
#include "store/journal/step_request.h"

namespace memd {

struct LedgerLayout;

/// The process that a session belongs to. A pid alone comes back; with its start time it does not.
struct SessionOwner {
  uint32_t pid = 0;
  uint64_t start_time = 0;  // clock ticks since boot, field 22 of /proc/<pid>/stat
  uint32_t uid = 0;

  bool operator==(const SessionOwner&) const = default;
};

enum class Side : uint8_t { unassigned = 0, arena = 1, private_side = 2 };

/// `index` is the segment's place in its side.
struct SegmentClaim {
  uint64_t id = 0;
  Side side = Side::unassigned;
  uint32_t index = 0;
};

struct SessionRecord {
  uint64_t session_id = 0;
  SessionOwner owner;
  uint64_t step_committed = 0;
};

/// Members of a job's training group have a seat each; Contributors name them by it.
inline constexpr size_t kTrainingGroupMax = 62;
struct SeatRecord {
  uint64_t session_id = 0;  // 0: the seat is free
  /// A gradient that it had added to was dropped, and its session has not heard of that.
  bool has_notice = false;
};
using TrainingGroupSeats = std::array<SeatRecord, kTrainingGroupMax>;

/// made: nobody's yet. current, pending: its entry's. retired: replaced while leases were on it.
enum class SlotRole : uint8_t { none = 0, made = 1, current = 2, pending = 3, retired = 4 };

struct SlotRecord {
  SlotRole role = SlotRole::none;
  Residency residency = Residency::absent;  // of a current slot
  EntryKind kind = EntryKind::bytes;
  bool has_service_writer = false;  // a stream of the daemon's own writes there
  uint32_t owner = 0;               // Entry::kept_owner
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
  uint32_t pin_first = 0;
  uint32_t pin_count = 0;  // also of a free slot: a run of counters that can be used again
  uint64_t pending_session = 0;
  uint64_t sequence = 0;  // of two current slots of an entry the higher one is meant
};

/// A place of bytes that no catalogue on disk names.
struct LooseKey {
  enum class Kind : uint8_t { value = 1, rest = 2, gradient = 3, bytes = 4 };
  Kind kind = Kind::value;
  uint32_t owner = 0;  // bucket, or shard id of bytes
  uint32_t index = 0;  // of the replica

  auto operator<=>(const LooseKey&) const = default;
};

/// Shards of a job that came or went, none of them a parameter. An id can be in both.
struct LayoutChange {
  std::vector<uint32_t> removed;
  JobRecord added;  // of them only, without any extent, generation or "written"
  std::vector<uint32_t> added_ids;
};

struct ShardState {
  bool written = false;
  Contributors contributors;
  /// Set if moments were replaced since the last commit, on disk or in memory; else that says it.
  std::optional<uint64_t> generation;
  /// It came after the last commit: what that names is another shard's, which had its name.
  bool is_new = false;

  bool operator==(const ShardState&) const = default;
};

struct ClosedStep {
  size_t place = 0;
  uint64_t sequence = 0;
  uint64_t number = 0;  // that its commit makes it; 0: no commit was begun
  StepRequest request;
};

/// A grant that is being counted and told.
struct GrantRecord {
  uint64_t session_id = 0;
  uint32_t shard_id = 0;
  uint32_t pin_index = 0;
  uint32_t completion_tail = 0;  // of the session's ring before it
  Part part = Part::value;
  bool was_written = false;
  Contributors contributors;  // before it
};

/// All that a ledger says, each thing valid in itself.
struct LedgerContents {
  uint64_t segment_bytes = 0;
  JobRecord layout;                 // without any extent, generation or "written"
  std::vector<uint32_t> shard_ids;  // of layout.shards
  std::map<uint32_t, ShardState> shards;
  std::vector<SlotRecord> slots;  // by pin_first; free ones too
  std::map<LooseKey, ExtentRecord> loose;
  std::vector<SessionRecord> sessions;
  TrainingGroupSeats seats{};
  std::vector<ClosedStep> steps;  // in their order
  std::optional<GrantRecord> grant;
};

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
  /// Whether it can be said at all which segments the job used.
  Status check_claims() const;

  /// Which shards the job has, by their ids; `record` has no extents.
  Status write_layout(const JobRecord& record, const std::vector<uint32_t>& shard_ids);
  /// Appends a change, at the cost of the change. False: write_layout() has to be called with all
  /// of it, which happens now and then.
  bool change_layout(const LayoutChange& change);
  void note_shard(uint32_t shard_id, bool written, Contributors contributors);
  void note_generation(uint32_t shard_id, uint64_t generation);
  /// The shard with this id is gone, or a new one has it.
  void reset_shard(uint32_t shard_id);
  /// From `from` on, the first id that no shard ever had. All that shards have now are below
  /// `from`.
  uint32_t given_ids_end(uint32_t from) const;

  void note_slot(const SlotRecord& slot);

  /// Extents that only memory knows; `extent` that does not exist: none any more.
  void note_loose(const LooseKey& key, const ExtentRecord& extent);
  /// A commit, on disk or in memory, describes the job as it is now; of shards that come and go
  /// from here on it says nothing. It ends with rebase() or publish_record(), or nothing comes of
  /// it.
  void begin_commit();
  /// A commit is durable: the catalogue `tag` names what was loose, gradients excepted.
  void rebase(uint64_t tag);
  uint64_t base() const { return base_; }

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
  /// The newest record of a commit in memory, if it builds on `base_`; else 0.
  uint64_t record_sequence() const;
  /// A commit ended, on disk or in memory.
  void mark_commit();
  /// Shards that came and went while a commit was made are marked as any other.
  void settle_marks();
  Status read_layout(LedgerContents& contents) const;
  Status read_slots(LedgerContents& contents) const;
  Status read_loose(LedgerContents& contents);
  Status read_steps(LedgerContents& contents);

  SharedMemory memory_;
  LedgerLayout* layout_;
  uint64_t base_ = 0;
  uint64_t last_commit_ = 0;  // tells `base_` and the record on it from every other commit
  bool is_committing_ = false;
  std::vector<uint32_t> reset_ids_;  // with kInCommit as their mark
  uint64_t record_bytes_written_ = 0;
  std::optional<size_t> layout_at_;  // the place of the layout that this daemon wrote last
  uint64_t sequence_next_ = 1;       // of slots, loose extents and steps
  std::unordered_map<uint64_t, uint32_t> claim_of_;
  std::unordered_map<uint64_t, uint32_t> session_place_of_;
  std::map<LooseKey, uint32_t> loose_place_of_;
  std::vector<uint32_t> free_loose_places_;
};

}  // namespace memd
