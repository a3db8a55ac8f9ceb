// Orders of atomics that cross processes, in short.
#pragma once

#include <atomic>

namespace memd {

inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kAcquire = std::memory_order_acquire;

}  // namespace memd
