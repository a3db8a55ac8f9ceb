// Private memory for whole blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace memd {

/// Bytes aligned for O_DIRECT, which only the daemon maps.
class BlockBytes {
 public:
  /// Copies `bytes` and pads them with zeros to whole blocks.
  explicit BlockBytes(std::span<const std::byte> bytes);
  explicit BlockBytes(uint64_t bytes);
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  uint64_t bytes_;
};

}  // namespace memd
