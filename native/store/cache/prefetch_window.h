// Bytes that plans brought up and nobody has used yet.
#pragma once

#include <cstdint>

#include "store/cache/entry.h"
#include "store/cache/job_counters.h"

namespace memd {

/// Counts its bytes, and what becomes of them; EntryPrefetch says it of each entry. Owned by
/// the Job; the server thread calls everything; nothing blocks.
class PrefetchWindow {
 public:
  explicit PrefetchWindow(JobCounters& counters) : counters_(counters) {}

  uint64_t bytes() const { return bytes_; }
  /// The part of them that is being read.
  uint64_t reading_bytes() const { return reading_bytes_; }

  void begin(Entry& entry) {
    entry.prefetch().begin();
    bytes_ += entry.bytes();
    reading_bytes_ += entry.bytes();
    counters_.prefetched_bytes += entry.bytes();
  }
  void end_reading(const Entry& entry) { reading_bytes_ -= entry.bytes(); }
  /// Somebody asks for it.
  void note_asked(Entry& entry) {
    if (entry.prefetch().note_asked()) ++counters_.prefetch_late;
  }
  /// It is used, or gone.
  void end(Entry& entry, bool is_used = false) {
    const EntryPrefetch::State was = entry.prefetch().end();
    if (was == EntryPrefetch::State::no) return;
    bytes_ -= entry.bytes();
    if (was == EntryPrefetch::State::late) return;
    if (is_used) {
      ++counters_.prefetch_hits;
    } else {
      counters_.prefetch_unused_bytes += entry.bytes();
    }
  }

 private:
  JobCounters& counters_;
  uint64_t bytes_ = 0;
  uint64_t reading_bytes_ = 0;
};

}  // namespace memd
