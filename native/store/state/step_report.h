// The work of one step, and how long its phases took.
#pragma once

#include <cstdint>
#include <string>

#include "base/histogram.h"

namespace memd {

/// The work of one step (or sync). Times are sums over tiles, which overlap; commit is wall time
/// from the last tile to the durable superblock.
struct StepReport {
  uint64_t committed_step = 0;  // survives the process where its memory is kept
  uint64_t durable_step = 0;    // survives a power cut
  double read_seconds = 0;
  double update_seconds = 0;
  double write_seconds = 0;
  double commit_seconds = 0;
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  /// Empty, or why the step is in memory alone though its turn to be on disk has come.
  std::string disk_error;
};

/// `early` was done for the step before it was closed.
inline void add_work(StepReport& step, const StepReport& early) {
  step.read_seconds += early.read_seconds;
  step.update_seconds += early.update_seconds;
  step.write_seconds += early.write_seconds;
  step.read_bytes += early.read_bytes;
  step.written_bytes += early.written_bytes;
}

/// StepReport's times, one observation a step.
struct StepPhases {
  SecondsHistogram read{kStepSecondsBounds};
  SecondsHistogram update{kStepSecondsBounds};
  SecondsHistogram write{kStepSecondsBounds};
  SecondsHistogram commit{kStepSecondsBounds};
};

inline void count_step(StepPhases& phases, const StepReport& report) {
  phases.read.add(report.read_seconds);
  phases.update.add(report.update_seconds);
  phases.write.add(report.write_seconds);
  phases.commit.add(report.commit_seconds);
}

}  // namespace memd
