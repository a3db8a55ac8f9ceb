// Private mappings of files whose pages are the file's own until this process writes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/owned_fd.h"
#include "base/status.h"

namespace memd {

/// Maps the first `length_bytes` of `file` at `at`, or anywhere if that is null. After
/// mlockall(MCL_FUTURE) the kernel would copy every page of a private mapping; here it copies none.
Result<std::byte*> map_privately(std::byte* at, uint64_t length_bytes, const OwnedFd& file);

/// Whole pages of private mappings show their files again. They are not locked afterwards.
void drop_copies(std::span<std::byte> pages);

/// mlockall(MCL_CURRENT) copies every page of a private mapping, written or not, and a copy hides
/// what others write to the file later. This notices it without a system call: a page is mapped
/// twice, and the private mapping shows what is written through the shared one unless it was
/// copied. Callers take turns.
class MlockWatch {
 public:
  static Result<std::unique_ptr<MlockWatch>> create();
  ~MlockWatch();
  MlockWatch(const MlockWatch&) = delete;
  MlockWatch& operator=(const MlockWatch&) = delete;

  /// Whether private pages were copied since the last call that said so.
  bool has_copied();

 private:
  MlockWatch(std::byte* shared, std::byte* own, uint64_t page_bytes)
      : shared_(shared), own_(own), page_bytes_(page_bytes) {}

  std::byte* shared_;
  std::byte* own_;  // private
  uint64_t page_bytes_;
  uint64_t count_ = 0;
};

}  // namespace memd
