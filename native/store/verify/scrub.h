// Verification in the background: what lies on disk is read and compared before anybody needs it.
#pragma once

#include <cstdint>
#include <functional>

#include "base/clock.h"
#include "store/verify/extent_walk.h"
#include "store/verify/scrub_statistics.h"
#include "store/verify/verification.h"

namespace memd {

/// Walks over every extent that a catalogue on disk names, and over catalogues and root: one extent
/// at a time, at the lowest priority, at most so many bytes a second. Small volumes are gone
/// through once an hour, large ones without end. Owned by the ShardStore; the server thread;
/// nothing blocks.
class Scrub {
 public:
  Scrub(const VerificationParts& parts, const Clock& clock)
      : clock_(clock),
        extents_(parts.extents),
        places_(parts.places),
        walk_(parts.places),
        verification_(parts) {}

  /// 0: it reads nothing more, and finishes what is in flight.
  void set_rate(uint64_t bytes_per_second);
  /// Reads on, where it is time. True where there is more to look through at once.
  bool advance();
  /// When advance() has something to do next; 0: never, or something in flight comes first.
  uint64_t next_ns() const;
  bool is_idle() const { return !verification_.is_running(); }
  ScrubStatistics statistics() const;

 private:
  void begin_pass();
  void end_pass();
  void told(const ExtentWalk::Found& found, Verdict verdict, const Status& status);

  const Clock& clock_;
  ExtentStore& extents_;
  const ExtentPlaces& places_;
  ExtentWalk walk_;
  Verification verification_;
  uint64_t rate_ = 0;         // bytes a second
  uint64_t due_ns_ = 0;       // of the next read, for the rate
  uint64_t pass_due_ns_ = 0;  // of the next pass
  bool in_pass_ = false;
  uint32_t pass_ = 0;
  ScrubStatistics statistics_;
  uint64_t last_pass_ns_ = 0;
};

}  // namespace memd
