// Classes of I/O on one path: who is next, who gets how much, and how much is given at a time.
#include "io/io_scheduler.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "base/clock.h"
#include "base/units.h"
#include "block.h"
#include "io/memory_queue.h"

namespace memd::testing {
namespace {

constexpr std::array kAll = {IoPriority::demand,
                             IoPriority::prefetch,
                             IoPriority::state,
                             IoPriority::writeback,
                             IoPriority::scrub};

/// A device that takes 1 ms for each MiB, one chunk after the other, and classes that keep it busy.
class Share : public ::testing::Test {
 protected:
  static constexpr uint64_t kRequestBytes = 2_MiB;

  /// Bytes of each class that were started until `bytes` were, where all of `classes` always wait.
  std::map<IoPriority, uint64_t> run(const std::set<IoPriority>& classes, uint64_t bytes) {
    IoScheduler scheduler;
    scheduler.add_path({.depth = 1, .chunk_bytes = 1_MiB});
    std::map<IoPriority, uint64_t> moved;
    for (const IoPriority priority : classes) add(scheduler, priority);
    for (uint64_t done = 0; done < bytes; done += 1_MiB) {
      const IoPriority priority = start(scheduler);
      moved[priority] += 1_MiB;
      if (moved[priority] % kRequestBytes == 0) add(scheduler, priority);
    }
    return moved;
  }

  void add(IoScheduler& scheduler, IoPriority priority, uint64_t bytes = kRequestBytes) {
    auto transfer = std::make_shared<Transfer>();
    transfer->request.priority = priority;
    transfer->request.data = {memory_.data(), bytes};
    scheduler.add(std::move(transfer));
  }

