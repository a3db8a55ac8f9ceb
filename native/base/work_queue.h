// Work that waits for a processor: which job's is next.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <unordered_map>

#include "base/job_turns.h"
#include "base/units.h"

namespace memd {

/// `bytes`: copies, fills and checksums, which somebody waits for; of one job they go before its
/// updates.
enum class WorkKind : uint8_t { bytes, update };

/// For whom, and how many bytes it reads and writes, about: what the job pays for its turn.
struct WorkOrder {
  JobId job{};
  uint64_t bytes = 0;
  WorkKind kind = WorkKind::update;
};

/// Jobs take turns by bytes (JobTurns); the work of one job and kind is done in the order in which
/// it came. Owned and locked by Workers.
class WorkQueue {
 public:
  struct Work {
    WorkOrder order;
    std::function<void()> work;
    std::function<void()> done;  // may be empty
  };

  void set_weight(JobId job, JobWeight weight) { turns_.set_weight(job, weight); }
  void add(Work work);
  std::optional<Work> take();
  bool is_empty() const { return waiting_.empty(); }

 private:
  // A third of a tile of fp32, so that one of weight 3 alternates with one of weight 1 by single
  // tiles, and not by a dozen of them.
  static constexpr uint64_t kQuantumBytes = 1_MiB;

  JobTurns turns_{kQuantumBytes};
  struct Line {
    std::deque<Work> bytes, updates;
    bool is_empty() const { return bytes.empty() && updates.empty(); }
  };
  std::unordered_map<JobId, Line> waiting_;  // of jobs that have any
};

}  // namespace memd
