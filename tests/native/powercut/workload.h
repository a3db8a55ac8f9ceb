// What is trained while power is cut, and plain memory that is trained beside it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "powercut/runner.h"
#include "powercut/state.h"
#include "twin.h"

namespace memd::powercut {

/// Operations 1, 2, 3 … of a seed, each of which ends with a commit: steps over all parameters or
/// some, buffers staged or put, blobs written, deleted and made again, a second job that comes and
/// goes. Extents have 4 to 16 KiB. The same seed gives the same operations and the same bytes.
class Workload {
 public:
  explicit Workload(uint64_t seed);

  /// What there is after the operations so far.
  const SetState& expected() const { return expected_; }
  uint64_t operation_count() const { return operation_count_; }

  /// The next operation, in plain memory alone: where it is on disk already.
  void skip();
  /// The next operation, on `runner` as well; returns when it is acknowledged. After an error it
  /// did not happen.
  Status run(Runner& runner);

 private:
  struct Operation;
  Operation next() const;
  void apply(const Operation& operation);
  Status perform(const Operation& operation, Runner& runner) const;
  JobState train_state() const;

  const uint64_t seed_;
  uint64_t operation_count_ = 0;
  std::map<std::string, ShardSpec> specs_;  // parameters of "train"
  std::map<std::string, testing::Twin> twins_;
  std::map<std::string, std::vector<uint8_t>> bytes_;  // buffers and blobs of "train"
  uint64_t step_ = 0;
  std::vector<uint8_t> other_;  // the blob of the job "other"; empty where there is no such job
  SetState expected_;
};

}  // namespace memd::powercut
