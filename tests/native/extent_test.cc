#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/units.h"
#include "cpu_seconds.h"
#include "store/space/free_extents.h"

namespace memd {
namespace {

ExtentRecord extent_at(uint16_t device, uint64_t offset_bytes, uint32_t length_bytes) {
  return {.address = {.device = device, .offset_bytes = offset_bytes},
          .length_bytes = length_bytes,
          .checksum = 0};
}

TEST(FreeExtents, what_is_written_together_lies_together) {
  FreeExtents free;
  free.add_device(0, 2_MiB, 34_MiB);
  for (uint64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(free.allocate(1_MiB)->address.offset_bytes, (2 + i) * 1_MiB);
  }
}

TEST(FreeExtents, goes_on_behind_what_was_released_meanwhile) {
  FreeExtents free;
  free.add_device(0, 0, 8_MiB);
  const auto first = free.allocate(1_MiB);
  free.release(*first);
  EXPECT_EQ(free.allocate(1_MiB)->address.offset_bytes, 1_MiB);
}

TEST(FreeExtents, neighbours_merge_so_that_everything_can_be_taken_at_once) {
  FreeExtents free;
  free.add_device(0, 0, 3_MiB);
  std::vector<ExtentRecord> taken;
  for (int i = 0; i < 3; ++i) taken.push_back(*free.allocate(1_MiB));
  EXPECT_FALSE(free.allocate(kBlockBytes).has_value());
  for (const size_t i : {0, 2, 1}) free.release(taken[i]);
  EXPECT_EQ(free.allocate(3_MiB)->length_bytes, 3_MiB);
  EXPECT_EQ(free.free_bytes(), 0u);
  EXPECT_EQ(free.capacity_bytes(), 3_MiB);
}

TEST(FreeExtents, devices_share_bytes_by_their_free_space_even_where_sizes_alternate) {
  FreeExtents free;
  free.add_device(0, 0, 1_GiB);
  free.add_device(1, 0, 3_GiB);
  std::vector<uint64_t> bytes(2);
  for (uint32_t i = 0; i < 400; ++i) {
    const auto extent = free.allocate(i % 2 == 0 ? 1_MiB : 2_MiB);
    bytes[extent->address.device] += extent->length_bytes;
  }
  EXPECT_NEAR(static_cast<double>(bytes[0]), 150.0 * 1_MiB, 8.0 * 1_MiB);
}

TEST(FreeExtents, a_full_device_leaves_the_work_to_the_others) {
  FreeExtents free;
  free.add_device(0, 0, 1_MiB);
  free.add_device(1, 0, 8_MiB);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(free.allocate(2_MiB)->address.device, 1);
  EXPECT_FALSE(free.allocate(2_MiB).has_value());
  EXPECT_EQ(free.allocate(1_MiB)->address.device, 0);
}

TEST(FreeExtents, refuses_to_reserve_what_is_not_free) {
  FreeExtents free;
  free.add_device(0, 2_MiB, 4_MiB);
  ASSERT_TRUE(free.reserve(extent_at(0, 2_MiB, 1_MiB)).is_ok());
  for (const ExtentRecord& wrong : {extent_at(0, 2_MiB, 4096),
                                    extent_at(0, 3_MiB - 4096, 8192),
                                    extent_at(0, 0, 4096),
                                    extent_at(0, 4_MiB - 4096, 8192),
                                    extent_at(0, 4_MiB, 4096),
                                    extent_at(0, UINT64_MAX - 4095, 4096),
                                    extent_at(0, 3_MiB + 1, 4096),
                                    extent_at(0, 3_MiB, 100),
                                    extent_at(0, 3_MiB, 0),
                                    extent_at(1, 3_MiB, 4096)}) {
    EXPECT_EQ(free.reserve(wrong).code(), StatusCode::integrity);
  }
  EXPECT_EQ(free.free_bytes(), 1_MiB);
}

TEST(FreeExtentsDeathTest, a_double_release_is_our_bug) {
  FreeExtents free;
  free.add_device(0, 0, 4_MiB);
  const auto extent = *free.allocate(1_MiB);
  free.release(extent);
  EXPECT_DEATH(free.release(extent), "CHECK failed");
  EXPECT_DEATH(free.release(extent_at(0, 4_MiB, 4096)), "CHECK failed");
}

TEST(FreeExtents, agrees_with_a_plain_model_over_random_operations) {
  constexpr uint64_t kBlocks = 512;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    FreeExtents free;
    std::vector<std::vector<bool>> used(3, std::vector<bool>(kBlocks));
    for (uint16_t device = 0; device < 3; ++device) {
      free.add_device(device, 0, kBlocks * kBlockBytes);
    }
    std::vector<ExtentRecord> held;
    uint64_t used_blocks = 0;
    const auto mark = [&](const ExtentRecord& extent, bool value) {
      for (uint64_t i = 0; i < extent.length_bytes / kBlockBytes; ++i) {
        auto block = used[extent.address.device][extent.address.offset_bytes / kBlockBytes + i];
        ASSERT_NE(block, value);
        block = value;
        used_blocks += value ? 1 : uint64_t{0} - 1;
      }
    };
    const auto fits = [&](uint16_t device, uint64_t begin, uint64_t count) {
      for (uint64_t i = begin; i < begin + count; ++i) {
        if (i >= kBlocks || used[device][i]) return false;
      }
      return true;
    };
    for (int step = 0; step < 3000; ++step) {
      const uint64_t count = 1 + random() % 24;
      const auto length_bytes = static_cast<uint32_t>(count * kBlockBytes);
      const uint32_t what = random() % 8;
      if (what < 4) {
        const auto extent = free.allocate(length_bytes);
        bool possible = false;
        for (uint16_t device = 0; device < 3 && !extent; ++device) {
          for (uint64_t i = 0; i < kBlocks; ++i) possible |= fits(device, i, count);
        }
        ASSERT_FALSE(possible);
        if (!extent) continue;
        mark(*extent, true);
        held.push_back(*extent);
      } else if (what < 5) {
        const auto device = static_cast<uint16_t>(random() % 3);
        const uint64_t begin = random() % kBlocks;
        const ExtentRecord extent = extent_at(device, begin * kBlockBytes, length_bytes);
        const bool possible = fits(device, begin, count);
        ASSERT_EQ(free.reserve(extent).is_ok(), possible);
        if (!possible) continue;
        mark(extent, true);
        held.push_back(extent);
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        mark(held.back(), false);
        free.release(held.back());
        held.pop_back();
      }
      ASSERT_EQ(free.free_bytes(), (3 * kBlocks - used_blocks) * kBlockBytes);
    }
  }
}

/// Allocates extents of two blocks in a volume that has `gap_count` gaps of one block.
double seconds_to_allocate_beside(uint64_t gap_count) {
  FreeExtents free;
  free.add_device(0, 0, 2 * gap_count * kBlockBytes + 64_MiB);
  for (uint64_t i = 0; i < gap_count; ++i) {
    EXPECT_TRUE(free.reserve(extent_at(0, (2 * i + 1) * kBlockBytes, kBlockBytes)).is_ok());
  }
  return testing::cpu_seconds([&] {
    for (int i = 0; i < 1000; ++i) {
      const auto extent = free.allocate(2 * kBlockBytes);
      ASSERT_TRUE(extent.has_value());
      free.release(*extent);
    }
  });
}

TEST(FreeExtents, stays_fast_with_many_gaps_that_are_too_small) {
  // A walk over the gaps would take 3,000 times as long.
  EXPECT_LT(seconds_to_allocate_beside(300'000), 100 * seconds_to_allocate_beside(100));
}

}  // namespace
}  // namespace memd
