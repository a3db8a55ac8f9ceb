// The checksum that stands on disk: its value may never change, not with the processor and not with
// the compiler.
#include "base/checksum.h"

#include <gtest/gtest.h>

#include <set>
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

TEST(Checksum, has_the_same_value_on_every_instruction_set) {
  const auto bytes = pattern(70'000);
  for (const size_t count :
       {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 4096, 65'536, 69'999}) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}}) {
      const uint64_t expected = internal::xxh3_plain(bytes.data() + 1, count, seed);
#if defined(__x86_64__)
      if (__builtin_cpu_supports("avx2")) {
        EXPECT_EQ(internal::xxh3_avx2(bytes.data() + 1, count, seed), expected)
            << count << " bytes";
      }
      if (__builtin_cpu_supports("avx512f")) {
        EXPECT_EQ(internal::xxh3_avx512(bytes.data() + 1, count, seed), expected)
            << count << " bytes";
      }
#endif
    }
    EXPECT_EQ(record_checksum({bytes.data() + 1, count}),
              internal::xxh3_plain(bytes.data() + 1, count, 0));
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

TEST(Checksum, of_known_bytes_at_a_known_address_never_changes) {
  const auto bytes = pattern(3 * kBlockBytes);
  EXPECT_EQ(extent_checksum(bytes, {.device = 0, .offset_bytes = 0}), 5638365336586109531U);
  EXPECT_EQ(extent_checksum(bytes, {.device = 1, .offset_bytes = 1_GiB}), 5927854895412135067U);
}

}  // namespace
}  // namespace memd
