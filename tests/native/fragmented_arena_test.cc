// Room in one piece in an arena full of small entries that lie in the order of nobody's use.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr int kTurnsMax = 20'000;

/// A job whose arena is full of clean blobs of one block each, used in a random order.
class FragmentedArena {
 public:
  FragmentedArena(uint64_t segment_count, uint32_t seed)
      : slot_count_(segment_count * kSegmentBytes / kBlockBytes),
        random_(seed),
        heart_(std::make_shared<MemoryDisk>(2 * segment_count * kSegmentBytes + 400_MiB),
               kFloorSegments + segment_count) {
    heart_.tries_sleepers = false;
    const uint64_t job_id =
        heart_.open("job", segment_count, segment_count * kSegmentBytes + 200_MiB);
    session_ = heart_.attach(job_id);
    other_ = heart_.attach(job_id);
    std::vector<ShardSpec> specs;
    for (uint64_t i = 0; i < slot_count_; ++i) specs.push_back(blob("blob" + std::to_string(i), 1));
    ids_ = heart_.declare(session_, specs);
    for (const uint32_t id : ids_) heart_.write(session_, id, std::vector<float>(1, 1.0F));
    EXPECT_TRUE(heart_.sync(session_).is_ok());
    std::shuffle(ids_.begin(), ids_.end(), random_);
    for (const uint32_t id : ids_) heart_.touch(other_, id);
  }
  ~FragmentedArena() {
    for (const Held& held : held_) heart_.release(held);
  }

  Heart& heart() { return heart_; }
  const Room& room() { return heart_.job(session_).cache().room(); }
  uint64_t session() const { return session_; }
  uint64_t slot_count() const { return slot_count_; }
  std::mt19937& random() { return random_; }
  uint32_t declare(const std::string& name, uint64_t block_count) {
    return heart_.declare(session_, {blob(name, block_count * kBlockBytes / sizeof(float))})[0];
  }
  std::shared_ptr<std::optional<Held>> ask(uint32_t id, LeaseMode mode = LeaseMode::overwrite) {
    return heart_.ask(session_, id, mode);
  }
  void write(uint32_t id) {
    const auto answer = ask(id);
    turn_until_idle();
    ASSERT_TRUE(answer->has_value() && (*answer)->is_ok());
    heart_.release(**answer);
    ASSERT_TRUE(heart_.sync(session_).is_ok());
  }
  void touch(uint64_t first, uint64_t end) {
    for (uint64_t i = first; i < end; ++i) heart_.touch(other_, ids_[i]);
  }
  /// By another session, in the order of their use.
  void hold(uint64_t first, uint64_t end) {
    for (uint64_t i = first; i < end; ++i) held_.push_back(heart_.lease(other_, ids_[i]));
  }
  void hold_at_random(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i)
      held_.push_back(heart_.lease(other_, ids_[random_() % ids_.size()]));
  }
  void hold_every_fourth_block() {
    const Job& job = heart_.job(session_);
    std::vector<uint32_t> others;
    for (const uint32_t id : ids_) {
      const uint64_t block =
          job.shards().find_entry(id, Part::value)->slot()->offset_bytes / kBlockBytes;
      if (block % 4 == 0) {
        held_.push_back(heart_.lease(other_, id));
      } else {
        others.push_back(id);
      }
    }
    for (const uint32_t id : others) heart_.touch(other_, id);
  }
  void release_all_but_one() {
    while (held_.size() > 1) {
      heart_.release(held_.back());
      held_.pop_back();
    }
  }
  void release_at_random() {
    std::swap(held_[random_() % held_.size()], held_.back());
    heart_.release(held_.back());
    held_.pop_back();
  }
  uint64_t held_count() const { return held_.size(); }
  /// The longest hole, in blocks, if all went that nobody holds.
  uint64_t longest_hole() {
    Job& job = heart_.job(session_);
    std::vector<bool> stays(slot_count_);
    for (const Entry* const entry : job.shards().entries()) {
      if (entry == nullptr || entry->slot() == nullptr) continue;
      const bool goes = entry->residency() == Residency::clean &&
                        !job.cache().slots().is_pinned(*entry->slot()) && entry->has_replica();
      const uint64_t first = entry->slot()->offset_bytes / kBlockBytes;
      const uint64_t count = divide_up(std::max<uint64_t>(entry->bytes(), 1), kBlockBytes);
      for (uint64_t at = first; at < first + count; ++at) stays[at] = !goes;
    }
    uint64_t run = 0;
    uint64_t longest = 0;
    for (const bool each : stays) {
      run = each ? 0 : run + 1;
      longest = std::max(longest, run);
    }
    return longest;
  }
  /// As a daemon that sleeps and is woken. Each turn is bounded.
  void turn_until_idle(const std::function<void()>& between = [] {}) {
    for (int turn = 0; turn < kTurnsMax; ++turn) {
      const uint64_t looked_at_count = room().looked_at_count();
      const bool went_on = heart_.store().advance();
      ASSERT_LE(room().looked_at_count() - looked_at_count, 3 * Room::kLookedAtMax);
      if (!went_on) return;
      between();
    }
    FAIL() << "the search does not end";
  }

 private:
  static ShardSpec blob(const std::string& name, uint64_t element_count) {
    return {
        .name = name, .kind = ShardKind::blob, .dtype = DType::float32, .shape = {element_count}};
  }

  const uint64_t slot_count_;
  std::mt19937 random_;
  Heart heart_;
  uint64_t session_ = 0;
  uint64_t other_ = 0;
  std::vector<uint32_t> ids_;  // the longest unused first
  std::vector<Held> held_;
};

