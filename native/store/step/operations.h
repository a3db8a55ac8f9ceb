// Operations of one job, one at a time: steps, syncs, flushes, access to moments, the drop.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "base/status.h"

namespace memd {

/// Owned by its Job; the server thread calls everything; nothing blocks.
class Operations {
 public:
  /// Runs with ok when its turn comes, or with the reason why it never comes.
  using Start = std::function<void(const Status&)>;
  struct Open {
    const char* kind = "operation";  // as in_flight() names it
    uint64_t since_ns = 0;           // when it was enqueued
    const char* phase = "";          // of the one that runs
  };

  /// Starts at once if nothing runs.
  void enqueue(const char* kind, uint64_t now_ns, Start start);
  /// The one that runs has ended; the next one starts. It may drop the job and this object with it.
  void end();

  bool is_running() const { return is_running_; }
  bool is_idle() const { return !is_running_ && waiting_.empty(); }
  /// The phase of the one that runs.
  void set_phase(const char* phase) { running_.phase = phase; }
  /// No lease of a writer begins: the one that runs has seen that nobody writes a parameter, and
  /// has not begun to write back what is dirty. Else half of what a writer wrote would be
  /// committed.
  void hold_writers(bool holds) { holds_writers_ = holds; }
  bool holds_writers() const { return holds_writers_; }

  /// The one that runs, and those that wait, in their order.
  std::vector<Open> open() const;
  /// Those that wait; the job ends, and the caller answers them.
  std::vector<Start> take_waiting();

 private:
  struct Waiting {
    Open open;
    Start start;
  };

  std::deque<Waiting> waiting_;
  Open running_;
  bool is_running_ = false;
  bool holds_writers_ = false;
};

}  // namespace memd
