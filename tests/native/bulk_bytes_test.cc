#include "base/bulk_bytes.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <cstdio>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "base/workers.h"

namespace memd {
namespace {

class BulkBytesTest : public testing::Test {
 protected:
  ~BulkBytesTest() override { end_turns(); }

  std::vector<std::byte> from_ = std::vector<std::byte>(kTurnBytesMax);
  std::vector<std::byte> into_ = std::vector<std::byte>(kTurnBytesMax);
};

TEST_F(BulkBytesTest, a_turn_that_moves_more_than_it_may_aborts) {
  end_turn();
  copy_bytes(into_.data(), from_.data(), from_.size());
  EXPECT_DEATH(zero_bytes(into_.data(), 1), "the server thread has moved 65537 bytes in a turn");
  EXPECT_DEATH(hash_record(std::span(from_).first(1)), "65537 bytes");
  EXPECT_DEATH(hash_extent(std::span(from_).first(1), {}), "65537 bytes");
}

TEST_F(BulkBytesTest, each_turn_may_move_as_much_as_the_one_before) {
  for (int i = 0; i < 3; ++i) {
    end_turn();
    copy_bytes(into_.data(), from_.data(), from_.size());
  }
}

TEST_F(BulkBytesTest, a_thread_without_a_store_and_a_worker_move_any_number) {
  end_turn();
  std::thread([this] {
    for (int i = 0; i < 3; ++i) copy_bytes(into_.data(), from_.data(), from_.size());
  }).join();
  // A worker's work runs on the thread of a test that runs it by hand; what is done then does not.
  Workers workers(Workers::ByHand{}, eventfd(0, EFD_CLOEXEC));
  const auto move = [this] {
    for (int i = 0; i < 3; ++i) copy_bytes(into_.data(), from_.data(), from_.size());
  };
  workers.submit({}, move, [] {});
  workers.run_next();
  workers.reap();
  workers.submit({}, [] {}, move);
  workers.run_next();
  EXPECT_DEATH(workers.reap(), "the server thread has moved");
}

TEST_F(BulkBytesTest, what_a_place_owes_counts_for_the_place) {
  end_turn();
  {
    const Owed owed(OwedPlace::journal_written);
    for (int i = 0; i < 3; ++i) copy_bytes(into_.data(), from_.data(), from_.size());
  }
  EXPECT_EQ(owed_bytes_max(OwedPlace::journal_written), 3 * kTurnBytesMax);
  copy_bytes(into_.data(), from_.data(), from_.size());
  EXPECT_DEATH(zero_bytes(into_.data(), 1), "the server thread has moved");
}

TEST(OwedPlacesTest, no_place_joins_the_table) {
  std::printf("%zu places where the server thread moves more than a turn may:\n",
              std::size(kOwedPlaces));
  for (size_t i = 0; i < std::size(kOwedPlaces); ++i) {
    ASSERT_EQ(static_cast<size_t>(kOwedPlaces[i].place), i) << "the table is in the enum's order";
    std::printf("  %-24s %s\n", kOwedPlaces[i].name, kOwedPlaces[i].what);
  }
  EXPECT_LE(std::size(kOwedPlaces), size_t{1});
}

}  // namespace
}  // namespace memd