  /// Starts a chunk, as a queue does, and ends it at once; its class.
  static IoPriority start(IoScheduler& scheduler) {
    const auto next = scheduler.next([](const auto&) { return false; });
    EXPECT_NE(next, nullptr);
    const uint64_t bytes =
        std::min(next->request.data.size() - next->started_bytes, scheduler.limits(0).chunk_bytes);
    next->started = true;
    next->started_bytes += bytes;
    scheduler.started(next, bytes);
    scheduler.finished(next->request, bytes);
    return next->request.priority;
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(8_MiB);
};

TEST_F(Share, alone_each_class_has_the_whole_path) {
  for (const IoPriority priority : kAll) {
    EXPECT_EQ(run({priority}, 64_MiB).at(priority), 64_MiB) << io_priority_name(priority);
  }
}

TEST_F(Share, of_a_path_that_all_want_every_class_moves_and_demand_gets_most) {
  auto moved = run({kAll.begin(), kAll.end()}, 6000_MiB);
  const auto share = [&moved](IoPriority priority) {
    return static_cast<double>(moved[priority]) / static_cast<double>(6000_MiB);
  };
  EXPECT_NEAR(share(IoPriority::demand), 0.841, 0.01);
  EXPECT_NEAR(share(IoPriority::prefetch), 0.105, 0.005);
  EXPECT_NEAR(share(IoPriority::state), 0.0263, 0.002);
  EXPECT_NEAR(share(IoPriority::writeback), 0.0263, 0.002);
  EXPECT_NEAR(share(IoPriority::scrub), 0.0016, 0.0005);
}

TEST_F(Share, scrub_has_more_in_flight_the_longer_nobody_else_wants_the_path) {
  IoScheduler scheduler;
  scheduler.add_path({.depth = 8, .chunk_bytes = 1_MiB});
  for (int i = 0; i < 200; ++i) add(scheduler, IoPriority::scrub, 1_MiB);
  std::deque<IoScheduler::TransferPointer> in_flight;
  const auto start_all = [&] {
    while (const auto next = scheduler.next([](const auto&) { return false; })) {
      next->started = true;
      next->started_bytes = 1_MiB;
      scheduler.started(next, 1_MiB);
      in_flight.push_back(next);
    }
    return in_flight.size();
  };
  const auto finish_one = [&] {
    scheduler.finished(in_flight.front()->request, 1_MiB);
    in_flight.pop_front();
  };
  std::vector<size_t> counts{start_all()};
  while (counts.back() < 8 && counts.size() < 100) {
    finish_one();
    counts.push_back(start_all());
  }
  EXPECT_EQ(counts.front(), 1u);
  EXPECT_EQ(counts.back(), 8u);
  EXPECT_EQ(counts.size(), 1u + 1 + 2 + 3 + 4 + 5 + 6 + 7) << "that many ended at each depth";
  finish_one();
  add(scheduler, IoPriority::demand, 1_MiB);
  EXPECT_EQ(start_all(), 8u);
  EXPECT_EQ(in_flight.back()->request.priority, IoPriority::demand);
  // Nothing new gets in the job's way while it has something there, and then one at a time.
  while (in_flight.size() > 1) {
    finish_one();
    EXPECT_LE(start_all(), 8u - 1);
  }
  while (in_flight.front()->request.priority == IoPriority::demand) finish_one();
  EXPECT_EQ(start_all(), 1u);
}

TEST_F(Share, state_and_writeback_get_the_same_of_what_demand_leaves) {
  auto moved = run({IoPriority::state, IoPriority::writeback}, 100_MiB);
  EXPECT_EQ(moved[IoPriority::state], 50_MiB);
  EXPECT_EQ(moved[IoPriority::writeback], 50_MiB);
  moved = run({IoPriority::demand, IoPriority::state, IoPriority::writeback}, 1700_MiB);
  EXPECT_NEAR(static_cast<double>(moved[IoPriority::state]), static_cast<double>(50_MiB), 1_MiB);
  EXPECT_NEAR(
      static_cast<double>(moved[IoPriority::writeback]), static_cast<double>(50_MiB), 1_MiB);
}

TEST_F(Share, no_class_waits_longer_than_its_share_says) {
  IoScheduler scheduler;
  scheduler.add_path({.depth = 1, .chunk_bytes = 1_MiB});
  for (const IoPriority priority : kAll) add(scheduler, priority);
  std::map<IoPriority, uint64_t> last;
  std::map<IoPriority, uint64_t> longest;
  std::map<IoPriority, int> counts;
  for (uint64_t turn = 1; turn <= 4000; ++turn) {
    const IoPriority priority = start(scheduler);
    longest[priority] = std::max(longest[priority], turn - last[priority]);
    last[priority] = turn;
    if (++counts[priority] % 2 == 0) add(scheduler, priority);
  }
  EXPECT_LE(longest[IoPriority::demand], 5u);
  EXPECT_LE(longest[IoPriority::prefetch], 13u);
  EXPECT_LE(longest[IoPriority::state], 42u);
  EXPECT_LE(longest[IoPriority::writeback], 42u);
  EXPECT_LE(longest[IoPriority::scrub], 640u);
}

TEST_F(Share, a_demanded_request_that_comes_alone_is_next_whatever_waits) {
  // Wherever in the others' turns it comes.
  for (uint64_t turns = 0; turns < 200; ++turns) {
    IoScheduler scheduler;
    scheduler.add_path({.depth = 1, .chunk_bytes = 1_MiB});
    for (const IoPriority priority : kAll) {
      if (priority == IoPriority::demand) continue;
      for (int i = 0; i < 200; ++i) add(scheduler, priority, 1_MiB);
    }
    for (uint64_t turn = 0; turn < turns; ++turn) {
      start(scheduler);
    }
    add(scheduler, IoPriority::demand, 1_MiB);
    ASSERT_EQ(start(scheduler), IoPriority::demand) << "after " << turns;
  }
}

TEST_F(Share, a_class_saves_nothing_up_while_it_wants_nothing) {
  IoScheduler scheduler;
  scheduler.add_path({.depth = 1, .chunk_bytes = 1_MiB});
  // One more than is started, so that its job never wants nothing and is never forgotten.
  add(scheduler, IoPriority::writeback, 1_MiB);
  for (int i = 0; i < 100; ++i) {
    add(scheduler, IoPriority::writeback, 1_MiB);
    start(scheduler);
  }
  // A hundred turns later state wants to move as well: half and half from now on.
  std::map<IoPriority, int> counts;
  for (int i = 0; i < 20; ++i) {
    add(scheduler, IoPriority::state, 1_MiB);
    add(scheduler, IoPriority::writeback, 1_MiB);
  }
  for (int i = 0; i < 20; ++i) {
    ++counts[start(scheduler)];
  }
  EXPECT_EQ(counts[IoPriority::state], 10);
  EXPECT_EQ(counts[IoPriority::writeback], 10);
}

TEST_F(Share, small_requests_of_a_class_get_no_more_than_large_ones) {
  IoScheduler scheduler;
  scheduler.add_path({.depth = 1, .chunk_bytes = 1_MiB});
  for (int i = 0; i < 4; ++i) add(scheduler, IoPriority::state, 1_MiB);
  for (int i = 0; i < 64; ++i) add(scheduler, IoPriority::writeback, 64_KiB);
  std::map<IoPriority, int> counts;
  for (int i = 0; i < 34; ++i) {
    ++counts[start(scheduler)];
  }
  EXPECT_EQ(counts[IoPriority::state], 2);
  EXPECT_EQ(counts[IoPriority::writeback], 32);
}

TEST_F(Share, what_is_refused_waits_no_longer_and_costs_its_class_nothing) {
  IoScheduler scheduler;
  scheduler.add_path({.depth = 4, .chunk_bytes = 1_MiB});
  for (int i = 0; i < 3; ++i) add(scheduler, IoPriority::writeback, 1_MiB);
  int refused = 0;
  EXPECT_EQ(scheduler.next([&refused](const auto&) {
    ++refused;
    return true;
  }),
            nullptr);
  EXPECT_EQ(refused, 3);
  add(scheduler, IoPriority::state, 1_MiB);
  add(scheduler, IoPriority::writeback, 1_MiB);
  EXPECT_EQ(start(scheduler), IoPriority::state);
  EXPECT_EQ(start(scheduler), IoPriority::writeback);
}

/// As the server thread uses it, on devices in memory.
class Scheduled : public ::testing::Test {
 protected:
  uint16_t add_path(const IoPathLimits& limits) {
    const uint16_t path = queue_.add_disk(std::make_shared<MemoryDisk>(64_MiB), "disk");
    queue_.set_limits(path, limits);
    return path;
  }

