#include "plan/plan.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "plan/simulation.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {

void bind_plan(nb::module_& module) {
  module.attr("USE_READ") = static_cast<uint8_t>(UseKind::read);
  module.attr("USE_OVERWRITE") = static_cast<uint8_t>(UseKind::overwrite);
  module.attr("USE_CHANGE") = static_cast<uint8_t>(UseKind::change);
  module.attr("USE_ADD") = static_cast<uint8_t>(UseKind::add);
  module.attr("USE_LAST") = static_cast<uint8_t>(UseKind::last);

  nb::class_<BytesMoved>(module, "BytesMoved", "One period of a plan, on average.")
      .def_ro("read_bytes", &BytesMoved::read_bytes)
      .def_ro("written_bytes", &BytesMoved::written_bytes);
  module.def(
      "simulate_plan",
      [](const std::vector<std::pair<uint32_t, uint8_t>>& uses,
         const std::vector<uint64_t>& item_bytes,
         uint64_t cache_bytes,
         bool writes_changes,
         uint32_t warm_count,
         uint32_t measured_count) {
        std::vector<PlanUse> planned;
        planned.reserve(uses.size());
        for (const auto& [item, kind] : uses) {
          if (item >= item_bytes.size()) throw nb::value_error("a use of an item without a size");
          if (kind > static_cast<uint8_t>(UseKind::last)) throw nb::value_error("unknown use");
          planned.push_back({.item = item, .kind = static_cast<UseKind>(kind)});
        }
        const nb::gil_scoped_release released;
        return simulate(Plan(std::move(planned)),
                        item_bytes,
                        {.cache_bytes = cache_bytes,
                         .writes_changes = writes_changes,
                         .warm_count = warm_count,
                         .measured_count = measured_count});
      },
      "uses"_a,
      "item_bytes"_a,
      nb::kw_only(),
      "cache_bytes"_a,
      "writes_changes"_a,
      "warm_count"_a = 4,
      "measured_count"_a = 8,
      "Bytes that eviction by farthest next use moves if `uses`, pairs of an item and USE_*, "
      "repeat. "
      "`writes_changes`: changed items are on disk at the end of their period anyway.");
}

}  // namespace memd
