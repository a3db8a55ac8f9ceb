// One side of one job's memory: segments back to back in a reserved address range, cut into slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "arena/gap_order.h"
#include "arena/segment.h"
#include "base/status.h"

namespace memd {

/// Offsets count from the range's start and mean the same in every process that maps it. Slots have
/// any length and may lie across segments; they start on kBlockBytes so that O_DIRECT can use them.
/// First fit, neighbours merged on release. Free slots are poisoned under AddressSanitizer: the
/// kernel's writes and evicted views are otherwise invisible to it. One thread (the server thread)
/// allocates and frees; update workers and the kernel use the bytes of slots that are held.
class Arena {
 public:
  /// Reserves address space only; memory comes with add().
  static Result<std::unique_ptr<Arena>> create(uint64_t reserved_bytes, uint64_t segment_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Appends a segment of `segment_bytes`; its memory becomes free space.
  Status add(Segment segment);
  /// Takes the last segment away if no slot lies in it: see Segment::move_away().
  std::optional<Segment> remove_last();

  /// Offset of `bytes` (rounded up to whole blocks) that nobody holds, or nothing where no gap is
  /// long enough.
  std::optional<uint64_t> allocate(uint64_t bytes);
  /// Takes `bytes` at `offset_bytes`, where an earlier daemon had a slot; false where that is not
  /// all free.
  bool reserve(uint64_t offset_bytes, uint64_t bytes);
  /// `offset_bytes` came from allocate(), or went to reserve().
  void free(uint64_t offset_bytes);

  std::byte* at(uint64_t offset_bytes) const { return base_ + offset_bytes; }
  uint64_t segment_bytes() const { return segment_bytes_; }
  uint64_t segment_count() const { return segments_.size(); }
  const Segment& segment(uint64_t index) const { return segments_[index]; }
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  uint64_t capacity_bytes() const { return segments_.size() * segment_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t free_bytes() const { return capacity_bytes() - used_bytes_; }
  uint64_t largest_free_bytes() const { return gap_order_.longest_bytes(); }
  /// Free space, and held slots: offset → length.
  const std::map<uint64_t, uint64_t>& gaps() const { return gaps_; }
  const std::map<uint64_t, uint64_t>& slots() const { return slots_; }
  /// How much is free behind the last slot.
  uint64_t tail_free_bytes() const;
  /// Gaps that allocate() has met so far.
  uint64_t looked_at_count() const { return gap_order_.looked_at_count(); }

 private:
  Arena(std::byte* base, uint64_t reserved_bytes, uint64_t segment_bytes)
      : base_(base), reserved_bytes_(reserved_bytes), segment_bytes_(segment_bytes) {}
  using Gaps = std::map<uint64_t, uint64_t>;
  /// Merged with the gaps that touch it.
  void add_gap(uint64_t offset_bytes, uint64_t bytes);
  void insert_gap(uint64_t offset_bytes, uint64_t bytes);
  void erase_gap(Gaps::iterator gap);

  std::byte* base_;
  uint64_t reserved_bytes_;
  uint64_t segment_bytes_;
  uint64_t used_bytes_ = 0;
  std::vector<Segment> segments_;
  Gaps gaps_;                           // offset → length of free space
  GapOrder gap_order_;                  // the same gaps
  std::map<uint64_t, uint64_t> slots_;  // offset → length of held slots
};

}  // namespace memd
