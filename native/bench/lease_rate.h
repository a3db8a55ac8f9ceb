// How long a lease takes, beside the least that it could take.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "ring/client_session.h"

namespace memd {

struct LeaseRateOptions {
  uint32_t shard_id = 0;  // resident, written, and of nobody who writes
  uint32_t count = 0;     // of each kind, a round
  uint32_t round_count = 0;
};

/// Times of the runs of one round, in seconds.
struct Quantiles {
  double p50 = 0;
  double p99 = 0;
};

/// One for each round; what is measured and its limit take turns.
struct LeaseRate {
  std::vector<Quantiles> resident;   // lease and release without a request
  std::vector<Quantiles> atomics;    // an atomic addition and a subtraction in shared memory
  std::vector<Quantiles> requested;  // the same lease by request
  std::vector<Quantiles> handed;     // a word to another thread that waits for it, and back
};

/// Blocks, and starts a thread. Refused: no leases, no rounds; `not_found` where the shard is not
/// leased without a request.
Result<LeaseRate> measure_leases(ClientSession& session, const LeaseRateOptions& options);

}  // namespace memd
