// Which bytes of the volumes are free.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "store/format/extent_record.h"

namespace memd {

/// Free space of all devices of a set. Next fit per device, so that what is written together lies
/// together; devices take turns, weighted by their free space. One thread (the server thread) calls
/// it.
class FreeExtents {
 public:
  /// `begin_bytes` to `end_bytes` of `device` become free space.
  void add_device(uint16_t device, uint64_t begin_bytes, uint64_t end_bytes);

  /// An extent without a checksum yet, or nothing where no gap of `length_bytes` is left.
  std::optional<ExtentRecord> allocate(uint32_t length_bytes);
  void release(const ExtentRecord& extent);
  /// Takes the range out of the free space at start; an error where part of it is not free: two
  /// owners, or outside of the volume.
  Status reserve(const ExtentRecord& extent);

  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t free_bytes(uint16_t device) const { return devices_[device].free_bytes; }
  uint64_t capacity_bytes() const { return capacity_bytes_; }

 private:
  struct Device {
    uint64_t begin_bytes = 0;
    uint64_t end_bytes = 0;
    std::map<uint64_t, uint64_t> gaps;                       // offset → length
    std::set<std::pair<uint64_t, uint64_t>> gaps_by_length;  // (length, offset), the same gaps
    uint64_t next_offset_bytes = 0;
    uint64_t free_bytes = 0;
    double credit_bytes = 0;  // what its share of all allocations was, less what it got
  };

  static std::optional<uint64_t> find(const Device& device, uint64_t length_bytes);
  static void add_gap(Device& device, uint64_t offset_bytes, uint64_t length_bytes);
  static void remove_gap(Device& device, std::map<uint64_t, uint64_t>::iterator gap);
  /// The gap that holds all of the range, or end().
  static std::map<uint64_t, uint64_t>::iterator gap_around(Device& device,
                                                           uint64_t offset_bytes,
                                                           uint64_t length_bytes);
  void take(Device& device,
            std::map<uint64_t, uint64_t>::iterator gap,
            uint64_t offset_bytes,
            uint64_t length_bytes);

  std::vector<Device> devices_;
  uint64_t free_bytes_ = 0;
  uint64_t capacity_bytes_ = 0;
};

}  // namespace memd
