// Which pages of a private mapping this process has written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/owned_fd.h"

namespace memd {

/// How the kernel is asked. `scan` needs Linux 6.7, `table` a /proc; `nothing` needs neither.
enum class PageLook : uint8_t { scan, table, nothing };

/// A page of a private mapping of a file is the file's own until this process writes it; then it is
/// an anonymous copy. The kernel's page tables tell the two apart. Any thread may ask.
class WrittenPages {
 public:
  /// The first of the three that this kernel has, or another.
  WrittenPages();
  explicit WrittenPages(PageLook look);

  PageLook look() const { return look_; }

  /// The pages among those that [begin, begin + bytes) touches, as ranges in their order. May name
  /// a page that was not written, and always does where the kernel is not asked.
  std::vector<std::span<std::byte>> find(std::byte* begin, uint64_t bytes) const;

 private:
  bool scan(std::span<std::byte> pages, std::vector<std::span<std::byte>>* found) const;
  bool read_table(std::span<std::byte> pages, std::vector<std::span<std::byte>>* found) const;

  OwnedFd pagemap_;
  PageLook look_;
};

uint64_t page_bytes();
/// The pages that [begin, begin + bytes) touches.
std::span<std::byte> pages_of(std::byte* begin, uint64_t bytes);

}  // namespace memd
