// Memory for tests of direct I/O.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>

#include "base/units.h"

namespace memd::testing {

/// Zeroed memory as O_DIRECT wants it.
class Block {
 public:
  explicit Block(size_t bytes) : bytes_(bytes), data_(std::aligned_alloc(kBlockBytes, bytes)) {
    std::memset(data_.get(), 0, bytes);
  }
  std::span<std::byte> span() { return {static_cast<std::byte*>(data_.get()), bytes_}; }
  void fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (std::byte& byte : span()) byte = static_cast<std::byte>(random());
  }
  bool operator==(const Block& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_.get(), other.data_.get(), bytes_) == 0;
  }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> data_;
};

}  // namespace memd::testing
