// The processor time of a piece of work: other processes do not count, and a ratio of two holds on
// any machine and under a sanitizer.
#pragma once

#include <ctime>

namespace memd::testing {

/// By this thread alone.
template <typename Work>
double cpu_seconds(const Work& work) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  };
  const double began = now();
  work();
  return now() - began;
}

}  // namespace memd::testing
