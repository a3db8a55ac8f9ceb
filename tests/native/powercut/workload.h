// What is trained while power is cut, and plain memory that is trained beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "powercut/runner.h"
#include "powercut/state.h"
#include "twin.h"

namespace memd::powercut {

struct WorkloadOptions {
  /// Otherwise one operation makes one commit, so that a trainer can go on from any.
  bool beside = false;
  /// Steps are updated before they are closed: all or some of it is made early, now and then in
  /// vain, and power is cut before the step too. It leaves the same bytes.
  bool early = false;
  /// Now and then a snapshot of "train" is made or dropped, or "train" goes back to one.
  bool snapshots = false;
  /// "a" and "c" are of tier host: a power cut leaves of "train" its last snapshot, or nothing.
  bool host = false;
  /// Now and then all of "train" is loaded, in place and with a commit half-way. Before some of
  /// them another load breaks off.
  bool loads = false;
};

/// Operations 1, 2, 3 … of a seed, each of which ends with a commit: steps over all parameters or
/// some, buffers staged or put, blobs written, deleted and made again, a second job that comes and
/// goes, or is synced while the first one steps. Extents have 4 to 16 KiB. The same seed gives the
/// same operations and the same bytes. A snapshot is a job more in what is expected.
class Workload {
 public:
  explicit Workload(uint64_t seed, const WorkloadOptions& options = {});

  /// What there is after the operations so far.
  const SetState& expected() const { return expected_; }
  uint64_t operation_count() const { return operation_count_; }

  /// The next operation, in plain memory alone: where it is on disk already.
  void skip();
  /// Of an operation that makes two commits: what there is after the one and not the other. Whoever
  /// runs it is told which of the two is acknowledged.
  struct Halves {
    SetState stepped;
    SetState synced;
  };
  std::optional<Halves> next_halves() const;
  /// While a snapshot of tier host is made or gone back to: the job's step is on disk, and that is
  /// all so far.
  std::optional<SetState> next_between() const;
  /// A power cut leaves of "train" another snapshot than the newest of an earlier step: "train" has
  /// gone back from that one.
  bool leaves_older_snapshot() const;
  struct Watch {
    std::function<void()> stepped = [] {};
    std::function<void()> synced = [] {};
    std::function<void()> written = [] {};  // next_between()
  };

  /// The next operation, on `runner` as well; returns when it is acknowledged. After an error it
  /// did not happen.
  Status run(Runner& runner, const Watch& watch);
  Status run(Runner& runner) { return run(runner, {}); }

 private:
  struct Operation;
  Operation next() const;
  void apply(const Operation& operation);
  Status perform(const Operation& operation, Runner& runner, const Watch& watch) const;
  Status make_gradients(const Operation& operation, StepRequest& request, Runner& runner) const;
  /// All but the end of a load; values after a commit half-way are missing where it breaks off.
  Status load(Runner& runner, uint64_t session, const std::string& name, const Watch& watch) const;
  /// Fills in what there is.
  void expect();
  JobState train_state() const;
  /// A power cut leaves this of it.
  JobState train_left() const;

  const uint64_t seed_;
  const WorkloadOptions options_;
  uint64_t operation_count_ = 0;
  std::map<std::string, ShardSpec> specs_;  // parameters of "train"
  std::map<std::string, testing::Twin> twins_;
  std::map<std::string, std::vector<uint8_t>> bytes_;  // buffers and blobs of "train"
  uint64_t step_ = 0;
  /// "train" as it was.
  struct Kept {
    JobState state;
    std::map<std::string, testing::Twin> twins;
    std::map<std::string, std::vector<uint8_t>> bytes;
    uint64_t step = 0;
    uint64_t order = 0;
  };
  /// The snapshot that a power cut leaves of "train" if what is on disk is no step.
  const Kept* last_kept() const;
  std::map<std::string, Kept> snapshots_;  // by name
  /// Their names: last the one that was made or gone back to last, before it those from before it.
  std::vector<std::string> stood_on_;
  // With tier host: what is on disk is no step since this one, or 0.
  uint64_t undurable_since_ = 0;
  std::vector<uint8_t> other_;  // the blob of the job "other"; empty where there is no such job
  SetState expected_;
};

}  // namespace memd::powercut
