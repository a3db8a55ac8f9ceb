// A turn ends when its time is over, each part of it gets on, and nothing is lost or out of order.
#include "base/turn_budget.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "asking_client.h"
#include "base/turn_circle.h"
#include "base/units.h"
#include "base/workers.h"
#include "block.h"
#include "io/memory_queue.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint64_t kPieceNs = divide_up(TurnBudget::kTurnNs, 3);
constexpr uint64_t kPieces = 10;
constexpr uint64_t kPiecesATurn = 3;

TEST(TurnBudgetTest, has_no_bound_before_it_begins_and_after_it_was_lifted) {
  ManualClock clock;
  TurnBudget turn(clock);
  clock.advance(1'000'000'000);
  EXPECT_FALSE(turn.is_spent());
  turn.begin();
  EXPECT_FALSE(turn.is_spent());
  clock.advance(TurnBudget::kTurnNs - 1);
  EXPECT_FALSE(turn.is_spent());
  EXPECT_FALSE(turn.is_cut());
  clock.advance(1);
  EXPECT_TRUE(turn.is_spent());
  EXPECT_TRUE(turn.is_cut());
  turn.begin();
  EXPECT_FALSE(turn.is_cut());
  clock.advance(TurnBudget::kTurnNs);
  turn.lift();
  EXPECT_FALSE(turn.is_spent());
  EXPECT_FALSE(turn.is_cut());
}

std::vector<uint32_t> first_ones(size_t count) {
  std::vector<uint32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0U);
  return numbers;
}

TEST(TurnBudgetTest, completions_that_a_turn_has_no_time_for_come_next_in_their_order) {
  ManualClock clock;
  TurnBudget turn(clock);
  MemoryQueue queue({.automatic = true, .clock = &clock, .turn = &turn});
  const uint16_t device = queue.add_disk(std::make_shared<MemoryDisk>(1_MiB), "disk");
  Block bytes(kPieces * kBlockBytes);
  std::vector<uint32_t> completed;
  for (uint32_t i = 0; i < kPieces; ++i) {
    queue.submit({.kind = IoKind::write,
                  .device = device,
                  .offset_bytes = i * kBlockBytes,
                  .data = bytes.span().subspan(i * kBlockBytes, kBlockBytes),
                  .complete = [&, i](const Status& status) {
                    EXPECT_TRUE(status.is_ok()) << status.message();
                    completed.push_back(i);
                    clock.advance(kPieceNs);
                  }});
  }
  for (size_t turns = 1; turns <= divide_up(kPieces, kPiecesATurn); ++turns) {
    turn.begin();
    const size_t before = completed.size();
    const size_t reaped = queue.reap();
    EXPECT_EQ(reaped, completed.size() - before);
    EXPECT_EQ(completed, first_ones(std::min(turns * kPiecesATurn, kPieces)));
    EXPECT_EQ(turn.is_cut(), completed.size() < kPieces);
  }
  EXPECT_EQ(completed.size(), kPieces);
  EXPECT_EQ(queue.reap(), 0u);
}

/// A turn without time begins with kPieces requests of `bytes`: how many of them it starts.
uint32_t started_at_once(PageKind pages, uint64_t bytes) {
  ManualClock clock;
  TurnBudget turn(clock);
  Block data(bytes);
  MemoryQueue queue({.clock = &clock, .turn = &turn, .pages = pages});
  const uint16_t device = queue.add_disk(std::make_shared<MemoryDisk>(bytes), "disk");
  turn.begin();
  queue.begin_batch();
  for (uint32_t i = 0; i < kPieces; ++i) {
    queue.submit({.device = device, .data = data.span(), .complete = [](const Status&) {}});
  }
  clock.advance(TurnBudget::kTurnNs);
  queue.end_batch();
  return static_cast<uint32_t>(queue.started_count());
}

TEST(TurnBudgetTest, a_turn_without_time_starts_1_mib_or_one_long_chunk) {
  EXPECT_EQ(started_at_once(PageKind::small, 4_MiB), 1u);
  EXPECT_EQ(started_at_once(PageKind::small, 512_KiB), 2u);
  EXPECT_EQ(started_at_once(PageKind::huge, 4_MiB), 1u);
  EXPECT_EQ(started_at_once(PageKind::huge, 1_MiB), 1u);
  EXPECT_EQ(started_at_once(PageKind::huge, 512_KiB), 2u);
}

