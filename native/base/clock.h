// Time comes in through the constructor, so that tests can hold it still.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace memd {

/// Monotonic nanoseconds from an arbitrary start.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual uint64_t now_ns() const = 0;
};

class SteadyClock final : public Clock {
 public:
  uint64_t now_ns() const override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }
};

/// One for the process. Code that is given a Clock uses that one.
inline const SteadyClock& steady_clock() {
  static const SteadyClock clock;
  return clock;
}

/// Stands still until a test moves it; any thread may look.
class ManualClock final : public Clock {
 public:
  uint64_t now_ns() const override { return now_ns_.load(std::memory_order_relaxed); }
  void advance(uint64_t nanoseconds) { now_ns_.fetch_add(nanoseconds, std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> now_ns_{0};
};

}  // namespace memd
