#include "arena/addresses.h"

#include <sys/mman.h>

#include "base/check.h"

namespace memd {
namespace {

constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

std::byte* reserve_addresses(uint64_t bytes) {
  void* const mapping = ::mmap(nullptr, bytes + kAddressAlignmentBytes, PROT_NONE, kFlags, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::byte*>(mapping);
  const auto address = reinterpret_cast<uintptr_t>(start);
  const uint64_t head_bytes = align_up(address, kAddressAlignmentBytes) - address;
  const uint64_t tail_bytes = kAddressAlignmentBytes - head_bytes;
  if (head_bytes != 0) MEMD_CHECK_EQ(::munmap(start, head_bytes), 0);
  MEMD_CHECK_EQ(::munmap(start + head_bytes + bytes, tail_bytes), 0);
  return start + head_bytes;
}

void reserve_in_place(std::byte* address, uint64_t bytes) {
  MEMD_CHECK(::mmap(address, bytes, PROT_NONE, kFlags | MAP_FIXED, -1, 0) != MAP_FAILED);
}

}  // namespace memd
