// A trainer's request for a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "optim/adam.h"

namespace memd {

struct StepGroup {
  AdamSettings settings;
  std::vector<uint32_t> shard_ids;
};

/// Shards whose gradients these sessions have added to.
struct SummedGradients {
  std::vector<uint64_t> session_ids;
  std::vector<uint32_t> shard_ids;
};

/// Outlives the daemon in the ledger: a field that is added is encoded, too.
struct StepRequest {
  uint64_t session_id = 0;
  std::vector<StepGroup> groups;
  std::vector<std::pair<uint32_t, uint32_t>> staged_buffers;  // staged shard → buffer
  /// The step that this closes, so that a call may be repeated: what this session has committed
  /// under the number, or is committing, is not done twice. 0: not said.
  uint64_t step = 0;
  /// Counts the steps that this session asks for, also those that fail: leases say which of them
  /// they follow. 0: not said.
  uint64_t call = 0;
  /// Gradients that were not of the caller alone when the step was closed. If the step fails, they
  /// are these sessions' again.
  std::vector<SummedGradients> summed;
};

/// StepRequest::session_id and call of a rank that closes the same step.
struct StepCall {
  uint64_t session_id = 0;
  uint64_t call = 0;
};

std::vector<std::byte> encode_step(const StepRequest& request);
Result<StepRequest> decode_step(std::span<const std::byte> bytes);

}  // namespace memd
