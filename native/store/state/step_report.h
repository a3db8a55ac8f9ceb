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

  /// Work that was done for the step before it was closed.
  void add(const StepReport& early) {
    read_seconds += early.read_seconds;
    update_seconds += early.update_seconds;
    write_seconds += early.write_seconds;
    read_bytes += early.read_bytes;
    written_bytes += early.written_bytes;
  }
};

/// StepReport's times, one observation a step.
struct StepPhases {
  SecondsHistogram read{kStepSecondsBounds};
  SecondsHistogram update{kStepSecondsBounds};
  SecondsHistogram write{kStepSecondsBounds};
  SecondsHistogram commit{kStepSecondsBounds};

  void add(const StepReport& report) {
    read.add(report.read_seconds);
    update.add(report.update_seconds);
    write.add(report.write_seconds);
    commit.add(report.commit_seconds);
  }
};

}  // namespace memd
