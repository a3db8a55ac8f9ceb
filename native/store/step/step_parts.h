// References that a job's steps share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/histogram.h"
#include "store/cache/plan_progress.h"
#include "store/cache/room.h"
#include "store/cache/session.h"
#include "store/cache/training_group.h"
#include "store/journal/durable_job.h"
#include "store/space/commit.h"
#include "store/state/durable_state.h"
#include "store/state/job_journal.h"
#include "store/state/memory_commits.h"
#include "store/state/private_state.h"
#include "store/state/state_parts.h"
#include "store/step/operations.h"
#include "store/step/step_gate.h"

namespace memd {

/// Times of all jobs' steps that were made.
struct StepTimes {
  SecondsHistogram seconds{kStepSecondsBounds};
  StepPhases phases;
};

/// All of it outlives the Steps that are made with it.
struct StepParts {
  StateParts job;
  PrivateState& state;
  const std::vector<std::shared_ptr<Session>>& sessions;
  TrainingGroup& group;
  JobProgress& progress;
  DurableState& durable;
  JobJournal& journal;
  PlanProgress& plans;
  Room& room;
  Operations& operations;
  Commits& commits;
  MemoryCommits& memory_commits;
  StepTimes& times;
  StepGate& gate;

  /// nullptr where it has ended.
  Session* session(uint64_t session_id) const {
    const auto found = std::find_if(sessions.begin(), sessions.end(), [&](const auto& each) {
      return each->session_id == session_id;
    });
    return found == sessions.end() ? nullptr : found->get();
  }
};

}  // namespace memd
