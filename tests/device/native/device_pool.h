// One device's memory as torch's allocator for CUDA manages it.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "machine.h"

namespace sim {

/// A part of a segment, in use or free.
struct Block {
  char* address;
  size_t size;
  Actor stream;
  bool is_small;  // of a segment for small requests
  bool is_free = true;
  std::set<Actor> users = {};        // streams named to record_stream
  std::vector<MarkPtr> leaves = {};  // where each of them was when the block was freed
};

/// One device's memory. A device address lies behind a wall (PROT_NONE: the host's access is a
/// SIGSEGV); its bytes lie at the same offset of a second range. The machine's lock guards it.
///
/// Its rules are those of c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator: malloc, free,
/// get_free_block, should_split, free_block, release_cached_blocks):
/// - The driver gives segments. A block comes from the smallest free block of its own stream and
///   pool that is large enough, and otherwise from a new segment. What remains is split off.
/// - A freed block is its stream's again at once, or once the streams named to record_stream have
///   passed, and merges with free neighbours in its segment.
/// - empty_cache(), and a segment that the driver refuses, give back the segments of which no part
///   is in use. The driver waits for the device before it takes one (cudaFree). Then the segment is
///   asked for once more; free blocks are not looked at again.
/// A granule here stands for 2 MiB there. A segment is as large as its request, and 10 granules for
/// requests below 5, as 20 MiB are there for those below 10 MiB. Small requests, of one granule,
/// have a pool of their own: no scalar splits the memory of large tensors.
class DevicePool {
 public:
  explicit DevicePool(int device);

  Block* allocate(size_t size);
  void free(Block* block);
  /// Returns what is not in use to the driver.
  void empty_cache();
  /// As `empty_cache`. What is in use, and the rest of its segments, stays reserved and is not used
  /// again.
  void begin_anew();

  bool holds(const void* address) const { return wall_ <= address && address < wall_ + kReserved; }
  bool holds_bytes(const char* bytes) const {
    return bytes_ <= bytes && bytes < bytes_ + kReserved;
  }
  char* bytes_of(const void* address) const {
    return bytes_ + (static_cast<const char*>(address) - wall_);
  }
  /// The segment in which these bytes lie. Raises if the driver has it back.
  const char* segment_of(const char* bytes) const;

  void set_limit(int64_t bytes) { limit_ = bytes; }
  int64_t limit() const { return limit_; }
  int64_t free_bytes() const { return std::max<int64_t>(limit_ - reserved_.current, 0); }
  c10::CachingDeviceAllocator::DeviceStats statistics() const;
  void reset_accumulated();
  void reset_peak();

 private:
  using Stat = c10::CachingAllocator::Stat;
  struct ByPoolAndSize {
    using is_transparent = void;
    using Key = std::tuple<bool, Actor, size_t, const char*>;
    static Key key(const Block* block) {
      return {block->is_small, block->stream, block->size, block->address};
    }
    static Key key(const Key& key) { return key; }
    template <class One, class Other>
    bool operator()(const One& one, const Other& other) const {
      return key(one) < key(other);
    }
  };

  static constexpr size_t kReserved = size_t{64} << 30;

  Block* find_free(Actor stream, size_t size);
  Block* add_segment(Actor stream, size_t size);
  void split(Block* block, size_t size);
  void reclaim(bool is_waiting);
  void retire(Block* block);
  void merge(Block* block, Block* behind);
  bool is_segment(const Block* block) const;
  void release(Block* segment);

  int device_;
  int64_t limit_ = kReserved;
  char *wall_, *bytes_, *next_;
  std::map<const char*, size_t> segments_;  // sizes by address
  std::map<const char*, Block*> blocks_;    // by address
  std::set<Block*, ByPoolAndSize> free_;
  std::vector<Block*> leaving_;
  Stat allocated_, active_, reserved_, segment_count_;
  int64_t retried_count_ = 0, refused_count_ = 0, freed_count_ = 0;
};

}  // namespace sim
