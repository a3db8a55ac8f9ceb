// A thread that looks at a word again and again.
#pragma once

#include <atomic>

namespace memd {

/// Between two looks: the core's other hardware thread gets on meanwhile.
inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace memd
