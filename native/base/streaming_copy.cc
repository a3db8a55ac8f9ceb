#include "base/streaming_copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace memd {
#if defined(__x86_64__)
namespace {

constexpr size_t kLineBytes = 64;
// 40 MiB in pieces of 0.4 to 4 MiB, from the second-level cache, took 1.3 to 1.7 ms in place of 2.3
// to 2.7 ms, since the destination is not read first. Small pieces are better cached.
constexpr size_t kStreamedBytesMin = 64 << 10;

/// Both whole lines; `into` begins one.
void stream_lines(std::byte* into, const std::byte* from, size_t length_bytes) noexcept {
  constexpr size_t kWords = kLineBytes / sizeof(__m128i);
  for (size_t i = 0; i < length_bytes; i += kLineBytes) {
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* line = reinterpret_cast<__m128i*>(into + i);
    __m128i words[kWords];
    for (size_t j = 0; j < kWords; ++j) words[j] = _mm_loadu_si128(source + j);
    for (size_t j = 0; j < kWords; ++j) _mm_stream_si128(line + j, words[j]);
  }
  // Streamed stores are ordered by nothing else: who sees a later store sees them.
  _mm_sfence();
}

}  // namespace

void copy_past_caches(std::byte* into, std::span<const std::byte> from) noexcept {
  size_t head = 0;
  size_t lines = 0;
  if (from.size() >= kStreamedBytesMin) {
    head = -reinterpret_cast<uintptr_t>(into) % kLineBytes;
    lines = (from.size() - head) / kLineBytes * kLineBytes;
    stream_lines(into + head, from.data() + head, lines);
  }
  const size_t done = head + lines;
  std::memcpy(into, from.data(), head);
  std::memcpy(into + done, from.data() + done, from.size() - done);
}
#else
void copy_past_caches(std::byte* into, std::span<const std::byte> from) noexcept {
  std::memcpy(into, from.data(), from.size());
}
#endif
}  // namespace memd
