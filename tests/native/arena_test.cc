// One side of a job's memory: slots against a model, segments back to back, and what other
// processes see of them.
#include "arena/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "base/units.h"

namespace memd {
namespace {

constexpr uint64_t kSegmentBytes = 64_KiB;

Segment new_segment() {
  Result<Segment> segment = Segment::create({.bytes = kSegmentBytes, .huge_pages = false});
  EXPECT_TRUE(segment.is_ok()) << segment.status().message();
  return std::move(segment).value();
}

std::unique_ptr<Arena> arena_with(uint64_t segment_count) {
  auto arena = Arena::create(64 * kSegmentBytes, kSegmentBytes);
  EXPECT_TRUE(arena.is_ok()) << arena.status().message();
  for (uint64_t i = 0; i < segment_count; ++i)
    EXPECT_TRUE(arena.value()->add(new_segment()).is_ok());
  return std::move(arena).value();
}

/// Which blocks are held, one flag each: slow, and hard to get wrong.
class ModelArena {
 public:
  explicit ModelArena(uint64_t block_count) : held_(block_count) {}

  std::optional<uint64_t> allocate(uint64_t block_count) {
    for (uint64_t first = 0; first + block_count <= held_.size(); ++first) {
      if (!is_free(first, block_count)) continue;
      set(first, block_count, true);
      return first;
    }
    return std::nullopt;
  }
  void free(uint64_t first, uint64_t block_count) { set(first, block_count, false); }
  uint64_t largest_free() const {
    uint64_t largest = 0;
    uint64_t run = 0;
    for (const bool held : held_) {
      run = held ? 0 : run + 1;
      largest = std::max(largest, run);
    }
    return largest;
  }
  uint64_t tail_free() const {
    uint64_t run = 0;
    for (const bool held : held_) run = held ? 0 : run + 1;
    return run;
  }

 private:
  bool is_free(uint64_t first, uint64_t block_count) const {
    for (uint64_t block = first; block < first + block_count; ++block) {
      if (held_[block]) return false;
    }
    return true;
  }
  void set(uint64_t first, uint64_t block_count, bool held) {
    for (uint64_t block = first; block < first + block_count; ++block) held_[block] = held;
  }

