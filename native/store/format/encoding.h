// Little-endian fields of what memd writes to disk: a writer that grows, and a reader that never
// leaves its bytes.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bulk_bytes.h"
#include "base/status.h"
#include "store/format/extent_record.h"

namespace memd {

static_assert(std::endian::native == std::endian::little, "fields are copied as they are");

/// Bytes of an extent: offset 8, checksum 8, length 4, device 2.
inline constexpr size_t kExtentEncodedBytes = 22;

/// Features that this memd knows, each bit with its meaning in docs/format.md.
/// A parameter's optimizer state may have max_exp_avg_sq.
inline constexpr uint64_t kMaximaFeature = 1;
/// The root lists snapshots: extents that no job names any more are taken all the same.
inline constexpr uint64_t kSnapshotsFeature = 2;
/// The root lists the snapshot of a load: its job counts for nothing, and goes back to that.
inline constexpr uint64_t kLoadsFeature = 4;
inline constexpr uint64_t kIncompatibleFeatures =
    kMaximaFeature | kSnapshotsFeature | kLoadsFeature;
inline constexpr uint64_t kReadOnlyCompatibleFeatures = 0;

/// The format of a superblock or record, as its header says it.
struct FormatHeader {
  uint16_t major = 0;
  uint16_t minor = 0;
  uint64_t incompatible = 0;
  uint64_t read_only_compatible = 0;
  uint64_t compatible = 0;
};

/// For what bytes are opened. A daemon always writes; `memd check` and `memd volume list` never do,
/// and read what has unknown read-only compatible features.
enum class FormatUse : uint8_t { write, read_only };

/// Refused: a newer major version, and features that we do not know and must know for `use`.
Status check_format(const FormatHeader& header, FormatUse use);

class FieldWriter {
 public:
  explicit FieldWriter(std::vector<std::byte>& out) : out_(out) {}

  template <std::unsigned_integral T>
  void put(T value) {
    put_bytes(&value, sizeof(value));
  }
  void put_bytes(const void* bytes, size_t count) {
    const auto* first = static_cast<const std::byte*>(bytes);
    count_moved(count);
    out_.insert(out_.end(), first, first + count);
  }
  void put(const ExtentRecord& extent) {
    put(extent.address.offset_bytes);
    put(extent.checksum);
    put(extent.length_bytes);
    put(extent.address.device);
  }

 private:
  std::vector<std::byte>& out_;
};

/// A read past the end yields zeros and sets `overrun()`, so that callers check once after a group
/// of fields.
class FieldReader {
 public:
  explicit FieldReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <std::unsigned_integral T>
  T get() {
    T value{};
    const auto bytes = get_bytes(sizeof(T));
    if (!bytes.empty()) copy_bytes(&value, bytes.data(), sizeof(T));
    return value;
  }
  /// `count` bytes, or none where fewer are left.
  std::span<const std::byte> get_bytes(uint64_t count) {
    if (count > rest_.size()) {
      overrun_ = true;
      rest_ = {};
      return {};
    }
    const auto taken = rest_.first(static_cast<size_t>(count));
    rest_ = rest_.subspan(static_cast<size_t>(count));
    return taken;
  }
  std::string_view get_text(uint64_t count) {
    const auto bytes = get_bytes(count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  ExtentRecord get_extent() {
    ExtentRecord extent;
    extent.address.offset_bytes = get<uint64_t>();
    extent.checksum = get<uint64_t>();
    extent.length_bytes = get<uint32_t>();
    extent.address.device = get<uint16_t>();
    return extent;
  }

  bool overrun() const { return overrun_; }
  size_t remaining_bytes() const { return rest_.size(); }

 private:
  std::span<const std::byte> rest_;
  bool overrun_ = false;
};

}  // namespace memd
