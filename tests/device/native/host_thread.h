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
  Nanoseconds time = 0;
};

/// The calling thread's. Autograd's threads act for the one that called backward, which waits for
/// them meanwhile: torch hands them its debug info.
HostThread& this_host_thread();

}  // namespace sim
