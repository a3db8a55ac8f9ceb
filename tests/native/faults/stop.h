// A daemon that stands still at one of its moments, as if it had been killed there.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/failpoint.h"

namespace memd::testing {

/// Stops the thread that reaches a moment for the n-th time, for good. Threads wait in it: it is
/// not to be destroyed where one was stopped.
class Stop {
 public:
  Stop(std::string name, uint64_t hit) : name_(std::move(name)), hit_(hit) {
    failpoint::set_observer([this](std::string_view reached) { reach(reached); });
  }
  ~Stop() { failpoint::set_observer({}); }

  void reach(std::string_view reached) {
    std::unique_lock lock(mutex_);
    const uint64_t count = ++hits[std::string(reached)];
    if (reached != name_ || count != hit_) return;
    stopped_on = std::this_thread::get_id();
    changed_.notify_all();
    changed_.wait(lock, [] { return false; });
  }
  /// The server thread ends its turns.
  bool is_stopped() {
    const std::lock_guard lock(mutex_);
    return stopped_on.has_value();
  }
  void end_turns() {
    const std::lock_guard lock(mutex_);
    turns_ended_ = true;
    changed_.notify_all();
  }
  /// Until the server thread or the step has come to its end.
  void wait(std::thread::id server) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return turns_ended_ || stopped_on == server; });
  }

  std::optional<std::thread::id> stopped_on;
  std::map<std::string, uint64_t> hits;

 private:
  const std::string name_;
  const uint64_t hit_;
  bool turns_ended_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace memd::testing
