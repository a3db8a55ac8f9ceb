// Facts that the next daemon needs, each valid in itself: the contents of a ledger.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "ring/layout.h"
#include "store/format/catalogue.h"
#include "store/journal/contributors.h"
#include "store/journal/residency.h"
#include "store/journal/step_request.h"

namespace memd {

/// The process that a session belongs to. A pid alone comes back; with its start time it does not.
struct SessionOwner {
  uint32_t pid = 0;
  uint64_t start_time = 0;  // clock ticks since boot, field 22 of /proc/<pid>/stat
  uint32_t uid = 0;

  bool operator==(const SessionOwner&) const = default;
};

enum class Side : uint8_t { unassigned = 0, arena = 1, private_side = 2, host_side = 3 };

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

}  // namespace memd
