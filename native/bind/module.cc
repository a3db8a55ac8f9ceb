#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bind/bind.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  // At exit gRPC and torch keep objects alive that are nobody's mistake; tests that look for leaks
  // set the variable.
  nb::set_leak_warnings(std::getenv("MEMD_LEAK_WARNINGS") != nullptr);
  memd::bind_status(module);
  memd::bind_optim(module);
  memd::bind_plan(module);
  memd::bind_ring(module);
  memd::bind_server(module);
  memd::bind_check(module);
  memd::bind_bench(module);
}
