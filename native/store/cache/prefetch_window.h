// Bytes that plans brought up and nobody has used yet.
#pragma once

#include <cstdint>

#include "store/cache/entry.h"
#include "store/cache/job_counters.h"

namespace memd {

/// Counts its bytes, and what becomes of them; EntryPrefetch says it of each entry, and changes
/// here alone. Owned by the JobCache; the server thread calls everything; nothing blocks.
class PrefetchWindow {
 public:
  explicit PrefetchWindow(JobCounters& counters) : counters_(counters) {}

  uint64_t bytes() const { return bytes_; }
  /// The part of them that is being read.
  uint64_t reading_bytes() const { return reading_bytes_; }

  void begin(Entry& entry) {
    entry.prefetch_.begin();
    bytes_ += entry.bytes();
    reading_bytes_ += entry.bytes();
    counters_.prefetched_bytes += entry.bytes();
  }
  void end_reading(Entry& entry, bool is_ok) {
    reading_bytes_ -= entry.bytes();
    entry.prefetch_.note_read(is_ok);
  }
  /// Somebody asks for it.
  void note_asked(Entry& entry) {
    if (entry.prefetch_.note_asked()) ++counters_.prefetch_late;
  }
  void note_used(Entry& entry) {
    end(entry, true);
    entry.prefetch_.note_used();
  }
  /// It is gone, or not needed soon any more.
  void end(Entry& entry) { end(entry, false); }

 private:
  void end(Entry& entry, bool is_used) {
    const EntryPrefetch::State was = entry.prefetch_.end();
    if (was == EntryPrefetch::State::no) return;
    bytes_ -= entry.bytes();
    if (was == EntryPrefetch::State::late) return;
    if (is_used) {
      ++counters_.prefetch_hits;
    } else {
      counters_.prefetch_unused_bytes += entry.bytes();
    }
  }

  JobCounters& counters_;
  uint64_t bytes_ = 0;
  uint64_t reading_bytes_ = 0;
};

}  // namespace memd
