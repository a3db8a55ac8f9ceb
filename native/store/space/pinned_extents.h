// Extents that snapshots name, and whether a job holds them too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "store/format/extent_record.h"

namespace memd {

/// All that one snapshot pins. Shared with the commit that ends it, which releases them one by one.
using PinnedList = std::shared_ptr<const std::vector<ExtentRecord>>;

/// The unit is an extent. Its place is free when no snapshot pins it and no job holds it: the last
/// one to release it frees it. An extent that no snapshot pins is not known here. Owned by the
/// ExtentStore; the server thread calls everything; nothing blocks.
class PinnedExtents {
 public:
  /// The caller's part, in the free space.
  enum class Space : uint8_t {
    unchanged,
    take,      // the place was free: the caller reserves it first
    free,      // nobody has it any more: the caller frees it
    conflict,  // the same place with other bytes, or a second job
  };

  /// At a start, where only snapshots name it so far. After `take` the caller reserves the place,
  /// and calls add() if that worked.
  Space pin(const ExtentRecord& extent);
  void add(const ExtentRecord& extent) { pin_place(extent, false); }
  /// A job holds it now.
  void pin_held(const ExtentRecord& extent) { pin_place(extent, true); }
  /// A snapshot ends. `unchanged` or `free`.
  Space unpin(const ExtentRecord& extent);

  /// A job's catalogue or memory names it: `unchanged` where it was pinned alone, `take` where no
  /// snapshot names it.
  Space hold(const ExtentRecord& extent);
  /// A job names it no more: `unchanged` or `free`.
  Space release(const ExtentRecord& extent);

  // Verification. An extent that many snapshots name is read once in a pass.
  /// The number of another pass.
  uint32_t begin_pass() { return ++pass_last_; }
  /// Its bytes matched in this pass; nothing where no snapshot names it.
  void note_whole(const ExtentRecord& extent, uint32_t pass);
  bool is_whole(const ExtentRecord& extent, uint32_t pass) const;

  /// Bytes that no job holds.
  uint64_t pinned_alone_bytes() const { return pinned_alone_bytes_; }
  size_t count() const { return pins_.size(); }

 private:
  struct Pin {
    uint32_t length_bytes = 0;
    uint32_t snapshot_count = 0;
    uint64_t checksum = 0;
    bool is_held = false;
    uint32_t whole_pass = 0;  // the last pass that found its bytes whole
  };
  static bool is_same(const Pin& pin, const ExtentRecord& extent) {
    return pin.length_bytes == extent.length_bytes && pin.checksum == extent.checksum;
  }
  void pin_place(const ExtentRecord& extent, bool is_held);

  std::map<ExtentAddress, Pin> pins_;
  uint64_t pinned_alone_bytes_ = 0;
  uint32_t pass_last_ = 0;
};

}  // namespace memd
