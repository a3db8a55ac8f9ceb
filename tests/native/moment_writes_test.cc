// Writes of moments that come one behind the other, as of a load: how many are under way, and in
// which order they take effect.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint64_t kTiles = 7;
constexpr uint64_t kLarge = kTiles * kTileElements;
constexpr uint64_t kSmall = 3005;  // the others share a tile

class MomentWritesTest : public ::testing::Test {
 protected:
  MomentWritesTest()
      : heart_(disk_, HeartOptions{.segment_count = kFloorSegments + 24, .workers_by_hand = true}) {
    session_ = heart_.attach(heart_.open("job", 20));
    ids_ = heart_.declare(session_,
                          {parameter("large", kLarge),
                           with_maximum(parameter("small", kSmall)),
                           parameter("other", kSmall)});
  }
  ~MomentWritesTest() override { work(); }

  /// A run of elements of one tile, whose moments are this number.
  void begin_write(size_t i, uint64_t first, uint64_t count, float number, bool maximum = false) {
    const std::vector<float> all(count, number);
    const size_t place = answers_.size();
    answers_.emplace_back();
    heart_.store().operations().write_moments(
        {.session_id = session_,
         .shard_id = ids_[i],
         .element_first = first,
         .element_count = count},
        ++generation_,
        MomentValues{.exp_avg = all,
                     .exp_avg_sq = all,
                     .max_exp_avg_sq = maximum ? all : std::vector<float>{}},
        [this, place](const Status& status) {
          EXPECT_TRUE(status.is_ok()) << status.message();
          answers_[place] = ++answer_count_;
        });
  }
  void begin_tile(uint64_t tile, float number) {
    begin_write(0, tile * kTileElements, kTileElements, number);
  }
  void begin_sync() {
    heart_.store().operations().sync(session_, [this](const Status& status, const StepReport&) {
      EXPECT_TRUE(status.is_ok()) << status.message();
      sync_answer_ = ++answer_count_;
    });
  }
  /// All that a worker has to do now.
  size_t run_workers() {
    size_t count = 0;
    while (heart_.workers().run_next()) ++count;
    return count;
  }
  /// Until nothing is left to do.
  void work() {
    EXPECT_TRUE(heart_.until([this] {
      run_workers();
      return heart_.store().is_idle();
    }));
  }
  std::vector<float> exp_avg(size_t i) {
    const uint64_t count = heart_.job(session_).shards()[ids_[i]].element_count();
    std::vector<float> all;
    for (uint64_t first = 0; first < count; first += kTileElements) {
      bool is_done = false;
      heart_.store().operations().read_moments(
          {.session_id = session_,
           .shard_id = ids_[i],
           .element_first = first,
           .element_count = std::min(kTileElements, count - first)},
          [&](const Status& status, const MomentValues& values) {
            EXPECT_TRUE(status.is_ok()) << status.message();
            all.insert(all.end(), values.exp_avg.begin(), values.exp_avg.end());
            is_done = true;
          });
      work();
      EXPECT_TRUE(is_done);
    }
    return all;
  }
  void expect_tiles() {
    const std::vector<float> found = exp_avg(0);
    for (uint64_t tile = 0; tile < kTiles; ++tile) {
      const std::vector<float> part(found.begin() + tile * kTileElements,
                                    found.begin() + (tile + 1) * kTileElements);
      EXPECT_TRUE(part == std::vector<float>(kTileElements, static_cast<float>(tile + 1)))
          << "tile " << tile;
    }
  }
  size_t reads() const {
    return static_cast<size_t>(std::count_if(
        heart_.io().operations.begin(), heart_.io().operations.end(), [](const auto& each) {
          return each.kind == IoKind::read;
        }));
  }

  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(kDiskBytes);
  mutable Heart heart_;
  uint64_t session_ = 0;
  std::vector<uint32_t> ids_;
  uint64_t generation_ = 0;
  std::vector<size_t> answers_;  // the how-manieth answer each write got; 0: none yet
  size_t answer_count_ = 0;
  size_t sync_answer_ = 0;
};

TEST_F(MomentWritesTest, several_tiles_are_under_way_at_once_and_no_more) {
  for (uint64_t tile = 0; tile < kTiles; ++tile) begin_tile(tile, static_cast<float>(tile + 1));
  heart_.turns();
  EXPECT_EQ(run_workers(), Moments::kWritesAtOnce);
  work();
  for (const size_t each : answers_) EXPECT_NE(each, 0U);
  expect_tiles();
}

TEST_F(MomentWritesTest, a_sync_comes_when_those_before_it_are_done_and_before_the_later_ones) {
  begin_tile(0, 1);
  begin_tile(1, 2);
  begin_sync();
  for (uint64_t tile = 2; tile < kTiles; ++tile) begin_tile(tile, static_cast<float>(tile + 1));
  heart_.turns();
  EXPECT_EQ(run_workers(), 2U);
  work();
  EXPECT_EQ(std::max(answers_[0], answers_[1]), 2U);
  EXPECT_EQ(sync_answer_, 3U);
  expect_tiles();
}

TEST_F(MomentWritesTest, those_of_one_tile_take_effect_in_their_order) {
  begin_write(1, 0, kSmall, 1);
  begin_write(2, 0, kSmall, 2);  // beside it in the tile
  begin_write(1, 0, 1000, 3);
  begin_write(1, 500, 1000, 4);
  heart_.turns();
  EXPECT_EQ(run_workers(), 1U);
  work();
  std::vector<float> wanted(kSmall, 1);
  std::fill_n(wanted.begin(), 1000, 3.0F);
  std::fill_n(wanted.begin() + 500, 1000, 4.0F);
  EXPECT_TRUE(exp_avg(1) == wanted);
  EXPECT_TRUE(exp_avg(2) == std::vector<float>(kSmall, 2));
}

TEST_F(MomentWritesTest, a_tile_gets_a_place_for_maxima_when_no_write_is_at_the_bucket) {
  begin_write(0, 0, kTileElements, 1);
  begin_write(0, kTileElements, kTileElements, 2, true);
  begin_write(0, 2 * kTileElements, kTileElements, 3, true);
  heart_.turns();
  EXPECT_EQ(run_workers(), 1U);
  work();
  const std::vector<float> found = exp_avg(0);
  for (const uint64_t tile : {0, 1, 2}) {
    EXPECT_EQ(found[tile * kTileElements], static_cast<float>(tile + 1));
    EXPECT_EQ(found[(tile + 1) * kTileElements - 1], static_cast<float>(tile + 1));
  }
}

TEST_F(MomentWritesTest, a_tile_that_is_replaced_is_not_read_before) {
  for (uint64_t tile = 0; tile < kTiles; ++tile) begin_tile(tile, 100);
  begin_write(1, 0, kSmall, 1);
  begin_sync();
  work();
  const size_t before = reads();
  for (uint64_t tile = 0; tile < kTiles; ++tile) begin_tile(tile, static_cast<float>(tile + 1));
  work();
  EXPECT_EQ(reads(), before);
  begin_write(1, 0, 1000, 3);
  work();
  EXPECT_GT(reads(), before) << "the rest of the tile stays";
  expect_tiles();
  std::vector<float> wanted(kSmall, 1);
  std::fill_n(wanted.begin(), 1000, 3.0F);
  EXPECT_TRUE(exp_avg(1) == wanted);
}

}  // namespace
}  // namespace memd::testing
