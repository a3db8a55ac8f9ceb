// The segments of one job: its arena, which trainers map, and its private side and host side, which
// only the daemon maps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "arena/arena.h"
#include "arena/pool.h"
#include "base/status.h"
#include "base/units.h"
#include "io/io_queue.h"
#include "store/journal/job_ledger.h"

namespace memd {

/// Two tiles in flight (state 12 bytes an element, and a spilled fp32 gradient), so that one is
/// read or written while the other is updated. With a maximum, 4 bytes more, one has room.
inline constexpr uint64_t kTileStateBytesMax = kTileElements * 12;
inline constexpr uint64_t kTileGradientBytesMax = kTileElements * 4;
inline constexpr uint64_t kPrivateFloorBytes = 2 * (kTileStateBytesMax + kTileGradientBytesMax);

// One tile is being updated by each worker while others are read and written; more than eight did
// not shorten a step and takes memory from the cache.
inline constexpr uint32_t kTilesInFlight = 8;

/// Segments are admitted when the job is opened and lie unassigned until a side needs them. The
/// arena takes what leases ask for, up to arena_bytes_wanted() before something goes for them; the
/// private side what is left of that, and at least its floor. A segment may go from the private
/// side to the arena of the same job when it is empty; never back, since a trainer keeps it mapped.
/// The host side has what reserve_host() asked for: places of tiles whose tier is host, which
/// neither of the others can take. Used by the server thread.
class JobMemory {
 public:
  /// If it fails, the segments are where they were.
  static Result<std::unique_ptr<JobMemory>> create(std::vector<Segment>& segments,
                                                   uint64_t segment_bytes,
                                                   IoQueue& io,
                                                   JobLedger* ledger = nullptr);
  struct Sides {
    std::vector<Segment> arena;
    std::vector<Segment> private_side;
    std::vector<Segment> host_side;
    std::vector<Segment> unassigned;
  };
  /// The segments of an earlier daemon, on the sides and in the order that it had them. Where it
  /// fails they are all in `unassigned`.
  static Result<std::unique_ptr<JobMemory>> adopt(Sides& sides,
                                                  uint64_t segment_bytes,
                                                  IoQueue& io,
                                                  JobLedger* ledger);
  ~JobMemory();

  Arena& arena() { return *arena_; }
  const Arena& arena() const { return *arena_; }
  Arena& private_side() { return *private_; }
  const Arena& private_side() const { return *private_; }
  Arena& host_side() { return *host_; }
  const Arena& host_side() const { return *host_; }

  /// From here on the host side has at least `bytes`. False where too few segments are left beside
  /// the arena and the private floor: then nothing has changed.
  bool reserve_host(uint64_t bytes);
  /// It has none any more; nothing lies there.
  void release_host();
  /// As much as it could have now.
  uint64_t host_bytes_max() const;

  /// Gives the arena one more segment, if one is to spare and tiles do not need it more.
  bool grow_arena();
  /// The same whatever tiles need: nothing can be evicted.
  bool grow_arena_further();
  bool grow_private();
  /// Frees the private side's last segment for the arena, if no slot lies in it.
  bool shrink_private();
  /// Whether it has more than its floor.
  bool can_shrink_private() const { return private_->segment_count() > private_floor_segments_; }

  /// Bytes that each side would hold if all of it were in memory.
  struct Expected {
    uint64_t arena_bytes = 0;  // parameters, gradients and blobs
    /// The arena makes do with so much where tiles that stay save more bytes than values that do;
    /// `arena_bytes` where they never do.
    uint64_t arena_bytes_min = 0;
    uint64_t tile_bytes = 0;
  };
  void expect(const Expected& expected) { expected_ = expected; }
  /// The arena gets room for all values, or leaves tiles what `arena_bytes_min` does not need.
  void keep_values(bool keeps) { keeps_values_ = keeps; }
  /// How much the private side may hold in all before it takes what the arena needs.
  uint64_t private_bytes_max() const;
  uint64_t private_floor_bytes() const { return private_floor_segments_ * segment_bytes_; }
  /// The part of the private side that is left to tiles in flight: not all of a floor of large
  /// segments.
  uint64_t working_bytes() const {
    return std::min(private_floor_bytes(), kTilesInFlight * kTileStateBytesMax);
  }
  uint64_t arena_bytes_max() const {
    return (segment_count_ - private_floor_segments_ - host_->segment_count()) * segment_bytes_;
  }
  /// Arena and private side share it.
  uint64_t shared_bytes() const { return bytes() - host_->capacity_bytes(); }
  uint64_t bytes() const { return segment_count_ * segment_bytes_; }
  uint64_t segment_bytes() const { return segment_bytes_; }

  /// The fewest segments a job can have: the private floor and one for the arena.
  static uint64_t segment_count_min(uint64_t segment_bytes);

  /// This ledger claims what it has, and from here on what changes.
  void claim_in(JobLedger& ledger);
  /// The ledger is told of nothing from here on.
  void end_claims() { ledger_ = nullptr; }
  std::vector<uint64_t> segment_ids() const;
  /// One of them for the pool, or nothing where none is left. To take one from a side takes half a
  /// millisecond. Nothing uses any of them any more.
  std::optional<Segment> take_segment();
  std::vector<Segment> take_segments();

 private:
  JobMemory(std::vector<Segment> segments, uint64_t segment_bytes, IoQueue& io, JobLedger* ledger);
  Status reserve();
  bool grow(Arena& side);
  bool leaves_room_to_tiles() const {
    return !keeps_values_ && expected_.arena_bytes_min < expected_.arena_bytes;
  }
  /// How far the arena grows before something is evicted from it.
  uint64_t arena_bytes_wanted() const;
  Side side_of(const Arena& side) const;
  /// False where something lies in it.
  bool take_last(Arena& side);
  void claim(uint64_t segment_id, Side side, uint64_t index);

  IoQueue& io_;
  JobLedger* ledger_;  // that claims its segments, or nullptr
  uint64_t segment_bytes_;
  uint64_t segment_count_;
  uint64_t private_floor_segments_;
  Expected expected_;
  bool keeps_values_ = false;
  std::vector<Segment> unassigned_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Arena> private_;
  std::unique_ptr<Arena> host_;
};

}  // namespace memd
