#include "store/turn_parts.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/bulk_bytes.h"
#include "base/units.h"

namespace memd {
namespace {

// A piece of a job's commit in memory: some 5 µs.
constexpr size_t kEncodedBytes = 1_KiB;
// All jobs' pieces in one turn.
constexpr size_t kEncodedTurnBytes = kTurnBytesMax / 4;

}  // namespace

bool TurnParts::advance(TurnPhases& phases) {
  struct TurnPart {
    bool (TurnParts::*run)();
    TurnPhase phase;
  };
  static constexpr std::array kParts{
      TurnPart{&TurnParts::serve_sessions, TurnPhase::serve},
      TurnPart{&TurnParts::start_tiles, TurnPhase::tiles},
      TurnPart{&TurnParts::advance_leases, TurnPhase::leases},
      TurnPart{&TurnParts::look_ahead, TurnPhase::prefetch},
      TurnPart{&TurnParts::advance_conditions, TurnPhase::operations},
      TurnPart{&TurnParts::advance_early_updates, TurnPhase::operations},
      // Again: conditions and early updates submit tiles.
      TurnPart{&TurnParts::start_tiles, TurnPhase::tiles},
      TurnPart{&TurnParts::end_unused_jobs, TurnPhase::upkeep},
      TurnPart{&TurnParts::encode_memory_commits, TurnPhase::upkeep},
      TurnPart{&TurnParts::advance_commits, TurnPhase::upkeep},
      TurnPart{&TurnParts::advance_extents, TurnPhase::upkeep},
      TurnPart{&TurnParts::verify, TurnPhase::upkeep},
      TurnPart{&TurnParts::has_woken, TurnPhase::upkeep},
  };
  bool progress = grant_filled();
  progress |= circle_.run(kParts.size(), uses_.turn, [&](size_t part) {
    if (!(this->*kParts[part].run)()) return false;
    phases.end(kParts[part].phase);
    return true;
  });
  end_turn();
  return progress;
}

bool TurnParts::grant_filled() {
  bool progress = false;
  uint64_t job_id = 0;
  // A grant may drop another job: then one is asked twice.
  for (size_t left = uses_.jobs.count(); left > 0; --left) {
    Job* const job = uses_.jobs.find_behind(job_id);
    if (job == nullptr) break;
    job_id = job->job_id();
    progress |= job->cache().leases().grant_filled();
  }
  return progress;
}

template <typename Visit>
bool TurnParts::visit_jobs(uint64_t& last, const Visit& visit) {
  bool progress = false;
  uint64_t job_id = last;
  for (size_t left = uses_.jobs.count(); left > 0; --left) {
    Job* const job = uses_.jobs.find_behind(job_id);
    if (job == nullptr) break;
    job_id = job->job_id();
    if (!visit(*job)) continue;
    progress = true;
    last = job_id;
    if (uses_.turn.is_spent()) break;
  }
  return progress;
}

bool TurnParts::start_tiles() {
  return visit_jobs(tiles_last_,
                    [this](Job& job) { return job.state().tasks().advance(uses_.turn); });
}

bool TurnParts::advance_leases() {
  return visit_jobs(leases_last_,
                    [this](Job& job) { return job.cache().leases().advance(uses_.turn); });
}

bool TurnParts::look_ahead() {
  return visit_jobs(ahead_last_, [](Job& job) { return job.cache().prefetcher().look_ahead(); });
}

bool TurnParts::advance_conditions() {
  return visit_jobs(conditions_last_, [this](const Job& visited) {
    const uint64_t job_id = visited.job_id();
    bool progress = false;
    size_t position = 0;
    // The action behind a condition may drop the job.
    while (Job* const job = uses_.jobs.find(job_id)) {
      const auto then = job->conditions().take_next(position);
      if (!then) break;
      (*then)();
      progress = true;
      if (uses_.turn.is_spent()) break;
    }
    return progress;
  });
}

bool TurnParts::advance_early_updates() {
  return visit_jobs(early_last_, [](Job& job) {
    if (!job.state().early().has_waiting() || job.operations().is_running()) return false;
    return job.state().early().advance();
  });
}

bool TurnParts::encode_memory_commits() {
  bool progress = false;
  size_t bytes = 0;
  const auto next = [this] {
    // By ids, in a circle: each job has the same part.
    MemoryCommits* found = nullptr;
    uint64_t found_id = 0;
    for (const auto& [job_id, job] : uses_.jobs) {
      if (!job->memory_commits().is_encoding()) continue;
      const auto distance = [this](uint64_t id) { return id - encoded_last_ - 1; };
      if (found != nullptr && distance(found_id) <= distance(job_id)) continue;
      found = &job->memory_commits();
      found_id = job_id;
    }
    encoded_last_ = found_id;
    return found;
  };
  while (MemoryCommits* const commits = next()) {
    commits->advance(kEncodedBytes);
    progress = true;
    bytes += kEncodedBytes;
    if (bytes >= kEncodedTurnBytes || uses_.turn.is_spent()) break;
  }
  return progress;
}

bool TurnParts::verify() {
  const bool scrubbed = uses_.scrub.advance();
  return uses_.live_check.advance() || scrubbed;
}

bool TurnParts::has_woken() {
  return std::any_of(uses_.jobs.begin(), uses_.jobs.end(), [](const auto& it) {
    return it.second->cache().waiters().has_woken();
  });
}

}  // namespace memd
