#include "device_memory.h"

#include "current_stream.h"

namespace sim {

DeviceMemory::DeviceMemory() {
  for (int device = 0; device < kDevices; ++device) pools_.emplace_back(device);
}

c10::DataPtr DeviceMemory::allocate(size_t size) {
  auto locked = machine().lock();
  auto device = device_at(current.device);
  if (size == 0) return {nullptr, nullptr, nullptr, device};
  auto* block = pools_.at(current.device).allocate(size);
  return {block->address, block, &DeviceMemory::release, device};
}

void DeviceMemory::copy_data(void*, const void*, size_t) const {
  TORCH_CHECK(false, "device memory is not copied by the host");
}

void DeviceMemory::emptyCache(c10::MempoolId_t) {
  auto locked = machine().lock();
  for (auto& pool : pools_) pool.empty_cache();
}

void DeviceMemory::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  auto locked = machine().lock();
  auto* block = static_cast<Block*>(data.get_context());
  auto user = stream_of(stream.device_index(), stream.id());
  if (block && block->stream != user) block->users.insert(user);
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  auto locked = machine().lock();
  return pools_.at(device).statistics();
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  auto locked = machine().lock();
  pools_.at(device).reset_accumulated();
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  auto locked = machine().lock();
  pools_.at(device).reset_peak();
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
  auto locked = machine().lock();
  auto& pool = pools_.at(device);
  return {pool.free_bytes(), pool.limit()};
}

void DeviceMemory::begin_anew() {
  auto locked = machine().lock();
  for (auto& pool : pools_) pool.begin_anew();
}

void DeviceMemory::set_limit(int64_t device, int64_t bytes) {
  auto locked = machine().lock();
  pools_.at(device).set_limit(bytes);
}

c10::DeviceIndex DeviceMemory::holder_of(const void* address) const {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device)
    if (pools_[device].holds(address)) return device;
  return -1;
}

char* DeviceMemory::bytes_of(const void* address) const {
  return address ? pools_.at(holder_of(address)).bytes_of(address) : nullptr;
}

const char* DeviceMemory::segment_of(const char* bytes) const {
  for (const auto& pool : pools_)
    if (pool.holds_bytes(bytes)) return pool.segment_of(bytes);
  return nullptr;
}

void DeviceMemory::release(void* context) {
  auto locked = machine().lock();
  auto* block = static_cast<Block*>(context);
  memory().pools_.at(device_of(block->stream)).free(block);
}

DeviceMemory& memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}

}  // namespace sim
