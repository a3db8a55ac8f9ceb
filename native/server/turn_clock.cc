#include "server/turn_clock.h"

#include <time.h>

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"

namespace memd {
namespace {

// 3 % of the requests that follow one another at once wait for a read. Of the turns beside busy
// threads more than 1 % are interrupted: 100 µs would be seen in the 99th percentile.
constexpr uint64_t kReadEveryNs = 20'000;

uint64_t read_cpu_ns() {
  timespec now{};
  MEMD_CHECK_EQ(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now), 0);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

uint64_t TurnClock::begin() {
  const uint64_t now_ns = SteadyClock().now_ns();
  begin_at(now_ns);
  return now_ns;
}

void TurnClock::begin_at(uint64_t now_ns) {
  began_ns_ = now_ns;
  phases_.begin(now_ns);
  if (now_ns - read_at_ns_ < kReadEveryNs) return;
  cpu_ns_ = read_cpu_ns();
  read_at_ns_ = now_ns;
}

uint64_t TurnClock::end() {
  const uint64_t now_ns = SteadyClock().now_ns();
  const uint64_t wall_ns = now_ns - began_ns_;
  uint64_t turn_cpu_ns = wall_ns;
  if (wall_ns >= kReadEveryNs) {
    const uint64_t cpu_before_ns = cpu_ns_;
    cpu_ns_ = read_cpu_ns();
    read_at_ns_ = now_ns;
    turn_cpu_ns = std::min(wall_ns, cpu_ns_ - cpu_before_ns);
  }
  const double cpu_seconds = static_cast<double>(turn_cpu_ns) * 1e-9;
  const double wall_seconds = static_cast<double>(wall_ns) * 1e-9;
  statistics_.cpu_seconds.add(cpu_seconds);
  statistics_.wall_seconds.add(wall_seconds);
  if (cpu_seconds > statistics_.cpu_seconds_max) {
    statistics_.cpu_seconds_max = cpu_seconds;
    statistics_.phases_of_cpu_max = phases_.seconds();
  }
  if (wall_seconds > statistics_.wall_seconds_max) {
    statistics_.wall_seconds_max = wall_seconds;
    statistics_.phases_of_wall_max = phases_.seconds();
  }
  begin_at(now_ns);
  return now_ns;
}

}  // namespace memd
