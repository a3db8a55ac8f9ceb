#include "bench/hash_rate.h"

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <random>
#include <span>

#include "base/checksum.h"
#include "base/checksum_variants.h"
#include "base/units.h"
#include "bench/memory_traffic.h"

namespace memd {
namespace {

// A tile's parameters in fp32, and a blob's piece.
constexpr uint64_t kExtentBytes = 1_MiB;

}  // namespace

Result<HashRate> measure_hash(const HashRateOptions& options) {
  if (options.bytes == 0 || !is_aligned(options.bytes, kExtentBytes) || options.round_count == 0) {
    return error(StatusCode::invalid_argument,
                 "checksums are measured on whole MiB and in at least one round: ",
                 options.bytes,
                 " bytes, ",
                 options.round_count,
                 " rounds");
  }
  void* const data = mmap(nullptr,
                          options.bytes,
                          PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                          -1,
                          0);
  if (data == MAP_FAILED) {
    return error(StatusCode::capacity,
                 "there is no memory for this; measure fewer bytes: ",
                 options.bytes,
                 " bytes wanted");
  }
  const std::span words(static_cast<uint64_t*>(data), options.bytes / sizeof(uint64_t));
  std::mt19937_64 random(1);
  for (uint64_t& word : words) word = random();

  uint64_t seen = 0;  // keeps the passes from being left out
  const auto pass = [&](const std::function<uint64_t(std::span<std::byte>)>& of_extent) {
    const auto began = std::chrono::steady_clock::now();
    for (uint64_t at = 0; at < options.bytes; at += kExtentBytes) {
      seen ^= of_extent({static_cast<std::byte*>(data) + at, kExtentBytes});
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  HashRate rate{
      .bytes = options.bytes, .hash_seconds = {}, .plain_seconds = {}, .read_seconds = {}};
  for (uint32_t round = 0; round < options.round_count; ++round) {
    rate.hash_seconds.push_back(pass([](std::span<std::byte> extent) {
      return extent_checksum(extent, {.device = 0, .offset_bytes = 0});
    }));
    rate.plain_seconds.push_back(pass([](std::span<std::byte> extent) {
      return internal::xxh3_plain(extent.data(), extent.size(), 0);
    }));
    rate.read_seconds.push_back(pass([](std::span<std::byte> extent) {
      return memory_read(isa_best(),
                         reinterpret_cast<const uint64_t*>(extent.data()),
                         extent.size() / sizeof(uint64_t));
    }));
  }
  [[maybe_unused]] const volatile uint64_t kept = seen;
  munmap(data, options.bytes);
  return rate;
}

}  // namespace memd
