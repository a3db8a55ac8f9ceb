// How much memory this process may still take, and how much of it may be locked.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace memd {

struct AvailableMemory {
  uint64_t bytes = 0;
  std::string source;  // the file whose figure is the lowest
};

/// The lowest of MemAvailable and of what the memory limits of this process's cgroup (v1 or v2) and
/// its ancestors leave; page cache counts as free, as it can be reclaimed. Nothing where no file
/// tells. `root` precedes every path, for tests.
std::optional<AvailableMemory> available_memory(const std::string& root = "");

struct MemlockAllowance {
  uint64_t limit_bytes = 0;   // RLIMIT_MEMLOCK
  uint64_t locked_bytes = 0;  // already locked by this process

  uint64_t bytes_left() const {
    return limit_bytes > locked_bytes ? limit_bytes - locked_bytes : 0;
  }
};

/// Nothing where this process may lock any amount: an unlimited RLIMIT_MEMLOCK, or CAP_IPC_LOCK.
std::optional<MemlockAllowance> memlock_allowance();

}  // namespace memd
