#include <nanobind/nanobind.h>

#include "bind/bind.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  memd::bind_status(module);
  memd::bind_optim(module);
  memd::bind_ring(module);
  memd::bind_server(module);
}
