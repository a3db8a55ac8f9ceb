// One client process that is attached to a job.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "ring/server_ring.h"
#include "store/cache/eviction.h"
#include "store/journal/ledger_contents.h"

namespace memd {

struct Session {
  uint64_t session_id = 0;
  uint64_t job_id = 0;
  ServerRing ring;
  uint32_t request_count_open = 0;  // taken from the ring, not answered
  SessionOwner owner{};
  /// The last step of this session that was committed, by the number its client gave; 0: none.
  uint64_t step_committed = 0;
  /// StepRequest::call of the newest step that was asked for, and of the one that failed last, with
  /// the reason.
  uint64_t call_seen = 0;
  uint64_t call_failed = 0;
  Status call_failure{};
  /// In the job's policy while the session is attached.
  std::unique_ptr<SessionPlan> plan = nullptr;
};

}  // namespace memd
