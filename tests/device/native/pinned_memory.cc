#include "pinned_memory.h"

#include <c10/util/Exception.h>

#include <cstdlib>

#include "device_memory.h"

namespace sim {

c10::DataPtr PinnedMemory::allocate(size_t size) {
  constexpr size_t kPageBytes = 4096;
  auto locked = machine().lock();
  for (auto* address : std::exchange(leaving_, {})) release(address);
  // A byte at least: find() knows a tensor without elements too.
  auto bytes = (size + kPageBytes) / kPageBytes * kPageBytes;
  auto* address = static_cast<char*>(std::aligned_alloc(kPageBytes, bytes));
  TORCH_CHECK(address, "no pinned memory: ", bytes, " bytes wanted");
  pin(address, size + 1);
  return {address, address, &PinnedMemory::release, c10::kCPU};
}

void PinnedMemory::pin(const char* address, size_t size) {
  auto locked = machine().lock();
  auto next = ends_.lower_bound(address + size);
  TORCH_CHECK(next == ends_.begin() || std::prev(next)->second <= address,
              "a part of these ",
              size,
              " bytes is registered already");
  ends_[address] = address + size;
}

void PinnedMemory::unpin(const char* address) {
  auto locked = machine().lock();
  auto found = ends_.find(address);
  TORCH_CHECK(found != ends_.end(), "no registered range begins at this address");
  machine().host_touches({address, found->second, true});
  forget(address);
}

const char* PinnedMemory::find(const void* address) {
  auto locked = machine().lock();
  auto next = ends_.upper_bound(static_cast<const char*>(address));
  if (next == ends_.begin() || std::prev(next)->second <= address) return nullptr;
  return std::prev(next)->first;
}

std::vector<Span> PinnedMemory::parts(const Span& span) {
  auto locked = machine().lock();
  std::vector<Span> found;
  for (const auto& [begin, end] : ends_)
    if (begin < span.end && span.begin < end)
      found.push_back({std::max(begin, span.begin), std::min(end, span.end), span.is_written});
  return found.empty() ? std::vector{span} : found;
}

void PinnedMemory::release(void* context) {
  auto locked = machine().lock();
  auto* address = static_cast<char*>(context);
  if (!machine().is_quiet(address, pinned().ends_.at(address)))
    return pinned().leaving_.push_back(address);
  pinned().forget(address);
  std::free(address);
}

void PinnedMemory::forget(const char* address) {
  machine().forget(address, ends_.at(address));
  ends_.erase(address);
}

PinnedMemory& pinned() {
  static auto* pinned = new PinnedMemory;
  return *pinned;
}

const char* region_of(const char* address) {
  if (const auto* segment = memory().segment_of(address)) return segment;
  const auto* range = pinned().find(address);
  return range ? range : address;
}

}  // namespace sim
