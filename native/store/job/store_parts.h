// References that the owners of a store share.
#pragma once

#include <cstdint>

#include "arena/pool.h"
#include "base/clock.h"
#include "base/status.h"
#include "base/workers.h"
#include "io/io_queue.h"
#include "store/cache/sessions.h"
#include "store/job/job.h"
#include "store/job/jobs.h"
#include "store/journal/keepsakes.h"
#include "store/space/commit.h"
#include "store/space/extent_store.h"

namespace memd {

/// References that live as long as the ShardStore.
struct StoreParts {
  Pool& pool;
  IoQueue& io;
  ExtentStore& extents;
  Workers& workers;
  const Clock& clock;
  Keepsakes& keepsakes;
  Commits& commits;
  Jobs& jobs;
  Sessions& sessions;

  /// The job that the session is attached to; fenced where the session has ended.
  Result<Job*> job_of(uint64_t session_id) const {
    const auto found = sessions.find(session_id);
    if (found == sessions.end()) {
      return error(StatusCode::fenced,
                   "the daemon gave this session up (its process ended, or it detached); connect "
                   "again: session ",
                   session_id);
    }
    return jobs.find(found->second->job_id);
  }
};

}  // namespace memd
