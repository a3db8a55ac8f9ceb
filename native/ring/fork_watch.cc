#include "ring/fork_watch.h"

#include <pthread.h>

#include "base/check.h"

namespace memd {

ForkWatch::ForkWatch() : pid_(getpid()) {
  static const int registered = pthread_atfork(
      nullptr, nullptr, [] { in_forked_child_.store(true, std::memory_order_relaxed); });
  MEMD_CHECK_EQ(registered, 0);
}

}  // namespace memd
