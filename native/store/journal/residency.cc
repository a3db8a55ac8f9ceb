#include "store/journal/residency.h"

#include <array>
#include <cstddef>

namespace memd {

std::string_view residency_name(Residency residency) {
  constexpr std::array<std::string_view, 5> names{
      "absent", "filling", "clean", "dirty", "draining"};
  return names[static_cast<size_t>(residency)];
}

}  // namespace memd
