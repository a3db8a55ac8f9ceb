// Snapshots whose bytes somebody reads, for an export: a piece at a time, below all other I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "ring/shared_memory.h"
#include "store/format/catalogue.h"
#include "store/job/statistics.h"
#include "store/job/store_parts.h"
#include "store/snapshot/snapshot_contents.h"
#include "store/space/snapshots.h"
#include "store/step/activity.h"

namespace memd {

struct SnapshotReadingRequest {
  uint64_t job_id = 0;
  std::string name;
  std::string owner;  // a user or tenant, for an error too: its readings are counted together
  uint32_t uid = 0;
  uint32_t pid = 0;  // for an error
  /// Pieces that the caller has from an earlier reading, if that had this identity.
  uint64_t piece_first = 0;
  uint64_t identity = 0;
};

/// One that has begun. Nobody changes the record: any thread may look at it.
struct SnapshotReading {
  uint64_t reading_id = 0;
  SnapshotInfo snapshot;
  /// The same for the same snapshot, also in another daemon's life; never 0.
  uint64_t identity = 0;
  uint64_t piece_first = 0;  // 0: what was read earlier is of another snapshot
  std::shared_ptr<const JobRecord> record;
};

/// A place in the memory that an export shares with its caller, which maps it for reading alone.
struct PieceMemory {
  std::shared_ptr<const SharedMemory> memory;
  uint64_t offset_bytes = 0;  // whole blocks
};

/// The bytes of a place of a snapshot, in a part of an export's memory. A part that was never
/// written is empty here, and zero.
class SnapshotPiece {
 public:
  /// `place` is in the record, and `into` has room for its blocks.
  SnapshotPiece(const JobRecord& record, const SnapshotPlace& place, PieceMemory into);

  std::span<const std::byte> value() const;
  std::span<const std::byte> exp_avg() const { return moment(0); }
  std::span<const std::byte> exp_avg_sq() const { return moment(1); }
  std::span<const std::byte> max_exp_avg_sq() const;
  /// fp32, for bf16 alone: the value with its remainder, from which Adam goes on.
  std::span<const std::byte> master() const;
  /// From the start of the export's memory.
  uint64_t offset_bytes(std::span<const std::byte> part) const {
    return static_cast<uint64_t>(part.data() - into_.memory->data());
  }

 private:
  friend class SnapshotReadings;

  std::byte* data() const { return into_.memory->data() + into_.offset_bytes; }
  std::span<std::byte> value_blocks() const { return {data(), blocks_.value_bytes}; }
  std::span<std::byte> rest_blocks() const {
    return {data() + blocks_.value_bytes, blocks_.rest_bytes};
  }
  std::byte* master_data() const { return data() + blocks_.value_bytes + blocks_.rest_bytes; }
  std::span<const std::byte> moment(size_t index) const;
  void join_master();

  PieceMemory into_;
  PieceBlocks blocks_;
  uint64_t value_bytes_ = 0;
  DType dtype_ = DType::unspecified;  // of a tile
  uint64_t element_count_ = 0;
  bool keeps_maxima_ = false;
};

/// One reading of a job and kReadingsOfOwnerMax of an owner at a time. A snapshot that is read
/// cannot be dropped; if its job is, the next piece is refused. Only reads that were asked for are
/// made: a caller that is slow holds nothing but its snapshot. Owned by the ShardStore; the server
/// thread calls everything; nothing blocks.
class SnapshotReadings {
 public:
  using Piece = std::shared_ptr<const SnapshotPiece>;
  using Read = std::function<void(Result<Piece>)>;
  static constexpr size_t kReadingsOfOwnerMax = 4;

  SnapshotReadings(const StoreParts& parts, Snapshots& snapshots)
      : parts_(parts), snapshots_(snapshots) {}
  SnapshotReadings(const SnapshotReadings&) = delete;
  SnapshotReadings& operator=(const SnapshotReadings&) = delete;

  Result<SnapshotReading> begin(const SnapshotReadingRequest& request);
  /// Into memory that nobody else writes, until `done`. Verified there; damage makes the snapshot's
  /// shards lost, and the error tells them.
  void read(uint64_t reading_id, const SnapshotPlace& place, PieceMemory into, Read done);
  /// Nothing if it has ended. Reads in flight are finished.
  void end(uint64_t reading_id) { readings_.erase(reading_id); }

  /// ok, or why the snapshot cannot be dropped.
  Status check_unread(const Snapshot& snapshot, const std::string& job_name) const;
  /// The part of it that was read, 0 to 1; nothing where nobody reads it.
  std::optional<double> part_read(uint64_t snapshot_id) const;
  /// At the daemon's end.
  void give_up() { is_stopping_ = true; }
  bool is_idle() const { return in_flight_count_ == 0; }
  std::vector<Activity> activities() const;
  SnapshotReadingStatistics statistics() const;

 private:
  struct Reading {
    uint64_t snapshot_id = 0;
    uint64_t job_id = 0;
    std::string owner;
    uint32_t uid = 0;
    uint32_t pid = 0;
    std::string job_name;
    std::string name;
    std::shared_ptr<const JobRecord> record;
    uint64_t started_ns = 0;
    uint64_t piece_count = 0;
    uint64_t piece_done_count = 0;
  };
  struct Pending;
  using PendingPointer = std::shared_ptr<Pending>;

  Status check_bounds(const Job& job, const SnapshotReadingRequest& request) const;
  void read_next(const PendingPointer& pending);
  void verify(const PendingPointer& pending);
  void read_twice(const PendingPointer& pending);
  void fail(const PendingPointer& pending, const Status& status);
  void finish(const PendingPointer& pending, Result<Piece> answer);

  const StoreParts& parts_;
  Snapshots& snapshots_;
  std::map<uint64_t, Reading> readings_;  // by id
  uint64_t id_next_ = 1;
  uint64_t in_flight_count_ = 0;
  bool is_stopping_ = false;
  uint64_t bytes_ = 0;
  uint64_t errors_ = 0;
};

}  // namespace memd
