#include "device_memory.h"

#include <sys/mman.h>

#include <cstring>

#include "current_stream.h"

namespace sim {
namespace {

constexpr size_t kGranuleBytes = 512;  // views on a device begin on such boundaries

char* reserve(size_t size, int protection) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  auto* address = mmap(nullptr, size, protection, kFlags, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "no address space for the simulated device");
  return static_cast<char*>(address);
}

}  // namespace

DevicePool::DevicePool(int device)
    : device_(device),
      wall_(reserve(kReserved, PROT_NONE)),
      bytes_(reserve(kReserved, PROT_READ | PROT_WRITE)),
      next_(wall_) {}

Block* DevicePool::allocate(size_t size) {
  size = (size + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  reclaim(false);
  auto fits = [&] { return allocated_.current + static_cast<int64_t>(size) <= limit_; };
  if (!fits()) reclaim(true);
  TORCH_CHECK_WITH(OutOfMemoryError,
                   fits(),
                   "simulated device: out of memory: ",
                   size,
                   " bytes wanted, ",
                   allocated_.current,
                   " of ",
                   limit_,
                   " in use");
  auto stream = current_stream(device_);
  auto* address = place(stream, size);
  auto* bytes = bytes_of(address);
  // NaN at once where no task uses the memory any more: bytes of its last use, often the right
  // ones, would hide that a copy was not waited for. A task of the stream that uses it still comes
  // first.
  if (machine().is_quiet(region_of(bytes))) std::memset(bytes, 0xff, size);
  machine().queue(stream,
                  {.name = "allocation",
                   .cost = {},
                   .spans = {{bytes, bytes + size, true}},
                   .run = [bytes, size] { std::memset(bytes, 0xff, size); },
                   .may_run_now = false});
  allocated_.increase(size);
  return new Block{address, size, stream, {}, {}};
}

char* DevicePool::place(Actor stream, size_t size) {
  auto& spare = spare_[{stream, size}];
  if (!spare.empty()) {
    auto* address = spare.back();
    spare.pop_back();
    return address;
  }
  TORCH_CHECK(next_ + size <= wall_ + kReserved, "simulated device: out of address space");
  auto* address = std::exchange(next_, next_ + size);
  starts_.insert(address);
  return address;
}

void DevicePool::free(Block* block) {
  for (auto stream : block->users) block->leaves.push_back(machine().mark(stream));
  if (block->leaves.empty())
    retire(block);
  else
    leaving_.push_back(block);
}

void DevicePool::reclaim(bool is_waiting) {
  auto has_left = [&](Block* block) {
    bool is_over = true;
    for (auto& mark : block->leaves) {
      if (is_waiting) machine().reach(mark);
      is_over = is_over && mark->has_passed;
    }
    return is_over;
  };
  std::vector<Block*> staying;
  for (auto* block : std::exchange(leaving_, {})) {
    if (!has_left(block)) {
      staying.push_back(block);
      continue;
    }
    auto* bytes = bytes_of(block->address);
    machine().forget(bytes, bytes + block->size);
    retire(block);
  }
  leaving_.insert(leaving_.end(), staying.begin(), staying.end());
}

void DevicePool::retire(Block* block) {
  allocated_.decrease(block->size);
  spare_[{block->stream, block->size}].push_back(block->address);
  delete block;
}

const char* DevicePool::block_of(const char* bytes) const {
  return bytes_of(*std::prev(starts_.upper_bound(wall_ + (bytes - bytes_))));
}

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
  for (auto& pool : pools_) pool.reclaim(true);
}

void DeviceMemory::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  auto locked = machine().lock();
  auto* block = static_cast<Block*>(data.get_context());
  auto user = stream_of(stream.device_index(), stream.id());
  if (block && block->stream != user) block->users.insert(user);
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  auto locked = machine().lock();
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] =
      pools_.at(device).allocated();
  return stats;
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  auto locked = machine().lock();
  pools_.at(device).allocated().reset_accumulated();
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  auto locked = machine().lock();
  pools_.at(device).allocated().reset_peak();
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
  auto locked = machine().lock();
  auto& pool = pools_.at(device);
  return {pool.limit() - pool.allocated().current, pool.limit()};
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

const char* DeviceMemory::block_of(const char* bytes) const {
  for (const auto& pool : pools_)
    if (pool.holds_bytes(bytes)) return pool.block_of(bytes);
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
