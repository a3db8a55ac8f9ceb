// How fast files are read and written through IoQueue, beside the same transfers without it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/owned_fd.h"
#include "base/status.h"
#include "io/io_queue.h"

namespace memd {

enum class IoMix : uint8_t { read, write, mixed };

struct IoRateOptions {
  IoMix mix = IoMix::read;
  uint64_t block_bytes = 0;  // of one request; whole blocks of 4096
  uint32_t depth = 0;        // requests in flight
  double seconds = 1;        // each request in flight is made at least once, however short
  double write_share = 0.5;  // of requests that are writes where they are mixed, evenly spread
  bool gathered = true;      // pages of the buffers, as in Segment
};

struct IoRate {
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  double seconds = 0;
  double cpu_seconds = 0;  // of this process, kernel threads that work for it left out
};

/// A file of random bytes, removed when this is destroyed: holes and unwritten ranges are read at
/// the speed of memory. One thread at a time; every method blocks.
class IoBench {
 public:
  /// Makes `directory`/memd.bench, of whole blocks of 1 MiB, and writes it. Refused: a file system
  /// without O_DIRECT, no room, a file of that name.
  static Result<std::unique_ptr<IoBench>> create(const std::string& directory, uint64_t bytes);
  ~IoBench();
  IoBench(const IoBench&) = delete;
  IoBench& operator=(const IoBench&) = delete;

  /// As the daemon does it: registered buffers, where the kernel allows them.
  Result<IoRate> through_queue(const IoRateOptions& options);
  /// io_uring with registered buffers and file and nothing else; unavailable where it is forbidden.
  Result<IoRate> raw(const IoRateOptions& options);
  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }
  /// The memory that the last run used, for another process to map; empty before the first one.
  std::string memory_path() const;

 private:
  class Buffers;

  IoBench(std::string path, OwnedFd file, uint64_t bytes);
  /// Those of the last run where they serve: filling them takes longer than a short run.
  Result<std::span<std::byte>> buffers(uint64_t bytes, bool gathered);
  Status fill();
  Status check(const IoRateOptions& options) const;

  std::string path_;
  OwnedFd file_;
  uint64_t bytes_;
  std::unique_ptr<Buffers> buffers_;
};

}  // namespace memd