TEST(TurnBudgetTest, a_turn_without_time_starts_two_chunks_and_the_next_ones_the_rest) {
  constexpr uint64_t kHalfBytes = 512_KiB;  // of what is handed over together
  ManualClock clock;
  TurnBudget turn(clock);
  MemoryQueue queue({.clock = &clock, .turn = &turn});
  const uint16_t device =
      queue.add_disk(std::make_shared<MemoryDisk>(kPieces * kHalfBytes), "disk");
  Block bytes(kPieces * kHalfBytes);
  uint32_t completed_count = 0;
  const auto started_count = [&] {
    uint32_t count = 0;
    for (const IoInFlight& each : queue.in_flight()) count += each.started ? 1 : 0;
    return count;
  };
  turn.begin();
  queue.begin_batch();
  for (uint32_t i = 0; i < kPieces; ++i) {
    queue.submit({.kind = IoKind::read,
                  .device = device,
                  .offset_bytes = i * kHalfBytes,
                  .data = bytes.span().subspan(i * kHalfBytes, kHalfBytes),
                  .complete = [&](const Status&) { ++completed_count; }});
  }
  EXPECT_EQ(started_count(), 0u);
  clock.advance(TurnBudget::kTurnNs);
  queue.end_batch();
  EXPECT_EQ(started_count(), 2u);
  EXPECT_TRUE(turn.is_cut());
  turn.begin();
  EXPECT_EQ(queue.reap(), 0u);
  EXPECT_EQ(started_count(), kPieces);
  queue.complete_all();
  queue.reap();
  EXPECT_EQ(completed_count, kPieces);
}

TEST(TurnBudgetTest, finished_work_that_a_turn_has_no_time_for_comes_next_in_its_order) {
  ManualClock clock;
  TurnBudget turn(clock);
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Workers workers(Workers::ByHand{}, wake.get(), &turn);
  std::vector<uint32_t> done;
  for (uint32_t i = 0; i < kPieces; ++i) {
    workers.submit(
        {.job = JobId{1}, .bytes = 1, .kind = WorkKind::bytes},
        [] {},
        [&, i] {
          done.push_back(i);
          clock.advance(kPieceNs);
        });
  }
  while (workers.run_next()) {
  }
  for (size_t turns = 1; turns <= divide_up(kPieces, kPiecesATurn); ++turns) {
    turn.begin();
    const size_t before = done.size();
    const size_t reaped = workers.reap();
    EXPECT_EQ(reaped, done.size() - before);
    EXPECT_EQ(done, first_ones(std::min(turns * kPiecesATurn, kPieces)));
    EXPECT_EQ(workers.open_count(), kPieces - done.size());
    EXPECT_EQ(turn.is_cut(), done.size() < kPieces);
  }
  EXPECT_EQ(done.size(), kPieces);
}

TEST(TurnBudgetTest, bytes_of_any_number_are_one_thing_to_be_reaped) {
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, 1_MiB, 1_MiB + 1, 700_MiB + 5}) {
    Workers workers(Workers::ByHand{}, wake.get());
    uint64_t end_bytes = 0;
    size_t done_count = 0;
    workers.submit_pieces(
        JobId{1},
        bytes,
        [&](uint64_t offset, uint64_t part) {
          EXPECT_EQ(offset, end_bytes);
          end_bytes += part;
          EXPECT_EQ(workers.reap(), 0u) << "not all is done";
        },
        [&] { ++done_count; });
    EXPECT_EQ(workers.open_count(), 1u);
    while (workers.run_next()) {
    }
    EXPECT_EQ(end_bytes, bytes);
    EXPECT_EQ(workers.reap(), 1u);
    EXPECT_EQ(done_count, 1u);
  }
}

TEST(TurnBudgetTest, threads_share_the_parts_of_some_bytes_and_one_says_that_all_are_done) {
  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Workers workers(3, wake.get());
  ASSERT_TRUE(workers.status().is_ok());
  constexpr size_t kParts = 100;
  for (int round = 0; round < 20; ++round) {
    std::vector<std::atomic<uint32_t>> seen(kParts);
    size_t done_count = 0;
    workers.submit_pieces(
        JobId{1},
        kParts * 1_MiB,
        [&](uint64_t offset, uint64_t) { ++seen[offset / 1_MiB]; },
        [&] { ++done_count; });
    while (done_count == 0) workers.reap();
    EXPECT_TRUE(std::ranges::all_of(seen, [](const auto& count) { return count == 1; }));
    EXPECT_EQ(workers.reap(), 0u);
    EXPECT_EQ(workers.open_count(), 0u);
  }
}