TEST(FragmentedArenaTest, a_turn_looks_at_as_many_entries_beside_50000_as_beside_5000) {
  for (const uint64_t segment_count : {10, 98}) {
    SCOPED_TRACE(segment_count);
    FragmentedArena full(segment_count, 1);
    const uint32_t large = full.declare("large", 64);
    const uint64_t before_count = full.room().looked_at_count();
    const auto answer = full.ask(large);
    EXPECT_LE(full.room().looked_at_count() - before_count, 2 * Room::kLookedAtMax);
    EXPECT_FALSE(answer->has_value());
    full.turn_until_idle();
    ASSERT_TRUE(answer->has_value() && (*answer)->is_ok());
    // One pass.
    EXPECT_LE(full.room().looked_at_count() - before_count, full.slot_count() + 1000);
    EXPECT_GE(full.room().looked_at_count() - before_count, full.slot_count() / 4);
    full.heart().release(**answer);
  }
}

TEST(FragmentedArenaTest, bytes_that_must_move_for_their_copy_find_room_over_many_turns) {
  constexpr uint64_t kSlotBytes = 8_KiB;
  constexpr uint32_t kSlots = 1024;    // of the arena
  constexpr uint32_t kLarge = 240;     // that "x" takes
  constexpr uint32_t kBeside = 120;    // to the left and right of it: a copy has room nowhere
  constexpr uint32_t kHeldEach = 100;  // a lease in each so many of the others
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  const uint64_t session = heart.attach(heart.open("job", kSlots * kSlotBytes / kSegmentBytes));
  std::vector<ShardSpec> specs{{.name = "x",
                                .kind = ShardKind::blob,
                                .dtype = DType::uint8,
                                .shape = {kLarge * kSlotBytes}}};
  for (uint32_t i = 0; i < kSlots - kLarge; ++i) {
    specs.push_back({.name = "small" + std::to_string(i),
                     .kind = ShardKind::blob,
                     .dtype = DType::uint8,
                     .shape = {kSlotBytes}});
  }
  const auto ids = heart.declare(session, specs);
  const std::vector<uint8_t> bytes(kLarge * kSlotBytes, 7);
  for (uint32_t i = 1; i < ids.size(); ++i) {
    if (i == kBeside + 1) heart.write(session, ids[0], bytes);
    heart.write(session, ids[i], std::vector<uint8_t>(kSlotBytes, static_cast<uint8_t>(i)));
  }
  ASSERT_TRUE(heart.sync(session).is_ok());
  std::vector<Held> held;
  for (uint32_t i = 2 * kBeside + 1; i < ids.size(); i += kHeldEach)
    held.push_back(heart.lease(session, ids[i]));
  ASSERT_GT(heart.job(session).cache().slots().lease_count(), 0u);
  const Held written = heart.lease(session, ids[0], LeaseMode::write);
  ASSERT_TRUE(written.is_ok()) << written.status.message();
  EXPECT_TRUE(std::ranges::equal(written.as<uint8_t>(), bytes));
}