  std::vector<bool> held_;
};

TEST(Arena, allocates_where_a_block_by_block_model_does_over_random_use) {
  constexpr uint64_t kSegmentCount = 6;
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const auto arena = arena_with(kSegmentCount);
    ModelArena model(kSegmentCount * kSegmentBytes / kBlockBytes);
    std::mt19937 random(seed);
    std::vector<std::pair<uint64_t, uint64_t>> slots;  // offset, blocks
    uint64_t held_blocks = 0;
    for (int i = 0; i < 1000; ++i) {
      if (slots.empty() || random() % 5 < 3) {
        const uint64_t bytes = 1 + random() % (20 * kBlockBytes);
        const uint64_t block_count = divide_up(bytes, kBlockBytes);
        const auto expected = model.allocate(block_count);
        const auto offset = arena->allocate(bytes);
        ASSERT_EQ(offset.has_value(), expected.has_value());
        if (!offset) continue;
        ASSERT_EQ(*offset, *expected * kBlockBytes);
        slots.emplace_back(*offset, block_count);
        held_blocks += block_count;
      } else {
        std::swap(slots[random() % slots.size()], slots.back());
        const auto [offset, block_count] = slots.back();
        slots.pop_back();
        arena->free(offset);
        model.free(offset / kBlockBytes, block_count);
        held_blocks -= block_count;
      }
      ASSERT_EQ(arena->largest_free_bytes(), model.largest_free() * kBlockBytes);
      ASSERT_EQ(arena->tail_free_bytes(), model.tail_free() * kBlockBytes);
      ASSERT_EQ(arena->used_bytes(), held_blocks * kBlockBytes);
    }
    for (const auto& [offset, block_count] : slots) arena->free(offset);
    EXPECT_EQ(arena->largest_free_bytes(), arena->capacity_bytes());
  }
}

TEST(Arena, a_slot_behind_thousands_of_short_gaps_is_found_without_a_look_at_each) {
  const auto arena = arena_with(64);
  std::vector<uint64_t> slots;
  while (const auto offset = arena->allocate(kBlockBytes)) slots.push_back(*offset);
  ASSERT_EQ(slots.size(), 1024U);
  // Every other one goes, and two more at the end: there alone is room for three blocks.
  for (size_t i = 0; i < slots.size(); i += 2) arena->free(slots[i]);
  arena->free(slots[1023]);
  arena->free(slots[1021]);
  const uint64_t before = arena->looked_at_count();
  const auto offset = arena->allocate(3 * kBlockBytes);
  ASSERT_TRUE(offset.has_value());
  EXPECT_EQ(*offset, slots[1020]);
  // The depth of a search tree of 511 gaps whose shape is left to chance.
  EXPECT_LE(arena->looked_at_count() - before, 40U);
  EXPECT_FALSE(arena->allocate(3 * kBlockBytes).has_value());
}

TEST(Arena, a_slot_across_segments_is_one_range_in_another_mapping_of_the_descriptors_too) {
  const auto arena = arena_with(3);
  const auto head = arena->allocate(kSegmentBytes - kBlockBytes);
  const auto slot = arena->allocate(kSegmentBytes + 2 * kBlockBytes);  // lies in all three segments
  ASSERT_TRUE(head && slot);
  ASSERT_EQ(*slot, kSegmentBytes - kBlockBytes);
  const uint64_t slot_bytes = kSegmentBytes + 2 * kBlockBytes;
  for (uint64_t i = 0; i < slot_bytes; ++i)
    arena->at(*slot)[i] = static_cast<std::byte>(i * 7 % 251);

  void* range = ::mmap(nullptr, 3 * kSegmentBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(range, MAP_FAILED);
  auto* other = static_cast<std::byte*>(range);
  for (uint64_t i = 0; i < 3; ++i) {
    constexpr int kAccess = PROT_READ | PROT_WRITE;
    ASSERT_NE(::mmap(other + i * kSegmentBytes,
                     kSegmentBytes,
                     kAccess,
                     MAP_SHARED | MAP_FIXED,
                     arena->segment(i).fd(),
                     0),
              MAP_FAILED);
  }
  EXPECT_EQ(std::memcmp(other + *slot, arena->at(*slot), slot_bytes), 0);
  std::memset(other + *slot, 0x3C, slot_bytes);
  EXPECT_EQ(arena->at(*slot)[0], std::byte{0x3C});
  EXPECT_EQ(arena->at(*slot)[slot_bytes - 1], std::byte{0x3C});
  ::munmap(range, 3 * kSegmentBytes);
}

TEST(Arena, gives_up_its_last_segment_only_when_no_slot_lies_in_it) {
  const auto arena = arena_with(2);
  const auto low = arena->allocate(kSegmentBytes / 2);
  const auto across = arena->allocate(kSegmentBytes);
  ASSERT_TRUE(low && across);
  EXPECT_FALSE(arena->remove_last().has_value());
  arena->free(*across);
  const auto removed = arena->remove_last();
  ASSERT_TRUE(removed.has_value());
  EXPECT_NE(removed->data(), nullptr) << "Linux before 5.13 maps it anew";
  EXPECT_NE(removed->data(), arena->at(kSegmentBytes));
  EXPECT_EQ(arena->capacity_bytes(), kSegmentBytes);
  EXPECT_EQ(arena->largest_free_bytes(), kSegmentBytes / 2);
  EXPECT_FALSE(arena->remove_last().has_value());
  arena->free(*low);
  EXPECT_TRUE(arena->remove_last().has_value());
  EXPECT_FALSE(arena->remove_last().has_value());
  EXPECT_EQ(arena->free_bytes(), 0U);
  EXPECT_FALSE(arena->allocate(1).has_value());
}

TEST(Arena, a_segment_taken_from_one_arena_serves_another_with_its_bytes) {
  const auto from = arena_with(1);
  const auto to = arena_with(1);
  const auto slot = from->allocate(kSegmentBytes);
  ASSERT_TRUE(slot.has_value());
  std::memset(from->at(*slot), 0x77, kSegmentBytes);
  from->free(*slot);
  ASSERT_TRUE(to->add(std::move(*from->remove_last())).is_ok());
  ASSERT_TRUE(to->allocate(kSegmentBytes).has_value());
  const auto moved = to->allocate(kSegmentBytes);
  ASSERT_TRUE(moved.has_value());
  EXPECT_EQ(to->at(*moved)[kSegmentBytes - 1], std::byte{0x77});
}

TEST(Arena, has_no_room_beyond_the_addresses_it_reserved) {
  auto arena = Arena::create(2_MiB, 1_MiB);
  ASSERT_TRUE(arena.is_ok());
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(
        arena.value()->add(Segment::create({.bytes = 1_MiB, .huge_pages = false}).value()).is_ok());
  }
  const Status refused =
      arena.value()->add(Segment::create({.bytes = 1_MiB, .huge_pages = false}).value());
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find("2097152"), std::string::npos) << refused.message();
}

TEST(ArenaDeathTest, freeing_what_was_not_allocated_is_a_bug) {
  const auto arena = arena_with(1);
  ASSERT_TRUE(arena->allocate(2 * kBlockBytes).has_value());
  EXPECT_DEATH(arena->free(kBlockBytes), "CHECK failed");
}

TEST(ArenaDeathTest, memory_without_a_segment_can_not_be_touched) {
  const auto arena = arena_with(1);
  EXPECT_DEATH(*arena->at(kSegmentBytes) = std::byte{1}, "");
}

#ifdef __SANITIZE_ADDRESS__
TEST(ArenaDeathTest, the_bytes_of_a_freed_slot_are_poisoned) {
  const auto arena = arena_with(1);
  const auto slot = arena->allocate(kBlockBytes);
  ASSERT_TRUE(slot.has_value());
  *arena->at(*slot) = std::byte{1};
  arena->free(*slot);
  EXPECT_DEATH(*arena->at(*slot) = std::byte{2}, "use-after-poison");
}
#endif

}  // namespace
}  // namespace memd
