// Which job something is for, and how much of what is shared the job gets.
#pragma once

#include <cmath>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/status.h"

namespace memd {

/// Ids are never reused. 0 is the daemon itself: commits, which are for all jobs, and verification.
struct JobId {
  uint64_t value = 0;
  auto operator<=>(const JobId&) const = default;
};
inline constexpr JobId kDaemonJob{};

/// If two jobs want the same device or the same worker all the time, one of weight 3 gets three
/// times as much as one of weight 1. Kept in thousandths, since it is stored and added up.
class JobWeight {
 public:
  static constexpr uint32_t kOne = 1000;
  // A round is as long as all weights together, and a job of the least weight is passed over 10
  // times for each of its turns: wider bounds cost latency, and nobody has asked for more.
  static constexpr uint32_t kMin = kOne / 10;
  static constexpr uint32_t kMax = kOne * 10;

  JobWeight() = default;
  static Result<JobWeight> of(double weight) {
    constexpr double least = static_cast<double>(kMin) / kOne;
    constexpr double most = static_cast<double>(kMax) / kOne;
    // Not a number is in no range.
    if (!(weight >= least && weight <= most)) {
      return error(StatusCode::invalid_argument,
                   "a job's weight is a number from ",
                   least,
                   " to ",
                   most,
                   ": ",
                   weight);
    }
    return JobWeight(static_cast<uint32_t>(std::lround(weight * kOne)));
  }
  static bool is_code(uint32_t code) { return code >= kMin && code <= kMax; }
  /// `code` is_code().
  static JobWeight of_code(uint32_t code) { return JobWeight(code); }

  /// Thousandths.
  uint32_t code() const { return code_; }
  double value() const { return static_cast<double>(code_) / kOne; }
  bool operator==(const JobWeight&) const = default;

 private:
  explicit JobWeight(uint32_t code) : code_(code) {}
  uint32_t code_ = kOne;
};

}  // namespace memd

template <>
struct std::hash<memd::JobId> {
  size_t operator()(memd::JobId job) const noexcept { return std::hash<uint64_t>()(job.value); }
};
