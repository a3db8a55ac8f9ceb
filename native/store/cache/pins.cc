#include "store/cache/pins.h"

#include <utility>

namespace memd {

std::optional<uint32_t> PinIndexes::take(uint32_t count) {
  if (auto& free = free_[count]; !free.empty()) {
    const uint32_t first = free.back();
    free.pop_back();
    return first;
  }
  if (kPinCount - next_ < count) return std::nullopt;
  return std::exchange(next_, next_ + count);
}

}  // namespace memd
