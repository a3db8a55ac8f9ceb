// Host memory that a device may copy from and to in its own time.
#pragma once

#include <c10/core/Allocator.h>

#include "machine.h"

namespace sim {

/// Ranges that were allocated here, or registered where they lie. One that was allocated here stays
/// until its copies are over, as in CUDA's caching host allocator; after a registered one nobody
/// looks. Any thread may call.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

  void pin(const char* address, size_t size);
  /// Raises if a copy may still use the range.
  void unpin(const char* address);
  /// The beginning of the range that holds `address`, or none.
  const char* find(const void* address);
  /// The parts of the span that lie in one range each; the span itself where it meets none.
  std::vector<Span> parts(const Span& span);

 private:
  static void release(void* address);
  void forget(const char* address);

  std::map<const char*, const char*> ends_;
  std::vector<char*> leaving_;
};

PinnedMemory& pinned();

}  // namespace sim
