// Durations counted in buckets that Prometheus can add up over daemons.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace memd {

inline constexpr size_t kBoundCount = 16;

/// Upper bounds in seconds, each twice the one before; a last bucket counts what is slower.
using SecondsBounds = std::array<double, kBoundCount>;

constexpr SecondsBounds seconds_bounds(double first_seconds) {
  SecondsBounds bounds{};
  for (double& bound : bounds) {
    bound = first_seconds;
    first_seconds *= 2;
  }
  return bounds;
}

/// 62.5 µs, less than an NVMe disk's read, to 2 s, more than a queue of 4 MiB chunks takes.
inline constexpr SecondsBounds kIoSecondsBounds = seconds_bounds(62.5e-6);
/// 1 ms to 33 s, for steps and commits.
inline constexpr SecondsBounds kStepSecondsBounds = seconds_bounds(1e-3);

/// 3.125 µs to 102 ms, for turns of the server thread.
inline constexpr SecondsBounds kTurnSecondsBounds = seconds_bounds(3.125e-6);

/// Owned by one thread; others see copies.
class SecondsHistogram {
 public:
  explicit SecondsHistogram(const SecondsBounds& bounds) : bounds_(&bounds) {}
  /// Only the address is kept.
  explicit SecondsHistogram(SecondsBounds&&) = delete;

  void add(double seconds) {
    size_t bucket = 0;
    while (bucket < kBoundCount && seconds > (*bounds_)[bucket]) ++bucket;
    ++counts_[bucket];
    ++count_;
    sum_seconds_ += seconds;
  }

  /// Counts of each bucket alone, the last for what is above every bound.
  const std::array<uint64_t, kBoundCount + 1>& counts() const { return counts_; }
  uint64_t count() const { return count_; }
  double sum_seconds() const { return sum_seconds_; }

 private:
  const SecondsBounds* bounds_;
  std::array<uint64_t, kBoundCount + 1> counts_{};
  uint64_t count_ = 0;
  double sum_seconds_ = 0;
};

}  // namespace memd
