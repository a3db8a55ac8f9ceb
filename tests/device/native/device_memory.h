// The memory of all devices, as torch asks for it.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <deque>

#include "device_pool.h"

namespace sim {

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
  /// See `DevicePool`.
  void begin_anew();
  /// The device whose address this is, or -1.
  c10::DeviceIndex holder_of(const void* address) const;
  char* bytes_of(const void* address) const;
  /// The segment in which these bytes lie, or none if they are not of a device.
  const char* segment_of(const char* bytes) const;

 private:
  static void release(void* context);

  std::deque<DevicePool> pools_;
};

DeviceMemory& memory();

}  // namespace sim
