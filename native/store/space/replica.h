// The place on disk of one piece of an entry, or of a bucket's optimizer state; and of all pieces.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/check.h"
#include "base/units.h"
#include "store/format/extent_record.h"

namespace memd {

/// One extent, and the epoch of its job's disk space in which it came (JobSpace: which of them a
/// catalogue names follows from that). An ExtentRecord and an epoch take 40 bytes: the epoch lies
/// where offset and length, which are whole blocks, are 0.
class Replica {
 public:
  static constexpr uint64_t kEpochMax = (uint64_t{1} << 39) - 1;  // 80 years of 100 steps a second

  Replica() = default;
  explicit Replica(const ExtentRecord& extent, uint64_t epoch)
      : offset_and_epoch_(extent.address.offset_bytes | (epoch & kLowMask)),
        checksum_(extent.checksum),
        length_and_epoch_(extent.length_bytes |
                          static_cast<uint32_t>(epoch >> kLowBits & kLowMask)),
        device_(extent.address.device),
        epoch_high_(static_cast<uint16_t>(epoch >> 2 * kLowBits)) {
    MEMD_CHECK_EQ((extent.address.offset_bytes | extent.length_bytes) & kLowMask, uint64_t{0});
    MEMD_CHECK_LE(epoch, kEpochMax);
  }

  ExtentRecord extent() const {
    ExtentRecord extent;
    extent.address.device = device_;
    extent.address.offset_bytes = offset_bytes();
    extent.length_bytes = length_bytes();
    extent.checksum = checksum_;
    return extent;
  }
  uint64_t offset_bytes() const { return offset_and_epoch_ & ~kLowMask; }
  uint32_t length_bytes() const { return length_and_epoch_ & ~static_cast<uint32_t>(kLowMask); }
  bool exists() const { return length_bytes() != 0; }
  uint64_t epoch() const {
    return uint64_t{epoch_high_} << 2 * kLowBits | (length_and_epoch_ & kLowMask) << kLowBits |
           (offset_and_epoch_ & kLowMask);
  }

 private:
  static constexpr uint32_t kLowBits = 12;
  static constexpr uint64_t kLowMask = (uint64_t{1} << kLowBits) - 1;
  static_assert(kBlockBytes == kLowMask + 1);

  uint64_t offset_and_epoch_ = 0;
  uint64_t checksum_ = 0;
  uint32_t length_and_epoch_ = 0;
  uint16_t device_ = 0;
  uint16_t epoch_high_ = 0;  // 15 bits: by the last one ReplicaList tells what it holds
};
static_assert(sizeof(Replica) == 24);

/// A replica that JobSpace may change: it counts bytes and knows what a catalogue names, so that it
/// alone writes down what lies where. All others read. Valid as long as the replica is.
class ReplicaPlace {
 public:
  /// `is_host`: a tile of tier host, which has an extent only where a snapshot wrote it.
  explicit ReplicaPlace(Replica& replica, bool is_host = false)
      : replica_(&replica), is_host_(is_host) {}

  const Replica& operator*() const { return *replica_; }
  const Replica* operator->() const { return replica_; }

 private:
  friend class JobSpace;

  Replica* replica_;
  bool is_host_;
};

/// As many as the constructor is told, which stay where they are until the list is moved. One,
/// which is what nearly all entries have, is in the list itself: on the heap it takes 32 bytes
/// more.
class ReplicaList {
 public:
  explicit ReplicaList(size_t count = 0) {
    if (count == 1) {
      std::construct_at(&one_);
    } else {
      std::construct_at(&array_, count);
    }
  }
  ReplicaList(ReplicaList&& other) noexcept : ReplicaList() { swap(other); }
  ReplicaList& operator=(ReplicaList&& other) noexcept {
    swap(other);
    return *this;
  }
  ReplicaList(const ReplicaList&) = delete;
  ReplicaList& operator=(const ReplicaList&) = delete;
  ~ReplicaList() {
    if (is_array()) delete[] array_.first;
  }

  size_t size() const { return is_array() ? array_.count : 1; }
  bool empty() const { return size() == 0; }
  const Replica* data() const { return is_array() ? array_.first : &one_; }
  const Replica* begin() const { return data(); }
  const Replica* end() const { return data() + size(); }
  const Replica& operator[](size_t index) const {
    MEMD_CHECK_LT(index, size());
    return data()[index];
  }
  ReplicaPlace place(size_t index, bool is_host = false) {
    MEMD_CHECK_LT(index, size());
    return ReplicaPlace(is_array() ? array_.first[index] : one_, is_host);
  }

 private:
  struct Array {
    explicit Array(size_t count_)
        : first(count_ == 0 ? nullptr : new Replica[count_]), count(count_) {}
    Replica* first;
    size_t count;
    std::array<uint8_t, 7> unused{};
    uint8_t mark = 0x80;
  };
  static_assert(sizeof(Array) == sizeof(Replica));

  /// Both forms end with one bit that tells them apart.
  bool is_array() const {
    static_assert(offsetof(Array, mark) == sizeof(Array) - 1);
    return (reinterpret_cast<const uint8_t*>(this)[sizeof(Array) - 1] & 0x80) != 0;
  }
  void swap(ReplicaList& other) {
    auto* const mine = reinterpret_cast<std::byte*>(this);
    std::swap_ranges(mine, mine + sizeof(Array), reinterpret_cast<std::byte*>(&other));
  }

  union {
    Replica one_;
    Array array_;
  };
};
static_assert(sizeof(ReplicaList) == sizeof(Replica));

}  // namespace memd
