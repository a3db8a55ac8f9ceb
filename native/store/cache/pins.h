// Pin counters: which of them slots use, and what they say.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "ring/layout.h"

namespace memd {

/// Pin counters in use: runs of them, one run a slot.
class PinIndexes {
 public:
  std::optional<uint32_t> take(uint32_t count);
  void give_back(uint32_t first, uint32_t count) { free_[count].push_back(first); }
  /// After an earlier daemon: below `end` every run is taken or given back.
  void start_at(uint32_t end) { next_ = end; }
  /// No slot uses this one or a later one.
  uint32_t end() const { return next_; }

 private:
  uint32_t next_ = 0;
  std::unordered_map<uint32_t, std::vector<uint32_t>> free_;
};

/// Pins of one counter of a slot. A session's memory holds its client's word: it is bounded by
/// what 16 bits hold, and adds up with no other half and no other session's.
class PinCount {
 public:
  void add(uint32_t pins) {
    readers_ += pin_readers(pins);
    writers_ += pin_writers(pins);
  }
  uint64_t all() const { return readers_ + writers_; }
  bool has_readers() const { return readers_ != 0; }
  bool has_writers() const { return writers_ != 0; }

 private:
  uint64_t readers_ = 0;
  uint64_t writers_ = 0;
};

}  // namespace memd
