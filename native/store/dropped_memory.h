// The memory of dropped jobs, until its last segment is destroyed.
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "arena/segment.h"
#include "store/cache/job_memory.h"
#include "store/journal/job_ledger.h"

namespace memd {

/// A trainer may still have a segment mapped, so the server destroys it and makes a fresh one,
/// which takes milliseconds. Until then the next daemon must find its claim in the job's ledger: a
/// segment without one counts as clean. Owned by the ShardStore; the server thread calls
/// everything.
class DroppedMemory {
 public:
  void add(uint64_t job_id, JobLedger ledger, std::unique_ptr<JobMemory> memory) {
    if (ledger.is_open()) {
      const std::vector<uint64_t> ids = memory->segment_ids();
      kept_.push_back(
          {.job_id = job_id, .ledger = std::move(ledger), .segment_ids = {ids.begin(), ids.end()}});
    }
    memories_.push_back(std::move(memory));
  }
  /// Those of a job that got no memory, and which no ledger claims.
  void add(std::vector<Segment> segments) {
    std::move(segments.begin(), segments.end(), std::back_inserter(segments_));
  }
  /// For the server to destroy. One at a time leaves a job's memory, so that no turn grows with it.
  std::optional<Segment> take_segment() {
    while (segments_.empty() && !memories_.empty()) {
      if (auto segment = memories_.back()->take_segment()) return segment;
      memories_.pop_back();
    }
    if (segments_.empty()) return std::nullopt;
    Segment segment = std::move(segments_.back());
    segments_.pop_back();
    return segment;
  }
  /// Returns the jobs whose last segment this was: their ledger is nobody's.
  std::vector<uint64_t> destroyed(uint64_t segment_id) {
    std::vector<uint64_t> job_ids;
    std::erase_if(kept_, [&](Kept& kept) {
      kept.segment_ids.erase(segment_id);
      if (!kept.segment_ids.empty()) return false;
      job_ids.push_back(kept.job_id);
      return true;
    });
    return job_ids;
  }

 private:
  struct Kept {
    uint64_t job_id = 0;
    JobLedger ledger;
    std::set<uint64_t> segment_ids;
  };

  std::vector<std::unique_ptr<JobMemory>> memories_;
  std::vector<Segment> segments_;
  std::vector<Kept> kept_;
};

}  // namespace memd
