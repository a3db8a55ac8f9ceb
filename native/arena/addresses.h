// Address space without memory, for segments to be mapped in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/units.h"

namespace memd {

/// Huge pages can be mapped nowhere else, and page tables move whole.
inline constexpr uint64_t kAddressAlignmentBytes = 2_MiB;

/// Aligned addresses without access; null if none are left. The caller gives them back with
/// munmap().
std::byte* reserve_addresses(uint64_t bytes);
/// The same in place of what is mapped at `address`, in one call, so that no other thread's mapping
/// can land in a gap.
void reserve_in_place(std::byte* address, uint64_t bytes);

}  // namespace memd