  void submit(uint16_t path, IoPriority priority, std::span<std::byte> data) {
    const bool writes = priority == IoPriority::writeback;
    queue_.submit({.kind = writes ? IoKind::write : IoKind::read,
                   .priority = priority,
                   .device = path,
                   .data = data,
                   .complete = [this, path, priority](const Status& status) {
                     EXPECT_TRUE(status.is_ok()) << status.message();
                     order_.push_back({path, priority});
                   }});
  }

  ManualClock clock_;
  MemoryQueue queue_{{.depth = 64, .clock = &clock_, .latency_ns = 100}};
  std::vector<std::pair<uint16_t, IoPriority>> order_;
};

TEST_F(Scheduled, no_path_has_more_chunks_in_flight_than_its_depth) {
  const uint16_t narrow = add_path({.depth = 2, .chunk_bytes = 1_MiB});
  const uint16_t wide = add_path({.depth = 5, .chunk_bytes = 64_KiB});
  Block data(8_MiB);
  submit(narrow, IoPriority::state, data.span());
  submit(wide, IoPriority::state, data.span().first(1_MiB));
  EXPECT_EQ(queue_.ready_count(), 7u) << "neither waits for the other's depth";
  EXPECT_EQ(queue_.started_count(), 7u);
  size_t most = 0;
  while (queue_.complete_next()) most = std::max(most, queue_.ready_count());
  EXPECT_EQ(most, 7u);
  EXPECT_EQ(queue_.started_count(), 8u + 16u) << "chunks of 1 MiB and of 64 KiB";
  EXPECT_EQ(order_.size(), 2u);
}

TEST_F(Scheduled, a_depth_that_shrinks_holds_for_what_is_started_from_then_on) {
  const uint16_t path = add_path({.depth = 8, .chunk_bytes = 64_KiB});
  Block data(1_MiB);
  submit(path, IoPriority::state, data.span());
  EXPECT_EQ(queue_.ready_count(), 8u);
  queue_.set_limits(path, {.depth = 1, .chunk_bytes = 128_KiB});
  for (int i = 0; i < 7; ++i) queue_.complete_next();
  EXPECT_EQ(queue_.ready_count(), 1u);
  EXPECT_EQ(queue_.started_count(), 8u);
  queue_.complete_all();
  EXPECT_EQ(queue_.started_count(), 12u);
  EXPECT_EQ(order_.size(), 1u);
}

/// Every job's memory consists of huge pages.
class LongChunks : public Scheduled {
 protected:
  static constexpr IoPathLimits kLimits{.depth = 32, .chunk_bytes = 1_MiB};