TEST(FragmentedArenaTest, so_many_go_in_a_turn_and_no_more) {
  FragmentedArena full(4, 2);
  // More than go in one turn, and the arena is not tight for it.
  const uint32_t large = full.declare("large", full.slot_count() / 5);
  uint64_t most = 0;
  const auto answer = full.ask(large);
  const JobCounters& counters = full.heart().job(full.session()).cache().counters();
  uint64_t evicted_bytes = counters.evicted_bytes;
  full.turn_until_idle([&] {
    const uint64_t went =
        (counters.evicted_bytes - std::exchange(evicted_bytes, counters.evicted_bytes)) /
        sizeof(float);
    most = std::max(most, went);
  });
  EXPECT_EQ(most, Room::kMovedMax);
  ASSERT_TRUE(answer->has_value() && (*answer)->is_ok());
  full.heart().release(**answer);
}

TEST(FragmentedArenaTest, room_is_found_whenever_looking_at_everything_would_find_it) {
  constexpr uint32_t kSeeds = 8;
  uint32_t found_count = 0;
  int slept_count = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    FragmentedArena full(2, seed);
    full.hold_at_random(20 + full.random()() % 400);
    const uint64_t block_count = 4 + full.random()() % 60;
    const auto answer = full.ask(full.declare("large", block_count));
    // Others give back what they hold at any time: the search is somewhere in its pass.
    full.turn_until_idle([&] {
      if (full.held_count() > 20 && full.random()() % 3 == 0) full.release_at_random();
    });
    while (!answer->has_value() && full.longest_hole() < block_count) {
      ++slept_count;
      full.release_at_random();
      full.heart().store().look_for_releases();
      full.turn_until_idle();
    }
    EXPECT_EQ(answer->has_value(), true) << full.longest_hole() << " of " << block_count;
    if (!answer->has_value()) continue;
    ++found_count;
    ASSERT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
    full.heart().release(**answer);
  }
  EXPECT_EQ(found_count, kSeeds);
  EXPECT_GT(slept_count, 0);
}

TEST(FragmentedArenaTest, what_is_given_back_behind_a_search_is_found_by_its_next_pass) {
  FragmentedArena full(2, 4);
  // Every fourth block is held, by who used its shard before all others were used.
  full.hold_every_fourth_block();
  const auto answer = full.ask(full.declare("large", 8));
  EXPECT_FALSE(answer->has_value());
  bool is_given_back = false;
  full.turn_until_idle([&] {
    // The pass has met all of them. One is kept, so that there is somebody to wait for.
    if (!std::exchange(is_given_back, true)) full.release_all_but_one();
  });
  ASSERT_TRUE(answer->has_value());
  ASSERT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
  full.heart().release(**answer);
}

TEST(FragmentedArenaTest, a_prefetch_finds_room_behind_more_leased_entries_than_a_turn_looks_at) {
  constexpr uint64_t kHeld = 3 * Room::kLookedAtMax;
  FragmentedArena full(4, 3);
  const uint32_t wanted = full.declare("wanted", 1);
  full.write(wanted);
  full.touch(1, 2);  // and wanted is the longest unused but for what is used now
  full.hold(2, 2 + kHeld);
  full.touch(2 + kHeld, full.slot_count());
  full.touch(1, 2);
  full.write(full.declare("takes its place", 1));
  const auto answer = full.heart().ask({.session_id = full.session(),
                                        .shard_id = wanted,
                                        .part = Part::value,
                                        .mode = LeaseMode::read,
                                        .timeout_ns = 60'000'000'000,
                                        .for_service = false,
                                        .prefetch = true});
  EXPECT_FALSE(answer->has_value());
  full.turn_until_idle();
  full.heart().turns();
  ASSERT_TRUE(answer->has_value());
  EXPECT_TRUE((*answer)->is_ok()) << (*answer)->status.message();
}

}  // namespace
}  // namespace memd::testing
