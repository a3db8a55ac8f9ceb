// Operations of one job, one at a time: steps, syncs, flushes, access to moments, the drop. Some
// run beside others of their kind.
#pragma once

#include <cstddef>
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
    const char* phase = "";          // if it runs alone
    bool runs = false;
  };

  /// Starts at once if nothing runs, or if all that run are of this kind and less than
  /// `at_once_max`, and nothing else waits.
  void enqueue(const char* kind, uint64_t now_ns, Start start, size_t at_once_max = 1);
  /// One that runs has ended; the next ones start. The last of them may drop the job and this
  /// object with it.
  void end();

  bool is_running() const { return !running_.empty(); }
  bool is_idle() const { return running_.empty() && waiting_.empty(); }
  /// The phase of the one that runs.
  void set_phase(const char* phase) { running_.front().phase = phase; }
  /// No lease of a writer begins: the one that runs has seen that nobody writes a parameter, and
  /// has not begun to write back what is dirty. Else half of what a writer wrote would be
  /// committed.
  void hold_writers(bool holds) { holds_writers_ = holds; }
  bool holds_writers() const { return holds_writers_; }

  /// Those that run, and those that wait, in their order.
  std::vector<Open> open() const;
  /// Those that wait; the job ends, and the caller answers them.
  std::vector<Start> take_waiting();

 private:
  struct Waiting {
    Open open;
    size_t at_once_max;
    Start start;
  };

  bool may_start(const Waiting& next) const;
  void start_next();

  std::deque<Waiting> waiting_;
  std::deque<Open> running_;  // several only of one kind
  size_t at_once_max_ = 1;    // of those that run
  bool holds_writers_ = false;
};

}  // namespace memd
