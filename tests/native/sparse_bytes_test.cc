#include "base/sparse_bytes.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/units.h"

namespace memd {
namespace {

constexpr uint64_t kSizeBytes = 1_GiB;
constexpr uint64_t kPlaces[] = {0, 5 * 4096 + 7, 64_MiB, kSizeBytes - 1};

SparseBytes some() {
  SparseBytes made(kSizeBytes);
  for (const uint64_t place : kPlaces) made.bytes()[place] = std::byte{9};
  return made;
}

uint64_t resident_bytes(std::span<std::byte> bytes) {
  const auto page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(bytes.size() / page_bytes);
  EXPECT_EQ(::mincore(bytes.data(), bytes.size(), pages.data()), 0);
  return page_bytes * static_cast<uint64_t>(std::ranges::count_if(
                          pages, [](unsigned char page) { return (page & 1) != 0; }));
}

void expect_same(SparseBytes& found) {
  for (const uint64_t place : kPlaces) {
    EXPECT_EQ(found.bytes()[place], std::byte{9}) << place;
    if (place == 0) continue;
    EXPECT_EQ(found.bytes()[place - 1], std::byte{0}) << place;
  }
}

TEST(SparseBytes, what_is_not_written_is_zero_and_takes_no_memory) {
  SparseBytes made(kSizeBytes);
  EXPECT_EQ(resident_bytes(made.bytes()), 0U);
  EXPECT_EQ(made.bytes()[kSizeBytes / 2], std::byte{0});
}

TEST(SparseBytes, a_copy_has_the_same_bytes_and_memory_of_its_own) {
  SparseBytes made = some();
  SparseBytes copy(made);
  EXPECT_LE(resident_bytes(copy.bytes()), 8_MiB);  // pages may be huge ones
  expect_same(copy);
  copy.bytes()[0] = std::byte{1};
  EXPECT_EQ(made.bytes()[0], std::byte{9});
}

TEST(SparseBytes, it_becomes_another_in_its_place_and_forgets_what_it_had) {
  SparseBytes made = some();
  SparseBytes other(kSizeBytes);
  other.bytes()[128_MiB] = std::byte{4};
  const std::byte* const place = other.bytes().data();
  other.become(made);
  EXPECT_EQ(other.bytes().data(), place);
  EXPECT_EQ(other.bytes()[128_MiB], std::byte{0});
  expect_same(other);
}

}  // namespace
}  // namespace memd
