#include "store/space/free_extents.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "base/units.h"

namespace memd {

namespace {

// Next fit looks at so many gaps, then takes the smallest that fits: without the bound, a million
// small gaps behind each other would be walked for every large extent.
constexpr int kNextFitGaps = 32;

// A device that had no room for a while does not get everything once it has.
constexpr double kCreditBytesMax = 64.0 * 1024 * 1024;

}  // namespace

void FreeExtents::add_device(uint16_t device, uint64_t begin_bytes, uint64_t end_bytes) {
  MEMD_CHECK_EQ(device, devices_.size());
  MEMD_CHECK(is_aligned(begin_bytes, kBlockBytes) && is_aligned(end_bytes, kBlockBytes));
  MEMD_CHECK_LE(begin_bytes, end_bytes);
  Device& added = devices_.emplace_back();
  added.begin_bytes = begin_bytes;
  added.end_bytes = end_bytes;
  added.next_offset_bytes = begin_bytes;
  added.free_bytes = end_bytes - begin_bytes;
  if (added.free_bytes > 0) add_gap(added, begin_bytes, added.free_bytes);
  free_bytes_ += added.free_bytes;
  capacity_bytes_ += added.free_bytes;
}

void FreeExtents::add_gap(Device& device, uint64_t offset_bytes, uint64_t length_bytes) {
  device.gaps.emplace(offset_bytes, length_bytes);
  device.gaps_by_length.emplace(length_bytes, offset_bytes);
}

void FreeExtents::remove_gap(Device& device, std::map<uint64_t, uint64_t>::iterator gap) {
  device.gaps_by_length.erase({gap->second, gap->first});
  device.gaps.erase(gap);
}

std::map<uint64_t, uint64_t>::iterator FreeExtents::gap_around(Device& device,
                                                               uint64_t offset_bytes,
                                                               uint64_t length_bytes) {
  auto gap = device.gaps.upper_bound(offset_bytes);
  if (gap == device.gaps.begin()) return device.gaps.end();
  --gap;
  const uint64_t skipped_bytes = offset_bytes - gap->first;
  const bool inside = skipped_bytes < gap->second && length_bytes <= gap->second - skipped_bytes;
  return inside ? gap : device.gaps.end();
}

std::optional<uint64_t> FreeExtents::find(const Device& device, uint64_t length_bytes) {
  const auto smallest = device.gaps_by_length.lower_bound({length_bytes, 0});
  if (smallest == device.gaps_by_length.end()) return std::nullopt;

  auto gap = device.gaps.lower_bound(device.next_offset_bytes);
  if (gap != device.gaps.begin()) {
    // The gap that the last extent was cut from may have grown to the left meanwhile.
    const auto& [offset_bytes, gap_bytes] = *std::prev(gap);
    if (offset_bytes + gap_bytes >= device.next_offset_bytes + length_bytes) {
      return device.next_offset_bytes;
    }
  }
  for (int i = 0; i < kNextFitGaps; ++i) {
    if (gap == device.gaps.end()) gap = device.gaps.begin();
    if (gap->second >= length_bytes) return gap->first;
    ++gap;
  }
  return smallest->second;
}

void FreeExtents::take(Device& device,
                       std::map<uint64_t, uint64_t>::iterator gap,
                       uint64_t offset_bytes,
                       uint64_t length_bytes) {
  const uint64_t gap_begin = gap->first;
  const uint64_t gap_end = gap->first + gap->second;
  const uint64_t end_bytes = offset_bytes + length_bytes;
  remove_gap(device, gap);
  if (gap_begin < offset_bytes) add_gap(device, gap_begin, offset_bytes - gap_begin);
  if (end_bytes < gap_end) add_gap(device, end_bytes, gap_end - end_bytes);
  device.free_bytes -= length_bytes;
  free_bytes_ -= length_bytes;
}

std::optional<ExtentRecord> FreeExtents::allocate(uint32_t length_bytes) {
  MEMD_CHECK_GT(length_bytes, 0u);
  MEMD_CHECK(is_aligned(length_bytes, kBlockBytes));
  // Counted in bytes, not in extents: parameter and rest alternate and differ in size, and two
  // devices that took strict turns would always get the same one of them.
  Device* chosen = nullptr;
  std::optional<uint64_t> chosen_offset_bytes;
  for (Device& device : devices_) {
    if (chosen != nullptr &&
        device.credit_bytes + static_cast<double>(length_bytes) *
                                  static_cast<double>(device.free_bytes) /
                                  static_cast<double>(free_bytes_) <=
            chosen->credit_bytes + static_cast<double>(length_bytes) *
                                       static_cast<double>(chosen->free_bytes) /
                                       static_cast<double>(free_bytes_)) {
      continue;
    }
    if (const auto offset_bytes = find(device, length_bytes)) {
      chosen = &device;
      chosen_offset_bytes = offset_bytes;
    }
  }
  if (chosen == nullptr) return std::nullopt;

  for (Device& device : devices_) {
    const double share = static_cast<double>(device.free_bytes) / static_cast<double>(free_bytes_);
    const double due = &device == chosen ? share - 1 : share;
    device.credit_bytes = std::clamp(device.credit_bytes + due * static_cast<double>(length_bytes),
                                     -kCreditBytesMax,
                                     kCreditBytesMax);
  }
  take(*chosen,
       gap_around(*chosen, *chosen_offset_bytes, length_bytes),
       *chosen_offset_bytes,
       length_bytes);
  chosen->next_offset_bytes = *chosen_offset_bytes + length_bytes;
  ExtentRecord extent;
  extent.address.device = static_cast<uint16_t>(chosen - devices_.data());
  extent.address.offset_bytes = *chosen_offset_bytes;
  extent.length_bytes = length_bytes;
  return extent;
}

void FreeExtents::release(const ExtentRecord& extent) {
  MEMD_CHECK_LT(extent.address.device, devices_.size());
  MEMD_CHECK_GT(extent.length_bytes, 0u);
  Device& device = devices_[extent.address.device];
  uint64_t begin_bytes = extent.address.offset_bytes;
  uint64_t end_bytes = begin_bytes + extent.length_bytes;
  MEMD_CHECK(is_aligned(begin_bytes, kBlockBytes) && is_aligned(end_bytes, kBlockBytes));
  MEMD_CHECK_GE(begin_bytes, device.begin_bytes);
  MEMD_CHECK_LE(end_bytes, device.end_bytes);

  const auto after = device.gaps.lower_bound(begin_bytes);
  if (after != device.gaps.end()) MEMD_CHECK_LE(end_bytes, after->first);
  if (after != device.gaps.begin()) {
    const auto before = std::prev(after);
    MEMD_CHECK_LE(before->first + before->second, begin_bytes);
    if (before->first + before->second == begin_bytes) {
      begin_bytes = before->first;
      remove_gap(device, before);
    }
  }
  if (after != device.gaps.end() && after->first == end_bytes) {
    end_bytes += after->second;
    remove_gap(device, after);
  }
  add_gap(device, begin_bytes, end_bytes - begin_bytes);
  device.free_bytes += extent.length_bytes;
  free_bytes_ += extent.length_bytes;
}

Status FreeExtents::reserve(const ExtentRecord& extent) {
  const auto refuse = [&extent](const char* reason) {
    return error(StatusCode::integrity,
                 "an extent that the catalogue names ",
                 reason,
                 ": volume ",
                 extent.address.device,
                 " at ",
                 extent.address.offset_bytes,
                 ", ",
                 extent.length_bytes,
                 " bytes");
  };
  if (extent.address.device >= devices_.size()) return refuse("lies on a volume that is not there");
  if (extent.length_bytes == 0 || !is_aligned(extent.length_bytes, kBlockBytes) ||
      !is_aligned(extent.address.offset_bytes, kBlockBytes)) {
    return refuse("is not made of whole blocks");
  }
  Device& device = devices_[extent.address.device];
  const auto gap = gap_around(device, extent.address.offset_bytes, extent.length_bytes);
  if (gap == device.gaps.end()) return refuse("has two owners, or lies outside of its volume");
  take(device, gap, extent.address.offset_bytes, extent.length_bytes);
  return Status::ok();
}

}  // namespace memd
