// An image that is changed and put back, and the hash of what it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "base/checksum.h"

namespace memd::powercut {

inline constexpr uint64_t kSectorBytes = 512;

inline uint64_t sector_hash(uint64_t sector, std::span<const std::byte> bytes) {
  return extent_checksum(bytes, {.device = 0, .offset_bytes = sector});
}

/// `key()` depends on the bytes alone, not on the way to them: the sum of its sectors' hashes.
class Image {
 public:
  explicit Image(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {
    for (uint64_t i = 0; i < bytes_.size() / kSectorBytes; ++i) {
      hashes_.push_back(sector_hash(i, sector(i)));
      key_ += hashes_.back();
    }
  }

  std::span<const std::byte> bytes() const { return bytes_; }
  uint64_t key() const { return key_; }

  void put(uint64_t index, const std::byte* from, uint64_t hash) {
    if (recording_) {
      const auto old = sector(index);
      undo_bytes_.insert(undo_bytes_.end(), old.begin(), old.end());
      undo_.emplace_back(index, hashes_[index]);
    }
    std::memcpy(bytes_.data() + index * kSectorBytes, from, kSectorBytes);
    key_ += hash - hashes_[index];
    hashes_[index] = hash;
  }
  void put(uint64_t index, const std::byte* from) {
    put(index, from, sector_hash(index, {from, kSectorBytes}));
  }

  /// From here on changes are remembered, until they are undone.
  void begin() { recording_ = true; }
  void undo() {
    recording_ = false;
    while (!undo_.empty()) {
      const auto [index, hash] = undo_.back();
      undo_.pop_back();
      put(index, undo_bytes_.data() + undo_.size() * kSectorBytes, hash);
    }
    undo_bytes_.clear();
  }

 private:
  std::span<const std::byte> sector(uint64_t index) const {
    return std::span(bytes_).subspan(index * kSectorBytes, kSectorBytes);
  }

  std::vector<std::byte> bytes_;
  std::vector<uint64_t> hashes_;
  uint64_t key_ = 0;
  bool recording_ = false;
  std::vector<std::byte> undo_bytes_;
  std::vector<std::pair<uint64_t, uint64_t>> undo_;  // sector and its hash
};

}  // namespace memd::powercut
