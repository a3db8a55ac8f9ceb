#include "server/turn_clock.h"

#include <time.h>

#include "base/check.h"

namespace memd {
namespace {

uint64_t read_ns(clockid_t clock) {
  timespec now{};
  MEMD_CHECK_EQ(clock_gettime(clock, &now), 0);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

void TurnClock::begin() {
  cpu_ns_ = read_ns(CLOCK_THREAD_CPUTIME_ID);
  wall_ns_ = read_ns(CLOCK_MONOTONIC);
  phases_.begin();
}

void TurnClock::end() {
  const uint64_t cpu_began_ns = cpu_ns_;
  const uint64_t wall_began_ns = wall_ns_;
  const TurnPhaseSeconds phases = phases_.seconds();
  begin();
  const double cpu_seconds = static_cast<double>(cpu_ns_ - cpu_began_ns) * 1e-9;
  const double wall_seconds = static_cast<double>(wall_ns_ - wall_began_ns) * 1e-9;
  statistics_.cpu_seconds.add(cpu_seconds);
  statistics_.wall_seconds.add(wall_seconds);
  if (cpu_seconds > statistics_.cpu_seconds_max) {
    statistics_.cpu_seconds_max = cpu_seconds;
    statistics_.phases_of_cpu_max = phases;
  }
  if (wall_seconds > statistics_.wall_seconds_max) {
    statistics_.wall_seconds_max = wall_seconds;
    statistics_.phases_of_wall_max = phases;
  }
}

}  // namespace memd
