// Operators that made a thread of the host wait for a device.
#pragma once

#include <ATen/core/ivalue.h>

#include "machine.h"

namespace sim {

/// Queues what the operator uses, counts the wait, and waits for the stream.
void wait_for_stream(Actor stream, Work work);
/// "name count" of each operator since the last call.
std::vector<std::string> take_host_waits();

}  // namespace sim
