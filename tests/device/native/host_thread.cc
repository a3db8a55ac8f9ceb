#include "host_thread.h"

#include <atomic>

namespace sim {
namespace {

constexpr std::string_view kKindName = "SIMULATED_HOST_THREAD";
const c10::DebugInfoKind kKind(&kKindName);

}  // namespace

HostThread& this_host_thread() {
  static std::atomic<Actor> count{0};
  if (auto* known = c10::ThreadLocalDebugInfo::get(kKind)) return *static_cast<HostThread*>(known);
  auto made = std::make_shared<HostThread>(--count);
  c10::ThreadLocalDebugInfo::_push(kKind, made);
  return *made;
}

}  // namespace sim
