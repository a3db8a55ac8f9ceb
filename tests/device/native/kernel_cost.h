// How long a kernel takes by the simulated clock.
#pragma once

#include <ATen/core/ivalue.h>

#include "sim_clock.h"

namespace sim {

/// Each tensor that the operator is given or makes moves once. Lookups move what they make.
Cost cost_of(const std::string& name,
             const std::vector<c10::IValue>& arguments,
             const std::vector<c10::IValue>& results);

}  // namespace sim
