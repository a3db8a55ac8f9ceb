// Which slots go for one that is larger than any gap.
#include "arena/room_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "arena/arena.h"
#include "arena/segment.h"
#include "base/units.h"

namespace memd {
namespace {

constexpr uint64_t kSegmentBytes = 2_MiB;

std::unique_ptr<Arena> make_arena() {
  auto arena = Arena::create(kSegmentBytes, kSegmentBytes);
  EXPECT_TRUE(arena.is_ok());
  auto segment = Segment::create({.bytes = kSegmentBytes, .huge_pages = false, .gathered = false});
  EXPECT_TRUE(segment.is_ok());
  EXPECT_TRUE(arena.value()->add(std::move(segment).value()).is_ok());
  return std::move(arena).value();
}

/// Fills the arena with slots of these blocks, which must come to all of it.
std::vector<uint64_t> fill(Arena& arena, const std::vector<uint64_t>& blocks) {
  std::vector<uint64_t> offsets;
  for (const uint64_t count : blocks) offsets.push_back(*arena.allocate(count * kBlockBytes));
  return offsets;
}

constexpr uint64_t kAllBlocks = kSegmentBytes / kBlockBytes;

/// In calls of a few slots each.
std::vector<uint64_t> chosen(RoomSearch& search) {
  while (!search.choose(2)) {
  }
  return search.chosen();
}

TEST(RoomSearch, what_makes_no_room_stays) {
  const auto arena = make_arena();
  const auto slots = fill(*arena, {10, 10, 10, 10, kAllBlocks - 40});
  RoomSearch search(*arena, 20 * kBlockBytes);
  EXPECT_FALSE(search.offer(slots[0]));
  EXPECT_FALSE(search.offer(slots[3]));
  EXPECT_TRUE(chosen(search).empty());
  EXPECT_TRUE(search.offer(slots[2]));
  EXPECT_EQ(chosen(search), (std::vector<uint64_t>{slots[2], slots[3]}));
}

TEST(RoomSearch, gaps_count) {
  const auto arena = make_arena();
  const auto slots = fill(*arena, {10, 10, 10, 10, kAllBlocks - 40});
  arena->free(slots[1]);
  RoomSearch search(*arena, 20 * kBlockBytes);
  EXPECT_TRUE(search.offer(slots[2]));
  EXPECT_EQ(chosen(search), (std::vector<uint64_t>{slots[2]}));
}

TEST(RoomSearch, of_a_stretch_the_fewest_bytes_go) {
  const auto arena = make_arena();
  const auto slots = fill(*arena, {30, 4, 20, 3, kAllBlocks - 57});
  arena->free(slots[2]);
  RoomSearch search(*arena, 23 * kBlockBytes);
  // The large one was to go first, but the small one makes room with the gap.
  EXPECT_TRUE(search.offer(slots[0]));
  EXPECT_EQ(chosen(search), (std::vector<uint64_t>{slots[0]}));
  RoomSearch other(*arena, 27 * kBlockBytes);
  EXPECT_FALSE(other.offer(slots[1]));
  EXPECT_TRUE(other.offer(slots[3]));
  EXPECT_EQ(chosen(other), (std::vector<uint64_t>{slots[1], slots[3]}));
}

TEST(RoomSearch, what_others_take_meanwhile_is_no_room) {
  const auto arena = make_arena();
  const auto slots = fill(*arena, {10, 10, 10, kAllBlocks - 30});
  arena->free(slots[1]);
  RoomSearch search(*arena, 25 * kBlockBytes);
  EXPECT_FALSE(search.offer(slots[0]));
  EXPECT_TRUE(search.offer(slots[2]));
  ASSERT_EQ(arena->allocate(10 * kBlockBytes), slots[1]);
  EXPECT_TRUE(chosen(search).empty());
  arena->free(slots[1]);
  RoomSearch other(*arena, 25 * kBlockBytes);
  EXPECT_FALSE(other.offer(slots[2]));
  EXPECT_TRUE(other.offer(slots[0]));
  EXPECT_EQ(chosen(other), (std::vector<uint64_t>{slots[0], slots[2]}));
}

TEST(RoomSearch, finds_room_where_there_is_some_and_no_sooner) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const auto arena = make_arena();
    std::vector<uint64_t> slots;
    uint64_t left = kAllBlocks;
    while (left > 0) {
      const uint64_t count = std::min<uint64_t>(left, 1 + random() % 40);
      slots.push_back(*arena->allocate(count * kBlockBytes));
      left -= count;
    }
    for (size_t i = slots.size(); i-- > 0;) {
      if (random() % 4 != 0) continue;
      arena->free(slots[i]);
      slots.erase(slots.begin() + static_cast<ptrdiff_t>(i));
    }
    std::shuffle(slots.begin(), slots.end(), random);
    const uint64_t wanted_bytes =
        std::max(arena->largest_free_bytes() / kBlockBytes + 1, 1 + random() % 100) * kBlockBytes;
    // Block by block: whether a run of blocks is free or held by what was offered.
    std::vector<bool> may_go(kAllBlocks);
    const auto mark = [&](uint64_t offset, uint64_t bytes) {
      for (uint64_t at = offset; at < offset + bytes; at += kBlockBytes)
        may_go[at / kBlockBytes] = true;
    };
    for (const auto& [offset, bytes] : arena->gaps()) mark(offset, bytes);
    RoomSearch search(*arena, wanted_bytes);
    bool is_enough = false;
    for (const uint64_t slot : slots) {
      is_enough = search.offer(slot);
      mark(slot, arena->slots().at(slot));
      uint64_t run = 0;
      uint64_t longest = 0;
      for (const bool goes : may_go) {
        run = goes ? run + 1 : 0;
        longest = std::max(longest, run);
      }
      ASSERT_EQ(is_enough, longest * kBlockBytes >= wanted_bytes);
      if (is_enough) break;
    }
    if (!is_enough) continue;
    const auto victims = chosen(search);
    ASSERT_FALSE(victims.empty());
    for (const uint64_t slot : victims) arena->free(slot);
    EXPECT_TRUE(arena->allocate(wanted_bytes).has_value());
  }
}

}  // namespace
}  // namespace memd
