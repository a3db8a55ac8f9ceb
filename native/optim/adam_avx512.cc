#if defined(__x86_64__)
#include "optim/adam_kernel.h"

namespace memd::internal {

void adam_avx512(const AdamScalars& scalars, const AdamFp32& arrays) {
  update_any(scalars, arrays);
}

void adam_avx512(const AdamScalars& scalars, const AdamBf16& arrays) {
  update_any(scalars, arrays);
}

}  // namespace memd::internal
#endif