  LongChunks() : disk_(huge_.add_disk(std::make_shared<MemoryDisk>(64_MiB), "disk")) {
    huge_.set_limits(disk_, kLimits);
  }
  /// At most 64 MiB.
  void read(JobId job, uint64_t bytes, IoPriority priority = IoPriority::state) {
    huge_.submit({.priority = priority,
                  .job = job,
                  .device = disk_,
                  .data = data_.span().first(bytes),
                  .complete = [](const Status& status) { EXPECT_TRUE(status.is_ok()); }});
  }

  MemoryQueue huge_{{.depth = 64, .clock = &clock_, .pages = PageKind::huge}};
  uint16_t disk_;
  Block data_{64_MiB};
};

TEST_F(LongChunks, a_job_that_is_alone_moves_them_and_has_no_more_bytes_in_flight) {
  read(JobId{1}, 64_MiB);
  EXPECT_EQ(huge_.ready_count() * kChunkBytesMax, kLimits.in_flight_bytes_max());
  huge_.complete_all();
  EXPECT_EQ(huge_.started_count(), 64_MiB / kChunkBytesMax);
}

TEST_F(LongChunks, the_daemon_moves_them_for_itself_where_there_is_no_job) {
  read(kDaemonJob, 64_MiB);
  EXPECT_EQ(huge_.ready_count() * kChunkBytesMax, kLimits.in_flight_bytes_max());
  huge_.complete_all();
}

TEST_F(LongChunks, eight_of_them_fit_in_flight) {
  huge_.set_limits(disk_, {.depth = 10, .chunk_bytes = 512_KiB});
  read(JobId{1}, 5_MiB);
  EXPECT_EQ(huge_.ready_count(), 8u);
  huge_.set_limits(disk_, {.depth = 4, .chunk_bytes = 512_KiB});
  huge_.complete_all();
  const uint64_t before = huge_.started_count();
  read(JobId{1}, 4_MiB);
  EXPECT_EQ(huge_.ready_count(), 4u) << "no chunk is shorter than the path's";
  huge_.complete_all();
  EXPECT_EQ(huge_.started_count() - before, 8u);
}

TEST_F(LongChunks, a_job_that_has_company_moves_none) {
  read(JobId{1}, 64_MiB);
  const uint64_t alone = huge_.started_count();
  read(JobId{2}, 32_MiB);
  huge_.complete_all();
  EXPECT_EQ(huge_.started_count() - alone, 32u + 32u) << "half of the first job's are in flight";
  const uint64_t before = huge_.started_count();
  read(kDaemonJob, 4_MiB);
  huge_.complete_all();
  EXPECT_EQ(huge_.started_count() - before, 4u) << "both jobs were there a moment ago";
}

TEST_F(LongChunks, scrub_moves_none) {
  read(JobId{1}, 4_MiB, IoPriority::scrub);
  huge_.complete_all();
  EXPECT_EQ(huge_.started_count(), 4u);
}

TEST_F(Scheduled, a_demanded_read_waits_for_what_is_in_flight_and_for_nothing_else) {
  const uint16_t path = add_path({.depth = 4, .chunk_bytes = 1_MiB});
  Block data(8_MiB);
  Block wanted(1_MiB);
  for (int i = 0; i < 3; ++i) {
    submit(path, IoPriority::prefetch, data.span());
    submit(path, IoPriority::state, data.span());
    submit(path, IoPriority::writeback, data.span());
  }
  submit(path, IoPriority::demand, wanted.span());
  // Oldest first: the four in flight before it, and then itself.
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(queue_.complete_next());
  ASSERT_EQ(order_.size(), 1u);
  EXPECT_EQ(order_.front().second, IoPriority::demand);
  queue_.complete_all();
  EXPECT_EQ(order_.size(), 10u);
}

TEST_F(Scheduled, a_prefetch_that_is_raised_waits_no_longer_than_a_demanded_read) {
  const uint16_t path = add_path({.depth = 2, .chunk_bytes = 1_MiB});
  Block data(8_MiB);
  Block begun(4_MiB);
  Block wanted(3_MiB);
  std::vector<const std::byte*> done;
  const auto prefetch = [&](std::span<std::byte> into) {
    queue_.submit({.priority = IoPriority::prefetch,
                   .device = path,
                   .data = into,
                   .complete = [&done, into](const Status&) { done.push_back(into.data()); }});
  };
  prefetch(begun.span());  // two of its chunks are started
  for (int i = 0; i < 3; ++i) {
    prefetch(data.span());
    submit(path, IoPriority::state, data.span());
  }
  prefetch(wanted.span().first(1_MiB));
  prefetch(wanted.span().subspan(1_MiB));
  queue_.raise({}, wanted.span());
  queue_.raise({}, begun.span());
  // The two in flight, the three that were raised first, and the two that were left of the other.
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(queue_.complete_next());
  EXPECT_EQ(done,
            (std::vector<const std::byte*>{
                wanted.span().data(), wanted.span().data() + 1_MiB, begun.span().data()}));
  queue_.complete_all();
  EXPECT_EQ(done.size(), 6u);
  EXPECT_EQ(order_.size(), 3u);
}

TEST_F(Share, only_prefetches_of_the_memory_that_is_asked_for_are_raised) {
  IoScheduler scheduler;
  scheduler.add_path({.depth = 1, .chunk_bytes = 1_MiB});
  for (const IoPriority priority : kAll) add(scheduler, priority, 2_MiB);
  EXPECT_EQ(scheduler.raise({}, {memory_.data() + 1_MiB, 7_MiB}), 0u) << "half of it";
  EXPECT_EQ(scheduler.raise({}, {memory_.data(), 2_MiB - 1}), 0u);
  EXPECT_EQ(scheduler.raise({}, {memory_.data(), 2_MiB}), 1u) << "no other class";
  EXPECT_EQ(scheduler.raise({}, {memory_.data(), 2_MiB}), 0u);
  size_t count = 0;
  scheduler.for_each_waiting([&count](const auto&) { ++count; });
  EXPECT_EQ(count, kAll.size());
}

TEST_F(Scheduled, endless_demand_keeps_nobody_else_waiting_for_ever) {
  const uint16_t path = add_path({.depth = 2, .chunk_bytes = 1_MiB});
  Block data(1_MiB);
  std::function<void(const Status&)> again = [&](const Status&) {
    queue_.submit({.device = path, .data = data.span(), .complete = again});
  };
  for (int i = 0; i < 4; ++i) again(Status::ok());
  Block other(1_MiB);
  for (const IoPriority priority : kAll) {
    if (priority != IoPriority::demand) submit(path, priority, other.span());
  }
  for (int i = 0; i < 600 && order_.size() < 4; ++i) queue_.complete_next();
  std::vector<IoPriority> order;
  for (const auto& [of_path, priority] : order_) order.push_back(priority);
  EXPECT_EQ(
      order,
      (std::vector{
          IoPriority::prefetch, IoPriority::state, IoPriority::writeback, IoPriority::scrub}));
  again = [](const Status&) {};
  queue_.complete_all();
}

TEST_F(Scheduled, a_full_path_holds_up_no_other) {
  const uint16_t full = add_path({.depth = 1, .chunk_bytes = 1_MiB});
  const uint16_t other = add_path({.depth = 1, .chunk_bytes = 1_MiB});
  queue_.add_fault({.kind = MemoryFaultKind::stall, .device = full});
  Block data(4_MiB);
  submit(full, IoPriority::demand, data.span());
  submit(other, IoPriority::scrub, data.span());
  queue_.complete_all();
  ASSERT_EQ(order_.size(), 1u);
  EXPECT_EQ(order_.front().first, other);
  queue_.release_stalled();
  queue_.complete_all();
  EXPECT_EQ(order_.size(), 2u);
}

TEST(IoPathLimits, what_no_path_can_have_is_refused_with_what_can) {
  EXPECT_TRUE(check_limits({}).is_ok());
  EXPECT_TRUE(check_limits({.depth = 1, .chunk_bytes = kChunkBytesMin}).is_ok());
  for (const IoPathLimits& limits : {IoPathLimits{.depth = 0},
                                     IoPathLimits{.depth = kDepthMax + 1},
                                     IoPathLimits{.chunk_bytes = 0},
                                     IoPathLimits{.chunk_bytes = kChunkBytesMin + 1},
                                     IoPathLimits{.chunk_bytes = kChunkBytesMax + kBlockBytes}}) {
    const Status status = check_limits(limits);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  }
  EXPECT_NE(check_limits({.depth = 0}).message().find("is 1 to 1024, not 0"), std::string::npos);
}

}  // namespace
}  // namespace memd::testing
