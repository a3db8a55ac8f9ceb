// Many bytes, of which few are ever used: their pages alone take memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/owned_fd.h"

namespace memd {

/// All zero at first. A page takes memory once it is read or written. Children of fork() share it.
class SparseBytes {
 public:
  explicit SparseBytes(uint64_t size_bytes);
  /// Takes as much memory as `other`.
  SparseBytes(const SparseBytes& other);
  SparseBytes& operator=(const SparseBytes&) = delete;
  ~SparseBytes();

  std::span<std::byte> bytes() { return {data_, size_bytes_}; }
  std::span<const std::byte> bytes() const { return {data_, size_bytes_}; }

  /// Has the bytes of `other`, which is as large, in the same place as before.
  void become(const SparseBytes& other);

 private:
  void copy_written(const SparseBytes& other);

  uint64_t size_bytes_;
  OwnedFd file_;
  std::byte* data_;
};

}  // namespace memd
