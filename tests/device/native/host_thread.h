// The state of a host thread: its clock over the work of the devices.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include "sim_clock.h"
#include "vector_clock.h"

namespace sim {

/// One thread's knowledge and simulated time. The machine's lock guards it.
struct HostThread final : c10::DebugInfoBase {
  explicit HostThread(Actor number) : actor(number) {}

  Actor actor;
  VectorClock clock;
  int64_t tick = 0;        // of its last event
  int64_t seed_count = 0;  // of the machine, when `clock` began
  Nanoseconds time = 0;
};

/// The calling thread's. Autograd's threads act for the one that called backward, which waits for
/// them meanwhile: torch hands them its debug info.
HostThread& this_host_thread();

}  // namespace sim
