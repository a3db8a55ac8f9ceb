#include "arena/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "arena/addresses.h"
#include "base/check.h"
#include "base/units.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace memd {
Result<std::unique_ptr<Arena>> Arena::create(uint64_t reserved_bytes, uint64_t segment_bytes) {
  MEMD_CHECK_GT(segment_bytes, uint64_t{0});
  MEMD_CHECK(is_aligned(segment_bytes, kBlockBytes));
  const uint64_t rounded_bytes =
      align_up(divide_up(reserved_bytes, segment_bytes) * segment_bytes, kAddressAlignmentBytes);
  std::byte* base = reserve_addresses(rounded_bytes);
  if (base == nullptr)
    return device_error(
        errno, concat("reserving ", rounded_bytes, " bytes of address space for an arena"));
  return std::unique_ptr<Arena>(new Arena(base, rounded_bytes, segment_bytes));
}

Arena::~Arena() {
  ASAN_UNPOISON_MEMORY_REGION(base_, capacity_bytes());
  for (Segment& segment : segments_) segment.leave_reserved();
  MEMD_CHECK_EQ(::munmap(base_, reserved_bytes_), 0);
}

Status Arena::add(Segment segment) {
  MEMD_CHECK_EQ(segment.bytes(), segment_bytes_);
  const uint64_t offset_bytes = capacity_bytes();
  if (offset_bytes + segment_bytes_ > reserved_bytes_) {
    return error(StatusCode::capacity,
                 "an arena with ",
                 reserved_bytes_,
                 " bytes of reserved addresses has no room for another segment of ",
                 segment_bytes_);
  }
  if (Status moved = segment.move_to(at(offset_bytes)); !moved.is_ok()) {
    if (segment.data() == at(offset_bytes)) segment.leave_reserved();
    return moved;
  }
  segments_.push_back(std::move(segment));
  ASAN_POISON_MEMORY_REGION(at(offset_bytes), segment_bytes_);
  add_gap(offset_bytes, segment_bytes_);
  return Status::ok();
}

std::optional<Segment> Arena::remove_last() {
  if (segments_.empty() || tail_free_bytes() < segment_bytes_) return std::nullopt;
  const uint64_t segment_offset = capacity_bytes() - segment_bytes_;
  const auto last_gap = std::prev(gaps_.end());
  const auto [gap_offset, gap_bytes] = *last_gap;
  erase_gap(last_gap);
  if (gap_bytes > segment_bytes_) insert_gap(gap_offset, gap_bytes - segment_bytes_);
  ASAN_UNPOISON_MEMORY_REGION(at(segment_offset), segment_bytes_);
  Segment segment = std::move(segments_.back());
  segments_.pop_back();
  segment.move_away();
  return segment;
}

std::optional<uint64_t> Arena::allocate(uint64_t bytes) {
  MEMD_CHECK_GT(bytes, uint64_t{0});
  const uint64_t slot_bytes = align_up(bytes, kBlockBytes);
  const auto first = gap_order_.first_of(slot_bytes);
  if (!first) return std::nullopt;
  const auto gap = gaps_.find(*first);
  const auto [offset_bytes, gap_bytes] = *gap;
  erase_gap(gap);
  if (gap_bytes > slot_bytes) insert_gap(offset_bytes + slot_bytes, gap_bytes - slot_bytes);
  slots_.emplace(offset_bytes, slot_bytes);
  used_bytes_ += slot_bytes;
  ASAN_UNPOISON_MEMORY_REGION(at(offset_bytes), slot_bytes);
  return offset_bytes;
}

bool Arena::reserve(uint64_t offset_bytes, uint64_t bytes) {
  if (!is_aligned(offset_bytes, kBlockBytes) || bytes > capacity_bytes()) return false;
  const uint64_t slot_bytes = align_up(std::max<uint64_t>(bytes, 1), kBlockBytes);
  auto gap = gaps_.upper_bound(offset_bytes);
  if (gap == gaps_.begin()) return false;
  --gap;
  const auto [gap_offset, gap_bytes] = *gap;
  const uint64_t head_bytes = offset_bytes - gap_offset;
  if (head_bytes > gap_bytes || slot_bytes > gap_bytes - head_bytes) return false;
  erase_gap(gap);
  if (head_bytes > 0) insert_gap(gap_offset, head_bytes);
  const uint64_t tail_bytes = gap_bytes - head_bytes - slot_bytes;
  if (tail_bytes > 0) insert_gap(offset_bytes + slot_bytes, tail_bytes);
  slots_.emplace(offset_bytes, slot_bytes);
  used_bytes_ += slot_bytes;
  ASAN_UNPOISON_MEMORY_REGION(at(offset_bytes), slot_bytes);
  return true;
}

void Arena::free(uint64_t offset_bytes) {
  const auto slot = slots_.find(offset_bytes);
  MEMD_CHECK(slot != slots_.end());
  const uint64_t slot_bytes = slot->second;
  slots_.erase(slot);
  used_bytes_ -= slot_bytes;
  ASAN_POISON_MEMORY_REGION(at(offset_bytes), slot_bytes);
  add_gap(offset_bytes, slot_bytes);
}

uint64_t Arena::tail_free_bytes() const {
  if (gaps_.empty()) return 0;
  const auto& [offset_bytes, bytes] = *gaps_.rbegin();
  return offset_bytes + bytes == capacity_bytes() ? bytes : 0;
}

void Arena::add_gap(uint64_t offset_bytes, uint64_t bytes) {
  const auto next = gaps_.lower_bound(offset_bytes);
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset_bytes) {
      offset_bytes = before->first;
      bytes += before->second;
      erase_gap(before);
    }
  }
  if (next != gaps_.end() && next->first == offset_bytes + bytes) {
    bytes += next->second;
    erase_gap(next);
  }
  insert_gap(offset_bytes, bytes);
}

void Arena::insert_gap(uint64_t offset_bytes, uint64_t bytes) {
  gaps_.emplace(offset_bytes, bytes);
  gap_order_.insert(offset_bytes, bytes);
}

void Arena::erase_gap(Gaps::iterator gap) {
  gap_order_.erase(gap->first);
  gaps_.erase(gap);
}

}  // namespace memd
