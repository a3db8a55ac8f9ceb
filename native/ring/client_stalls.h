// The stalls of one client: how long its threads stood still, and what for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>

#include "ring/fork_watch.h"
#include "ring/stalls.h"

namespace memd {

/// Owns the client's sums and the names of its groups, and writes both to the session's board,
/// where the daemon reads them. A forked child has no board, and counts for itself. Owned by the
/// ClientSession; any thread may call it. group() takes a lock for a few instructions, the others
/// never block.
class ClientStalls {
 public:
  /// The board is mapped in the process that `forks` speaks of, and lives as long as this.
  ClientStalls(StallBoard& board, const ForkWatch& forks) : board_(board), forks_(forks) {}
  ClientStalls(const ClientStalls&) = delete;
  ClientStalls& operator=(const ClientStalls&) = delete;

  /// The number under which waits for parameters of this group of modules are counted: 0, that of
  /// "other", where there are too many. A longer name is cut.
  uint32_t group(std::string_view name);
  /// The caller has waited. `reason` is below kStallReasonCount.
  void note(StallPlace place, size_t reason, uint64_t ns) noexcept;
  /// From the end of one step to that of the next.
  void note_step(uint64_t wall_ns) noexcept;

  /// All that was noted in this process.
  Stalls sums() const;

 private:
  StallBoard& board_;
  const ForkWatch& forks_;
  std::mutex mutex_;  // who adds a name
  StallCounters counters_{};
  char group_names_[kStallGroupCount][kStallGroupNameBytes]{};  // those below the count stay
  std::atomic<uint32_t> group_count_{1};
};

}  // namespace memd
