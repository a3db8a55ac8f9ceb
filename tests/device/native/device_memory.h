// Device memory: a range of addresses that nobody may touch, and the bytes that tasks use instead.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <set>

#include "machine.h"

namespace sim {

struct Block {
  char* address;
  size_t size;
  Actor stream;
  std::set<Actor> users;        // streams named to record_stream
  std::vector<MarkPtr> leaves;  // where each of them was when the block was freed
};

/// One device's memory. A device address lies behind a wall (PROT_NONE: the host's access is a
/// SIGSEGV); its bytes lie at the same offset of a second range. Freed blocks are used again by
/// their stream at once, and after the streams named to record_stream have passed. The machine's
/// lock guards it.
class DevicePool {
 public:
  explicit DevicePool(int device);

  Block* allocate(size_t size);
  void free(Block* block);
  /// Takes back blocks whose users have passed; `is_waiting`: all of them.
  void reclaim(bool is_waiting);

  bool holds(const void* address) const { return wall_ <= address && address < wall_ + kReserved; }
  bool holds_bytes(const char* bytes) const {
    return bytes_ <= bytes && bytes < bytes_ + kReserved;
  }
  char* bytes_of(const void* address) const {
    return bytes_ + (static_cast<const char*>(address) - wall_);
  }
  /// The block in which these bytes lie.
  const char* block_of(const char* bytes) const;

  void set_limit(int64_t bytes) { limit_ = bytes; }
  int64_t limit() const { return limit_; }
  c10::CachingAllocator::Stat& allocated() { return allocated_; }

 private:
  static constexpr size_t kReserved = size_t{64} << 30;

  char* place(Actor stream, size_t size);
  void retire(Block* block);

  int device_;
  int64_t limit_ = kReserved;
  char *wall_, *bytes_, *next_;
  c10::CachingAllocator::Stat allocated_;
  std::map<std::pair<Actor, size_t>, std::vector<char*>> spare_;
  std::set<const char*> starts_;
  std::vector<Block*> leaving_;
};

/// torch's allocator for all devices. Any thread may call.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  DeviceMemory();

  /// On the current device, for its current stream.
  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  void set_limit(int64_t device, int64_t bytes);
  /// The device whose address this is, or -1.
  c10::DeviceIndex holder_of(const void* address) const;
  char* bytes_of(const void* address) const;
  /// The block in which these bytes lie, or none.
  const char* block_of(const char* bytes) const;

 private:
  static void release(void* context);

  std::deque<DevicePool> pools_;
};

DeviceMemory& memory();

}  // namespace sim
