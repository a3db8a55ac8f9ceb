// A shard's name and shape.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace memd {

/// Both in one piece of memory: a job has as many as shards, and a string and a vector take 80
/// bytes more. Does not change; whoever moves it leaves an empty one.
class ShardLabel {
 public:
  ShardLabel() = default;  // no name, no dimensions
  static bool fits(std::string_view name, const std::vector<uint64_t>& shape) {
    return name.size() <= kNameBytesMax && shape.size() <= kDimensionsMax;
  }
  /// Both fit.
  ShardLabel(std::string_view name, const std::vector<uint64_t>& shape);

  static constexpr size_t kNameBytesMax = 1024;
  static constexpr size_t kDimensionsMax = 32;

  std::string_view name() const;
  std::vector<uint64_t> shape() const;

 private:
  /// Before the sizes of the dimensions, and the name after them.
  struct Head {
    uint16_t name_bytes = 0;
    uint16_t dimension_count = 0;
  };
  Head head() const;

  std::unique_ptr<char[]> text_;
};

}  // namespace memd
