// How far a job is, in memory and on disk, and why it goes no further.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status.h"

namespace memd {

/// Owned by its Job; the server thread calls everything; nothing blocks. Steps move it, a commit on
/// disk says what is durable, and all others read it.
class JobProgress {
 public:
  uint64_t committed_step() const { return committed_step_; }
  /// The step that the job is at after a power cut; 0 also if that is no step.
  uint64_t durable_step() const {
    if (undurable_since_ == 0) return durable_step_;
    uint64_t step = 0;
    for (const uint64_t each : snapshot_steps_) {
      if (each < undurable_since_) step = each;
    }
    return step;
  }
  /// JobRecord's, of the catalogue that the next commit writes.
  uint64_t undurable_since() const { return undurable_since_; }
  /// Why the job takes no calls any more: a step failed after tiles had been updated in place, or
  /// what is on disk is no step. ok otherwise.
  const Status& stopped() const { return stopped_; }
  /// It becomes what the disk says once nobody uses it any more.
  bool goes_to_disk() const { return goes_to_disk_; }
  /// A checkpoint is being loaded into the job, or that broke off and the job has not gone back
  /// yet: it is of no step. No step begins, and nobody attaches.
  bool is_loading() const { return is_loading_; }
  /// The one that loads; 0: nobody knows, as after another daemon.
  uint64_t loading_session() const { return loading_session_; }
  /// Why the last step in memory that was to be on disk as well is not; ok once one is.
  const Status& disk_error() const { return disk_error_; }

  /// At start: as a record says.
  void restore(uint64_t committed_step, uint64_t durable_step, uint64_t undurable_since) {
    committed_step_ = committed_step;
    durable_step_ = durable_step;
    undurable_since_ = undurable_since;
  }

  /// The step that is being committed counts.
  void begin_step() { ++committed_step_; }
  /// Its commit failed.
  void undo_step() {
    MEMD_CHECK(committed_step_ > 0);
    --committed_step_;
  }
  /// For the next commit; returns what it was.
  uint64_t set_undurable_since(uint64_t step) { return std::exchange(undurable_since_, step); }
  /// A job with tier host goes back to the newest of these from before what is on disk was no step
  /// any more; empty: it has none, or no tier host.
  void set_snapshot_steps(std::vector<uint64_t> steps) { snapshot_steps_ = std::move(steps); }
  void fail_on_disk(Status why) { disk_error_ = std::move(why); }
  /// A catalogue is on disk. `durable_step`: 0 where what it names is no step.
  void committed_on_disk(uint64_t durable_step) {
    durable_step_ = durable_step;
    disk_error_ = Status::ok();
  }

  /// The snapshot of a load is asked for, or it is gone.
  void set_loading(bool is_loading, uint64_t session_id = 0) {
    is_loading_ = is_loading;
    loading_session_ = session_id;
  }
  void stop(Status why) { stopped_ = std::move(why); }
  /// Memory is of no step: the job goes on from what is on disk.
  void return_to_disk() { goes_to_disk_ = true; }
  /// Memory has what the disk has not.
  void go_on() { stopped_ = Status::ok(); }

 private:
  uint64_t committed_step_ = 0;
  uint64_t durable_step_ = 0;
  std::vector<uint64_t> snapshot_steps_;
  uint64_t undurable_since_ = 0;
  Status stopped_;
  Status disk_error_;
  bool goes_to_disk_ = false;
  bool is_loading_ = false;
  uint64_t loading_session_ = 0;
};

}  // namespace memd
