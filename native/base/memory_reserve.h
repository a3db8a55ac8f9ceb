// Memory set aside for the moment when there is no other: what the daemon has begun ends with it,
// and what is asked anew is refused until the reserve is whole again.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "base/units.h"

namespace memd {

/// Enough for what jobs have begun: the largest of it is the catalogue of a commit. No page is
/// touched, so that it costs address space alone, which is what runs out where allocations fail
/// (RLIMIT_AS, vm.overcommit_memory = 2).
inline constexpr size_t kReserveBytes = 128_MiB;

/// True where the reserve is whole. Where it is not, it is set aside first, if there is so much.
/// Any thread; one load where it is whole.
bool has_reserve();

/// The refusal of a request that has not begun, where there is no reserve.
Status no_memory_for(const char* what);

/// From here on, what the calling thread allocates may come from the reserve.
void use_reserve();

/// While it lives, allocations of the calling thread fail as if there were no reserve: somebody can
/// be told, and nothing is half done.
class WithoutReserve {
 public:
  WithoutReserve();
  ~WithoutReserve();
  WithoutReserve(const WithoutReserve&) = delete;
  WithoutReserve& operator=(const WithoutReserve&) = delete;

 private:
  const bool was_used_;
};

}  // namespace memd
