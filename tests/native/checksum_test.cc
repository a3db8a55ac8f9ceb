// The checksum that stands on disk: its value may never change, not with the processor and not with
// the compiler.
#include "base/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/checksum_variants.h"
#include "base/units.h"

namespace memd {
namespace {

std::vector<std::byte> pattern(size_t count) {
  std::vector<std::byte> bytes(count);
  uint64_t state = 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

TEST(Checksum, of_a_record_is_xxh3_64) {
  EXPECT_EQ(record_checksum({}),
            0x2D06800538D394C2U);  // the value that xxHash publishes for no bytes and seed 0
}

using Variant = uint64_t (*)(const void* bytes, size_t count, uint64_t seed);

/// Those that this processor runs.
std::vector<std::pair<const char*, Variant>> variants() {
  std::vector<std::pair<const char*, Variant>> all = {{"plain", internal::xxh3_plain}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) all.emplace_back("avx2", internal::xxh3_avx2);
  if (__builtin_cpu_supports("avx512f")) all.emplace_back("avx512", internal::xxh3_avx512);
#endif
  return all;
}

void expect_the_librarys_value(std::span<const std::byte> bytes) {
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
    const uint64_t expected = XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
    for (const auto& [name, variant] : variants()) {
      ASSERT_EQ(variant(bytes.data(), bytes.size(), seed), expected)
          << name << " of " << bytes.size() << " bytes, seed " << seed;
    }
  }
  ASSERT_EQ(record_checksum(bytes), XXH3_64bits(bytes.data(), bytes.size())) << bytes.size();
}

TEST(Checksum, has_the_librarys_value_at_every_length_and_on_every_instruction_set) {
  const auto bytes = pattern(4098);
  for (size_t count = 0; count <= 4096; ++count) {
    expect_the_librarys_value(std::span(bytes).subspan(count % 3, count));
  }
}

TEST(Checksum, has_the_librarys_value_for_extents_of_tiles) {
  const auto bytes = pattern(4_MiB + kBlockBytes);
  // fp32 and bf16: parameters, moments, moments with remainders; and the last tile of a bucket.
  for (const size_t count : {1_MiB, 512_KiB, 2_MiB, 2_MiB + 512_KiB, 4_MiB, 333 * kBlockBytes}) {
    expect_the_librarys_value(std::span(bytes).first(count));
  }
}

TEST(Checksum, differs_between_all_neighbouring_addresses) {
  const auto bytes = pattern(kBlockBytes);
  std::set<uint64_t> seen = {record_checksum(bytes)};
  for (uint16_t device = 0; device < 16; ++device) {
    for (uint64_t block = 0; block < 256; ++block) {
      const ExtentAddress address{.device = device, .offset_bytes = block * kBlockBytes};
      EXPECT_TRUE(seen.insert(extent_checksum(bytes, address)).second) << device << " " << block;
    }
  }
}

TEST(Checksum, sees_every_flipped_bit_of_a_block) {
  auto bytes = pattern(kBlockBytes);
  const ExtentAddress address{.device = 3, .offset_bytes = 40960};
  const uint64_t intact = extent_checksum(bytes, address);
  for (size_t bit = 0; bit < kBlockBytes * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_NE(extent_checksum(bytes, address), intact) << "bit " << bit;
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_EQ(extent_checksum(bytes, address), intact);
}

TEST(Checksum, is_of_the_bytes_in_every_build_but_the_one_that_measures_it) {
  EXPECT_TRUE(kExtentsAreHashed);
}

TEST(Checksum, of_known_bytes_at_a_known_address_never_changes) {
  const auto bytes = pattern(3 * kBlockBytes);
  EXPECT_EQ(extent_checksum(bytes, {.device = 0, .offset_bytes = 0}), 5638365336586109531U);
  EXPECT_EQ(extent_checksum(bytes, {.device = 1, .offset_bytes = 1_GiB}), 5927854895412135067U);
}

}  // namespace
}  // namespace memd
