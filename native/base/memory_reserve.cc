#include "base/memory_reserve.h"

#include <atomic>
#include <cstdint>
#include <new>
#include <utility>

namespace memd {
namespace {

std::atomic<void*> reserve{nullptr};
std::atomic<uint64_t> released_count{0};

thread_local bool is_used = false;
thread_local uint64_t released_count_seen = 0;

std::new_handler handler_before = nullptr;

/// Called where an allocation failed; who returns has made room, and it is tried again.
void release_reserve() {
  if (is_used) {
    if (void* const held = reserve.exchange(nullptr)) {
      ::operator delete(held);
      released_count_seen = ++released_count;
      return;
    }
    // Another thread was faster: its room may be enough for this one as well.
    const uint64_t count = released_count;
    if (std::exchange(released_count_seen, count) != count) return;
  }
  if (handler_before == nullptr) throw std::bad_alloc();
  handler_before();
}

}  // namespace

bool has_reserve() {
  if (reserve.load(std::memory_order_acquire) != nullptr) return true;
  [[maybe_unused]] static const bool is_installed = [] {
    handler_before = std::set_new_handler(release_reserve);
    return true;
  }();
  const WithoutReserve others_wait;
  void* const piece = ::operator new(kReserveBytes, std::nothrow);
  if (piece == nullptr) return false;
  void* none = nullptr;
  if (!reserve.compare_exchange_strong(none, piece)) ::operator delete(piece);
  return true;
}

Status no_memory_for(const char* what) {
  return error(StatusCode::capacity,
               "the daemon has no memory for ",
               what,
               ", and nothing was begun; try again when others need less, or give its process more "
               "(ulimit -v, vm.overcommit_memory)");
}

void use_reserve() { is_used = true; }

WithoutReserve::WithoutReserve() : was_used_(std::exchange(is_used, false)) {}
WithoutReserve::~WithoutReserve() { is_used = was_used_; }

}  // namespace memd
