// What each file of this folder adds to the module: one file per topic; they translate and decide nothing.
#pragma once

#include <nanobind/nanobind.h>

namespace memd {

/// AdamSettings, and the update itself on arrays of the caller, for tests and measurements.
void bind_optim(nanobind::module_& module);

}  // namespace memd
