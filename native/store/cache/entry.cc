#include "store/cache/entry.h"

#include <array>

#include "base/check.h"

namespace memd {
namespace {

constexpr auto kEdges = [] {
  using enum Residency;
  std::array<std::array<bool, 5>, 5> edges{};
  const auto allow = [&edges](Residency from, Residency to) {
    edges[static_cast<size_t>(from)][static_cast<size_t>(to)] = true;
  };
  allow(absent, filling);
  allow(filling, clean);
  allow(filling, absent);
  allow(clean, dirty);
  allow(clean, filling);
  allow(clean, absent);
  allow(dirty, clean);
  allow(dirty, draining);
  allow(dirty, absent);
  allow(draining, clean);
  allow(draining, dirty);
  return edges;
}();

}  // namespace

void Entry::move(Residency from, Residency to) {
  MEMD_CHECK_EQ(residency_name(residency_), residency_name(from));
  MEMD_CHECK(kEdges[static_cast<size_t>(from)][static_cast<size_t>(to)]);
  residency_ = to;
}

}  // namespace memd
