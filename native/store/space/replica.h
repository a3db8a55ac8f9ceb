// Where one piece of an entry, or of a bucket's optimizer state, lies on disk; and all pieces of
// it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/check.h"
#include "store/format/extent_record.h"

namespace memd {

/// One extent. `referenced`: a catalogue that was written, or is being written, names it, so that
/// it may be released only after the next commit. An ExtentRecord and a bool take 40 bytes.
struct Replica {
  Replica() = default;
  explicit Replica(const ExtentRecord& extent, bool is_referenced = false)
      : offset_bytes(extent.address.offset_bytes),
        checksum(extent.checksum),
        length_bytes(extent.length_bytes),
        device(extent.address.device),
        referenced(is_referenced) {}

  ExtentRecord extent() const {
    ExtentRecord extent;
    extent.address.device = device;
    extent.address.offset_bytes = offset_bytes;
    extent.length_bytes = length_bytes;
    extent.checksum = checksum;
    return extent;
  }
  bool exists() const { return length_bytes != 0; }

  uint64_t offset_bytes = 0;
  uint64_t checksum = 0;
  uint32_t length_bytes = 0;
  uint16_t device = 0;
  bool referenced = false;
  uint8_t zero = 0;  // ReplicaList tells by it what it holds
};
static_assert(sizeof(Replica) == 24);

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
  Replica* data() { return is_array() ? array_.first : &one_; }
  const Replica* data() const { return is_array() ? array_.first : &one_; }
  Replica* begin() { return data(); }
  Replica* end() { return data() + size(); }
  const Replica* begin() const { return data(); }
  const Replica* end() const { return data() + size(); }
  Replica& operator[](size_t index) {
    MEMD_CHECK_LT(index, size());
    return data()[index];
  }
  const Replica& operator[](size_t index) const {
    MEMD_CHECK_LT(index, size());
    return data()[index];
  }

 private:
  struct Array {
    explicit Array(size_t count_)
        : first(count_ == 0 ? nullptr : new Replica[count_]), count(count_) {}
    Replica* first;
    size_t count;
    std::array<uint8_t, 7> unused{};
    uint8_t mark = 1;
  };
  static_assert(sizeof(Array) == sizeof(Replica));

  /// Both forms end with one byte that tells them apart.
  bool is_array() const {
    static_assert(offsetof(Array, mark) == sizeof(Array) - 1);
    static_assert(offsetof(Replica, zero) == sizeof(Replica) - 1);
    return reinterpret_cast<const uint8_t*>(this)[sizeof(Array) - 1] != 0;
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