TEST(TurnBudgetTest, a_turn_ends_behind_the_part_in_which_its_time_ran_out) {
  ManualClock clock;
  TurnBudget turn(clock);
  TurnCircle circle;
  std::vector<size_t> ran;
  const auto run = [&](const std::vector<uint64_t>& part_ns) {
    turn.begin();
    ran.clear();
    return circle.run(part_ns.size(), turn, [&](size_t part) {
      ran.push_back(part);
      clock.advance(part_ns[part]);
      return part_ns[part] > 0;
    });
  };
  constexpr uint64_t kAll = TurnBudget::kTurnNs;
  const std::vector<uint64_t> second_is_long{kPieceNs, kAll, 0, kPieceNs};
  EXPECT_TRUE(run(second_is_long));
  EXPECT_EQ(ran, (std::vector<size_t>{0, 1}));
  EXPECT_TRUE(turn.is_cut());
  // It begins with the part that follows, and comes to the long one last.
  EXPECT_TRUE(run(second_is_long));
  EXPECT_EQ(ran, (std::vector<size_t>{2, 3, 0, 1}));
  EXPECT_FALSE(turn.is_cut());
  // Each part gets on, however long all of them take.
  std::vector<size_t> in_order;
  for (int turns = 0; turns < 8; ++turns) {
    EXPECT_TRUE(run({kAll, kAll, kAll, kAll}));
    in_order.insert(in_order.end(), ran.begin(), ran.end());
  }
  EXPECT_EQ(in_order, (std::vector<size_t>{2, 3, 0, 1, 2, 3, 0, 1}));
}

TEST(TurnBudgetTest, a_part_that_finds_nothing_ends_no_turn) {
  ManualClock clock;
  TurnBudget turn(clock);
  TurnCircle circle;
  size_t count = 0;
  turn.begin();
  clock.advance(TurnBudget::kTurnNs);
  EXPECT_FALSE(circle.run(3, turn, [&](size_t) {
    ++count;
    return false;
  }));
  EXPECT_EQ(count, 3u);
  EXPECT_FALSE(turn.is_cut());
}

TEST(TurnBudgetTest, whoever_found_no_time_is_served_first_in_the_next_turn) {
  constexpr uint32_t kSessions = 4;
  constexpr uint32_t kRequests = 100;
  constexpr uint32_t kRequestsATurn = 8;
  Heart heart(std::make_shared<MemoryDisk>(400_MiB), HeartOptions{.pieces_a_turn = kRequestsATurn});
  const uint64_t job_id = heart.open("job");
  std::vector<uint64_t> sessions;
  for (uint32_t i = 0; i < kSessions; ++i) sessions.push_back(heart.attach(job_id));
  const uint32_t shard_id = heart.declare(
      sessions[0],
      {{.name = "blob", .kind = ShardKind::blob, .dtype = DType::float32, .shape = {64}}})[0];
  heart.write(sessions[0], shard_id, std::vector<float>(64, 1.0F));
  heart.touch(sessions[0], shard_id);
  std::vector<std::unique_ptr<AskingClient>> clients;
  for (const uint64_t session_id : sessions)
    clients.push_back(std::make_unique<AskingClient>(heart, session_id));

  for (const auto& client : clients) client->ask(shard_id, kRequests);
  uint32_t turn_count = 0;
  for (uint32_t most = 0; most < kRequests; ++turn_count) {
    ASSERT_TRUE(heart.turn());
    uint32_t least = kRequests;
    most = 0;
    for (const auto& client : clients) {
      least = std::min(least, client->taken_count());
      most = std::max(most, client->taken_count());
    }
    EXPECT_GE(least, (turn_count + 1) / kSessions);  // a turn has time for one of them
    EXPECT_LE(most - least, kRequestsATurn);
  }
  EXPECT_GE(turn_count, kSessions * kRequests / (kRequestsATurn + kSessions));
}

}  // namespace
}  // namespace memd::testing
