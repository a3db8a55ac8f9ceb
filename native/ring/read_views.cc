#include "ring/read_views.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/checksum.h"
#include "base/units.h"

namespace memd {

Result<std::unique_ptr<ReadViews>> ReadViews::reserve(std::byte* shared,
                                                      uint64_t reserved_bytes,
                                                      WrittenPages pages,
                                                      uint64_t small_bytes) {
  void* base =
      mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    return device_error(errno, concat("reserving ", reserved_bytes, " bytes of addresses"));
  auto mlocks = MlockWatch::create();
  if (!mlocks.is_ok()) {
    munmap(base, reserved_bytes);
    return mlocks.status();
  }
  return std::unique_ptr<ReadViews>(new ReadViews(shared,
                                                  static_cast<std::byte*>(base),
                                                  reserved_bytes,
                                                  std::move(pages),
                                                  small_bytes,
                                                  std::move(mlocks).value()));
}

ReadViews::ReadViews(std::byte* shared,
                     std::byte* base,
                     uint64_t reserved_bytes,
                     WrittenPages pages,
                     uint64_t small_bytes,
                     std::unique_ptr<MlockWatch> mlocks)
    : shared_(shared),
      base_(base),
      reserved_bytes_(reserved_bytes),
      pages_(std::move(pages)),
      small_bytes_(small_bytes),
      mlocks_(std::move(mlocks)) {}

ReadViews::~ReadViews() { munmap(base_, reserved_bytes_); }

Status ReadViews::map_segment(uint64_t offset_bytes,
                              uint64_t length_bytes,
                              const OwnedFd& segment) {
  // The file's block size does not tell: it is that of a huge page for transparent ones too.
  struct statfs status{};
  if (fstatfs(segment.get(), &status) != 0) return device_error(errno, "looking at a segment");
  if (status.f_type == HUGETLBFS_MAGIC) {
    const std::lock_guard lock(mutex_);
    if (!huge_.empty() && huge_.back().end_bytes == offset_bytes) {
      huge_.back().end_bytes += length_bytes;
    } else {
      huge_.push_back({offset_bytes, offset_bytes + length_bytes});
    }
    is_private_.store(false, std::memory_order_relaxed);
    return Status::ok();
  }
  return map_privately(base_ + offset_bytes, length_bytes, segment).status();
}

std::byte* ReadViews::begin(uint64_t offset_bytes, uint64_t length_bytes) {
  std::byte* data = base_ + offset_bytes;
  const std::lock_guard lock(mutex_);
  if (has_huge_pages(offset_bytes, offset_bytes + length_bytes)) return shared_ + offset_bytes;
  if (length_bytes <= small_bytes_) return begin_small(offset_bytes, length_bytes);
  if (mlocks_->has_copied()) drop_mlocked();
  const auto [at, is_first] = living_.try_emplace(offset_bytes);
  Living& living = at->second;
  if (is_first) living.end_bytes = offset_bytes + length_bytes;
  // A page that no living view touches is the arena's.
  const std::span<std::byte> own = pages_of(data, length_bytes);
  const auto next = std::next(at);
  const bool shares_first =
      at != living_.begin() && base_ + std::prev(at)->second.end_bytes > own.data();
  const bool shares_last = next != living_.end() && base_ + next->first < own.data() + own.size();
  Pages written;
  if (!is_first) {
    written = pages_.find(data, length_bytes);
  } else {
    if (shares_first) written = pages_.find(data, 1);
    if (shares_last && (own.size() > page_bytes() || !shares_first))
      for (const auto pages : pages_.find(data + length_bytes - 1, 1)) written.push_back(pages);
  }
  const bool is_hidden =
      living.end_bytes != offset_bytes + length_bytes || differs(written, data, length_bytes);
  if (!is_hidden) {
    ++living.count;
    return data;
  }
  if (is_first) living_.erase(at);
  return copy(offset_bytes, length_bytes);
}

std::optional<uint64_t> ReadViews::place(const std::byte* data, uint64_t length_bytes) {
  const auto inside = [&](const std::byte* begin, uint64_t bytes) {
    return data >= begin && length_bytes <= bytes &&
           static_cast<uint64_t>(data - begin) <= bytes - length_bytes;
  };
  if (inside(shared_, reserved_bytes_)) return static_cast<uint64_t>(data - shared_);
  const std::lock_guard lock(mutex_);
  if (is_in_mapping(data)) {
    const auto after = living_.upper_bound(static_cast<uint64_t>(data - base_));
    if (after == living_.begin()) return std::nullopt;
    const auto& [offset_bytes, living] = *std::prev(after);
    if (!inside(base_ + offset_bytes, living.end_bytes - offset_bytes)) return std::nullopt;
    return static_cast<uint64_t>(data - base_);
  }
  const auto after = copies_.upper_bound(data);
  if (after == copies_.begin()) return std::nullopt;
  const auto& [begin, copy] = *std::prev(after);
  if (!inside(begin, copy.length_bytes)) return std::nullopt;
  return copy.offset_bytes + static_cast<uint64_t>(data - begin);
}

void ReadViews::note_shown(std::byte* data, uint64_t length_bytes) {
  if (is_in_arena(data)) return;
  const std::lock_guard lock(mutex_);
  if (std::optional<uint64_t>* const noted = shown(data); noted != nullptr)
    *noted = record_checksum({data, length_bytes});
}

bool ReadViews::is_written(std::byte* data, uint64_t length_bytes) {
  if (is_in_arena(data)) return false;
  const std::lock_guard lock(mutex_);
  return is_changed(
      is_in_mapping(data) ? pages_.find(data, length_bytes) : Pages(), data, length_bytes);
}

bool ReadViews::end_unless_written(std::byte* data, uint64_t length_bytes) {
  if (is_in_arena(data)) return true;
  const std::lock_guard lock(mutex_);
  const bool is_mapped = is_in_mapping(data);
  const Pages written = is_mapped ? pages_.find(data, length_bytes) : Pages();
  if (is_changed(written, data, length_bytes)) return false;
  if (is_mapped) {
    end_in_mapping(written, data);
  } else {
    end_copy(data);
  }
  return true;
}

void ReadViews::end(std::byte* data, uint64_t length_bytes) {
  if (is_in_arena(data)) return;
  const std::lock_guard lock(mutex_);
  if (is_in_mapping(data)) {
    end_in_mapping(pages_.find(data, length_bytes), data);
  } else {
    end_copy(data);
  }
}

bool ReadViews::is_in_mapping(const std::byte* data) const {
  return data >= base_ && data < base_ + reserved_bytes_;
}

bool ReadViews::is_in_arena(const std::byte* data) const {
  return data >= shared_ && data < shared_ + reserved_bytes_;
}

bool ReadViews::has_huge_pages(uint64_t begin_bytes, uint64_t end_bytes) const {
  const auto first = std::upper_bound(
      huge_.begin(), huge_.end(), begin_bytes, [](uint64_t bytes, const Range& range) {
        return bytes < range.end_bytes;
      });
  return first != huge_.end() && first->begin_bytes < end_bytes;
}

std::byte* ReadViews::begin_small(uint64_t offset_bytes, uint64_t length_bytes) {
  const auto equal = small_.find(offset_bytes);
  if (equal == small_.end()) {
    std::byte* const data = copy(offset_bytes, length_bytes);
    if (data != nullptr) small_.emplace(offset_bytes, data);
    return data;
  }
  std::byte* const data = equal->second;
  Copy& living = copies_.at(data);
  if (living.length_bytes != length_bytes || differs(data, living))
    return copy(offset_bytes, length_bytes);
  ++living.count;
  return data;
}

std::byte* ReadViews::copy(uint64_t offset_bytes, uint64_t length_bytes) {
  auto* data = static_cast<std::byte*>(
      std::aligned_alloc(kViewAlignmentBytes, align_up(length_bytes, kViewAlignmentBytes)));
  if (data == nullptr) return nullptr;
  std::memcpy(data, shared_ + offset_bytes, length_bytes);
  Copy& copy = copies_[data];
  copy.offset_bytes = offset_bytes;
  copy.length_bytes = length_bytes;
  copy.memory.reset(data);
  return data;
}

std::optional<uint64_t>* ReadViews::shown(const std::byte* data) {
  if (!is_in_mapping(data)) {
    const auto own = copies_.find(data);
    return own != copies_.end() ? &own->second.shown : nullptr;
  }
  const auto at = living_.find(static_cast<uint64_t>(data - base_));
  return at != living_.end() ? &at->second.shown : nullptr;
}

bool ReadViews::is_changed(const Pages& written, std::byte* data, uint64_t length_bytes) {
  const std::optional<uint64_t>* const noted = shown(data);
  if (noted == nullptr) return false;
  if (noted->has_value()) return record_checksum({data, length_bytes}) != **noted;
  if (is_in_mapping(data)) return differs(written, data, length_bytes);
  return differs(data, copies_.at(data));
}

bool ReadViews::differs(const std::byte* data, const Copy& copy) const {
  return std::memcmp(data, shared_ + copy.offset_bytes, copy.length_bytes) != 0;
}

void ReadViews::end_copy(const std::byte* data) {
  const auto at = copies_.find(data);
  if (at == copies_.end() || --at->second.count > 0) return;
  const auto joined = small_.find(at->second.offset_bytes);
  if (joined != small_.end() && joined->second == data) small_.erase(joined);
  copies_.erase(at);
}

bool ReadViews::differs(const Pages& written, std::byte* data, uint64_t length_bytes) const {
  return std::ranges::any_of(written, [&](std::span<std::byte> pages) {
    std::byte* const begin = std::max(pages.data(), data);
    std::byte* const end = std::min(pages.data() + pages.size(), data + length_bytes);
    return begin < end &&
           std::memcmp(begin, shared_ + (begin - base_), static_cast<size_t>(end - begin)) != 0;
  });
}

void ReadViews::end_in_mapping(const Pages& written, const std::byte* data) {
  const auto at = living_.find(static_cast<uint64_t>(data - base_));
  MEMD_CHECK(at != living_.end());
  if (--at->second.count > 0) return;
  // Pages that other views share are theirs to end.
  std::byte* first = base_;
  if (at != living_.begin()) first += align_up(std::prev(at)->second.end_bytes, page_bytes());
  std::byte* last = base_ + reserved_bytes_;
  if (const auto next = std::next(at); next != living_.end())
    last = base_ + align_down(next->first, page_bytes());
  for (const std::span<std::byte> pages : written) {
    std::byte* const begin = std::max(pages.data(), first);
    std::byte* const end = std::min(pages.data() + pages.size(), last);
    if (begin < end) drop_copies({begin, end});
  }
  living_.erase(at);
}

void ReadViews::drop_mlocked() {
  std::byte* begin = base_;
  const auto drop_until = [&begin](std::byte* end) {
    if (begin < end) drop_copies({begin, end});
  };
  for (const auto& [offset_bytes, living] : living_) {
    drop_until(base_ + align_down(offset_bytes, page_bytes()));
    begin = std::max(begin, base_ + align_up(living.end_bytes, page_bytes()));
  }
  drop_until(base_ + reserved_bytes_);
}

}  // namespace memd
