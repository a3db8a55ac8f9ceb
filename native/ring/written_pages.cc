#include "ring/written_pages.h"

#include <fcntl.h>
#include <linux/types.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>

#include "base/units.h"

namespace memd {
namespace {

// linux/fs.h of 6.7, which older systems do not have.
struct PageRegion {
  __u64 start;
  __u64 end;
  __u64 categories;
};
struct ScanArgument {
  __u64 size;
  __u64 flags;
  __u64 start;
  __u64 end;
  __u64 walk_end;
  __u64 vec;
  __u64 vec_len;
  __u64 max_pages;
  __u64 category_inverted;
  __u64 category_mask;
  __u64 category_anyof_mask;
  __u64 return_mask;
};
static_assert(sizeof(PageRegion) == 24 && sizeof(ScanArgument) == 96);
constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArgument);
constexpr uint64_t kIsFile = 1U << 2;
constexpr uint64_t kIsPresent = 1U << 3;
constexpr uint64_t kIsSwapped = 1U << 4;

// An entry of /proc/self/pagemap.
constexpr uint64_t kEntryIsFile = uint64_t{1} << 61;
constexpr uint64_t kEntryIsSwapped = uint64_t{1} << 62;
constexpr uint64_t kEntryIsPresent = uint64_t{1} << 63;

void append(std::span<std::byte> pages, std::vector<std::span<std::byte>>* found) {
  if (!found->empty() && found->back().data() + found->back().size() == pages.data()) {
    found->back() = {found->back().data(), found->back().size() + pages.size()};
  } else {
    found->push_back(pages);
  }
}

}  // namespace

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::span<std::byte> pages_of(std::byte* begin, uint64_t bytes) {
  const auto address = std::bit_cast<uintptr_t>(begin);
  const uint64_t first = align_down(address, page_bytes());
  const uint64_t last = align_up(address + bytes, page_bytes());
  return {begin - (address - first), last - first};
}

WrittenPages::WrittenPages() : WrittenPages(PageLook::scan) {
  // Every page of ours will do to ask with.
  std::vector<std::span<std::byte>> found;
  std::byte here{};
  const auto pages = pages_of(&here, 1);
  if (scan(pages, &found)) return;
  look_ = read_table(pages, &found) ? PageLook::table : PageLook::nothing;
}

WrittenPages::WrittenPages(PageLook look)
    : pagemap_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)), look_(look) {}

std::vector<std::span<std::byte>> WrittenPages::find(std::byte* begin, uint64_t bytes) const {
  const std::span<std::byte> pages = pages_of(begin, bytes);
  std::vector<std::span<std::byte>> found;
  if (look_ == PageLook::scan && scan(pages, &found)) return found;
  if (look_ == PageLook::table && read_table(pages, &found)) return found;
  // Nothing is known, and any of them may be written.
  return {pages};
}

bool WrittenPages::scan(std::span<std::byte> pages,
                        std::vector<std::span<std::byte>>* found) const {
  std::array<PageRegion, 16> regions;
  ScanArgument argument{};
  argument.size = sizeof(argument);
  argument.start = std::bit_cast<uintptr_t>(pages.data());
  argument.end = argument.start + pages.size();
  argument.vec = std::bit_cast<uintptr_t>(regions.data());
  argument.vec_len = regions.size();
  // In memory or swapped out, and not of a file.
  argument.category_inverted = kIsFile;
  argument.category_mask = kIsFile;
  argument.category_anyof_mask = kIsPresent | kIsSwapped;
  argument.return_mask = kIsFile;
  const uint64_t first = argument.start;
  while (argument.start < argument.end) {
    const int count = ioctl(pagemap_.get(), kPagemapScan, &argument);
    if (count < 0) return false;
    for (const PageRegion& region : std::span(regions).first(static_cast<size_t>(count)))
      append(pages.subspan(region.start - first, region.end - region.start), found);
    argument.start = argument.walk_end;
  }
  return true;
}

bool WrittenPages::read_table(std::span<std::byte> pages,
                              std::vector<std::span<std::byte>>* found) const {
  std::array<uint64_t, 512> entries;
  const uint64_t first_page = std::bit_cast<uintptr_t>(pages.data()) / page_bytes();
  const uint64_t page_count = pages.size() / page_bytes();
  for (uint64_t done = 0; done < page_count;) {
    const uint64_t count = std::min<uint64_t>(entries.size(), page_count - done);
    const ssize_t bytes = pread(pagemap_.get(),
                                entries.data(),
                                count * sizeof(uint64_t),
                                static_cast<off_t>((first_page + done) * sizeof(uint64_t)));
    if (bytes != static_cast<ssize_t>(count * sizeof(uint64_t))) return false;
    for (uint64_t i = 0; i < count; ++i) {
      const bool is_there = (entries[i] & (kEntryIsPresent | kEntryIsSwapped)) != 0;
      if (is_there && (entries[i] & kEntryIsFile) == 0)
        append(pages.subspan((done + i) * page_bytes(), page_bytes()), found);
    }
    done += count;
  }
  return true;
}

}  // namespace memd
