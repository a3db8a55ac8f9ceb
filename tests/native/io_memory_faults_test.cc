// What the queues make of a device that misbehaves, and what the in-memory devices can pretend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <vector>

#include "block.h"
#include "io/memory_queue.h"

namespace memd::testing {
namespace {

class MemoryFaults : public ::testing::Test {
 protected:
  void SetUp() override { device_ = queue_.add_disk(disk_, "disk-0"); }

  void submit(IoKind kind, std::span<std::byte> data, uint64_t offset_bytes = 0) {
    queue_.submit({.kind = kind,
                   .device = device_,
                   .offset_bytes = offset_bytes,
                   .data = data,
                   .complete = [this](const Status& status) { statuses_.push_back(status); }});
  }
  Status run(IoKind kind, std::span<std::byte> data, uint64_t offset_bytes = 0) {
    submit(kind, data, offset_bytes);
    queue_.complete_all();
    EXPECT_FALSE(statuses_.empty());
    return statuses_.empty() ? error(StatusCode::deadline, "no completion") : statuses_.back();
  }
  bool disk_holds(const Block& block, std::span<std::byte> disk_bytes, uint64_t offset_bytes = 0) {
    auto expected = const_cast<Block&>(block).span();
    return std::equal(expected.begin(),
                      expected.end(),
                      disk_bytes.begin() + static_cast<ptrdiff_t>(offset_bytes));
  }

  ManualClock clock_;
  std::shared_ptr<MemoryDisk> disk_ = std::make_shared<MemoryDisk>(16_MiB);
  std::vector<Status> statuses_;
  MemoryQueue queue_{{.clock = &clock_, .latency_ns = 100}};
  uint16_t device_ = 0;
};

TEST_F(MemoryFaults, an_error_is_reported_once_with_path_range_and_kind) {
  queue_.add_fault({.error_number = ENXIO});
  Block block(8_KiB);
  const Status status = run(IoKind::write, block.span(), 4_KiB);
  EXPECT_EQ(status.error_number(), ENXIO);
  EXPECT_NE(status.message().find("write of 8192 bytes at offset 4096 of disk-0"),
            std::string::npos)
      << status.message();
  EXPECT_EQ(statuses_.size(), 1U);
  EXPECT_EQ(queue_.statistics().resubmit_count, 0U);
}

TEST_F(MemoryFaults, a_failed_sync_is_never_tried_again) {
  for (const int error_number : {EIO, EINTR, EAGAIN}) {
    queue_.add_fault({.io_kind = IoKind::sync, .error_number = error_number});
    const Status status = run(IoKind::sync, {});
    EXPECT_EQ(status.error_number(), error_number) << status.message();
    queue_.clear_faults();
    queue_.lift_fence();
  }
  EXPECT_EQ(queue_.statistics().resubmit_count, 0U);
  EXPECT_EQ(queue_.device_statistics(device_).sync.error_count_by_errno,
            (std::map<int, uint64_t>{{EIO, 1}, {EINTR, 1}, {EAGAIN, 1}}));
}

TEST_F(MemoryFaults, interruptions_are_tried_again_64_times_and_not_more) {
  Block block(4_KiB);
  for (const int error_number : {EAGAIN, EINTR}) {
    queue_.add_fault({.count = 64, .error_number = error_number});
    EXPECT_TRUE(run(IoKind::read, block.span()).is_ok());
    queue_.clear_faults();
    queue_.add_fault({.count = 65, .error_number = error_number});
    EXPECT_EQ(run(IoKind::write, block.span()).error_number(), error_number);
    queue_.clear_faults();
    queue_.lift_fence();
  }
  EXPECT_EQ(queue_.statistics().resubmit_count, 4U * 64U);
}

TEST_F(MemoryFaults, a_short_transfer_goes_on_from_the_last_whole_block) {
  for (const IoKind kind : {IoKind::write, IoKind::read}) {
    Block block(64_KiB);
    block.fill(static_cast<uint64_t>(kind));
    if (kind == IoKind::read) std::copy_n(block.span().begin(), 64_KiB, disk_->bytes().begin());
    Block data(64_KiB);
    if (kind == IoKind::write) std::copy_n(block.span().begin(), 64_KiB, data.span().begin());
    queue_.add_fault({.kind = MemoryFaultKind::short_transfer, .transferred_bytes = 10'000});
    EXPECT_TRUE(run(kind, data.span()).is_ok());
    EXPECT_TRUE(data == block);
    EXPECT_TRUE(disk_holds(block, disk_->bytes()));
    queue_.clear_faults();
  }
  EXPECT_EQ(queue_.statistics().resubmit_count, 2U);
}

TEST_F(MemoryFaults, two_empty_transfers_are_forgiven_and_three_on_end_are_an_error) {
  Block block(4_KiB);
  queue_.add_fault({.kind = MemoryFaultKind::zero_progress, .count = 2});
  EXPECT_TRUE(run(IoKind::write, block.span()).is_ok());
  queue_.clear_faults();
  queue_.add_fault({.kind = MemoryFaultKind::zero_progress, .count = 3});
  EXPECT_EQ(run(IoKind::write, block.span()).error_number(), EIO);
}

TEST_F(MemoryFaults, after_a_chunk_that_failed_no_other_of_its_request_is_started) {
  queue_.set_limits(device_, {.depth = 1, .chunk_bytes = 64_KiB});
  queue_.add_fault({.skip_count = 1, .error_number = EIO});
  Block block(1_MiB);
  const uint64_t started_before = queue_.started_count();
  EXPECT_EQ(run(IoKind::read, block.span()).error_number(), EIO);
  EXPECT_EQ(statuses_.size(), 1U);
  EXPECT_EQ(queue_.started_count() - started_before, 2U) << "of 16";
}

TEST_F(MemoryFaults, empty_transfers_are_counted_from_the_last_that_moved_something) {
  Block block(64_KiB);
  queue_.add_fault({.kind = MemoryFaultKind::zero_progress, .count = 2});
  queue_.add_fault(
      {.kind = MemoryFaultKind::short_transfer, .skip_count = 2, .transferred_bytes = 8_KiB});
  queue_.add_fault({.kind = MemoryFaultKind::zero_progress, .skip_count = 3, .count = 2});
  EXPECT_TRUE(run(IoKind::write, block.span()).is_ok()) << statuses_.back().message();
  EXPECT_EQ(queue_.statistics().resubmit_count, 5U);
}

TEST_F(MemoryFaults, after_a_failed_write_or_sync_nothing_is_written_and_reads_go_on) {
  const uint16_t other = queue_.add_disk(std::make_shared<MemoryDisk>(16_MiB), "disk-1");
  for (const IoKind kind : {IoKind::write, IoKind::sync}) {
    SCOPED_TRACE(static_cast<int>(kind));
    queue_.add_fault({.io_kind = kind, .error_number = ENOSPC});
    Block block(4_KiB);
    block.fill(3);
    const auto data = kind == IoKind::sync ? std::span<std::byte>() : block.span();
    EXPECT_EQ(run(kind, data).error_number(), ENOSPC);
    for (const uint16_t device : {device_, other}) {
      for (const IoKind refused : {IoKind::write, IoKind::sync}) {
        Status status;
        queue_.submit({.kind = refused,
                       .device = device,
                       .offset_bytes = 8_KiB * (refused == IoKind::write),
                       .data = refused == IoKind::sync ? std::span<std::byte>() : block.span(),
                       .complete = [&](const Status& result) { status = result; }});
        EXPECT_TRUE(status.is_ok()) << "completions run inside reap()";
        queue_.complete_all();
        EXPECT_EQ(status.error_number(), ENOSPC);
        EXPECT_NE(status.message().find("not written, because an earlier"), std::string::npos);
        EXPECT_NE(status.message().find("of disk-0"), std::string::npos) << status.message();
      }
    }
    EXPECT_TRUE(run(IoKind::read, block.span()).is_ok());
    EXPECT_TRUE(disk_holds(Block(4_KiB), disk_->bytes(), 8_KiB));
    EXPECT_EQ(queue_.device_statistics(other).write.error_count(), 0U) << "nobody asked it";
    queue_.clear_faults();
    queue_.lift_fence();
  }
}

TEST_F(MemoryFaults, writes_that_wait_behind_a_failed_one_are_never_started) {
  MemoryQueue queue({.depth = 2});
  const uint16_t device = queue.add_disk(disk_, "disk");
  queue.add_fault({.io_kind = IoKind::write});
  // Two in flight, the first of them with chunks that wait; behind them writes, a read and a sync.
  std::vector<Block> blocks;
  std::vector<Status> statuses;
  const auto submit_to = [&](IoKind kind, uint64_t bytes, uint64_t offset_bytes) {
    blocks.emplace_back(bytes).fill(7);
    queue.submit({.kind = kind,
                  .priority = IoPriority::writeback,
                  .device = device,
                  .offset_bytes = offset_bytes,
                  .data = kind == IoKind::sync ? std::span<std::byte>() : blocks.back().span(),
                  .complete = [&](const Status& status) { statuses.push_back(status); }});
  };
  submit_to(IoKind::write, 12_MiB, 0);
  submit_to(IoKind::write, 4_KiB, 14_MiB);
  submit_to(IoKind::read, 4_KiB, 0);
  submit_to(IoKind::sync, 4_KiB, 0);
  while (queue.statistics().in_flight_count > 0) {
    queue.reap();
    queue.complete_next();
  }
  ASSERT_EQ(statuses.size(), 4U);
  EXPECT_EQ(
      std::count_if(
          statuses.begin(), statuses.end(), [](const Status& status) { return status.is_ok(); }),
      1)
      << "the read";
  EXPECT_EQ(disk_->unsynced_writes().size(), 1U) << "the chunk in flight beside the failed one";
  EXPECT_EQ(disk_->unsynced_writes().front().offset_bytes, IoPathLimits{}.chunk_bytes);
}

TEST_F(MemoryFaults, a_stalled_request_waits_until_it_is_released) {
  queue_.add_fault({.kind = MemoryFaultKind::stall});
  Block stalled(4_KiB);
  Block other(4_KiB);
  submit(IoKind::read, stalled.span());
  submit(IoKind::read, other.span());
  queue_.complete_all();
  EXPECT_EQ(statuses_.size(), 1U);
  EXPECT_EQ(queue_.statistics().in_flight_count, 1U);
  queue_.release_stalled();
  queue_.complete_all();
  EXPECT_EQ(statuses_.size(), 2U);
}

TEST_F(MemoryFaults, the_destructor_completes_what_is_stalled) {
  int completed = 0;
  Block block(4_KiB);
  {
    MemoryQueue queue({});
    const uint16_t device = queue.add_disk(disk_, "disk");
    queue.add_fault({.kind = MemoryFaultKind::stall});
    queue.submit({.device = device, .data = block.span(), .complete = [&completed](const Status&) {
                    ++completed;
                  }});
  }
  EXPECT_EQ(completed, 1);
}

TEST_F(MemoryFaults, a_flipped_bit_of_a_read_is_gone_at_the_next_read) {
  queue_.add_fault({.kind = MemoryFaultKind::flipped_bit, .bit = 8 * 100 + 3});
  Block block(4_KiB);
  EXPECT_TRUE(run(IoKind::read, block.span()).is_ok());
  EXPECT_EQ(block.span()[100], std::byte{8});
  EXPECT_TRUE(run(IoKind::read, block.span()).is_ok());
  EXPECT_EQ(block.span()[100], std::byte{0});
}

TEST_F(MemoryFaults, a_flipped_bit_of_a_write_stays_on_the_disk) {
  queue_.add_fault({.kind = MemoryFaultKind::flipped_bit, .io_kind = IoKind::write, .bit = 0});
  Block block(4_KiB);
  EXPECT_TRUE(run(IoKind::write, block.span()).is_ok());
  EXPECT_EQ(block.span()[0], std::byte{0});
  EXPECT_EQ(disk_->bytes()[0], std::byte{1});
}

TEST_F(MemoryFaults, a_misdirected_write_lands_elsewhere) {
  queue_.add_fault(
      {.kind = MemoryFaultKind::misdirected, .offset_bytes = 0, .redirect_offset_bytes = 1_MiB});
  Block block(4_KiB);
  block.fill(5);
  EXPECT_TRUE(run(IoKind::write, block.span()).is_ok());
  EXPECT_TRUE(disk_holds(block, disk_->bytes(), 1_MiB));
  EXPECT_TRUE(disk_holds(Block(4_KiB), disk_->bytes()));
}

TEST_F(MemoryFaults, a_lost_write_reports_success_and_changes_nothing) {
  queue_.add_fault({.kind = MemoryFaultKind::lost_write});
  Block block(4_KiB);
  block.fill(5);
  EXPECT_TRUE(run(IoKind::write, block.span()).is_ok());
  EXPECT_TRUE(disk_holds(Block(4_KiB), disk_->bytes()));
  EXPECT_TRUE(disk_->unsynced_writes().empty());
}

TEST_F(MemoryFaults, a_fault_hits_the_chosen_request_of_its_kind_and_device_only) {
  const uint16_t other = queue_.add_disk(std::make_shared<MemoryDisk>(4_KiB), "disk-1");
  queue_.add_fault({.io_kind = IoKind::read, .device = device_, .skip_count = 1});
  Block block(4_KiB);
  EXPECT_TRUE(run(IoKind::read, block.span()).is_ok());
  EXPECT_TRUE(run(IoKind::write, block.span()).is_ok());
  queue_.submit({.device = other, .data = block.span(), .complete = [this](const Status& status) {
                   statuses_.push_back(status);
                 }});
  queue_.complete_all();
  EXPECT_TRUE(statuses_.back().is_ok());
  EXPECT_EQ(run(IoKind::read, block.span()).error_number(), EIO);
  EXPECT_TRUE(run(IoKind::read, block.span()).is_ok());
}

TEST_F(MemoryFaults, the_clock_moves_by_the_latency_and_statistics_show_it) {
  Block block(4_KiB);
  EXPECT_TRUE(run(IoKind::read, block.span()).is_ok());
  EXPECT_EQ(clock_.now_ns(), 100U);
  const SecondsHistogram seconds = queue_.device_statistics(device_).read.seconds;
  EXPECT_DOUBLE_EQ(seconds.sum_seconds(), 100e-9);
  EXPECT_EQ(seconds.counts().front(), 1U);
}

TEST_F(MemoryFaults, requests_complete_in_the_order_the_test_chooses) {
  Block block(4_KiB);
  std::vector<int> order;
  for (int n = 0; n < 3; ++n) {
    queue_.submit({.device = device_, .data = block.span(), .complete = [&order, n](const Status&) {
                     order.push_back(n);
                   }});
  }
  queue_.complete_at(2);
  queue_.complete_at(1);
  EXPECT_TRUE(queue_.complete_next());
  EXPECT_FALSE(queue_.complete_next());
  EXPECT_EQ(order, (std::vector<int>{2, 1, 0}));
}

TEST_F(MemoryFaults, a_seed_gives_the_same_order_again) {
  const auto order_of = [this](uint64_t seed) {
    std::vector<int> order;
    Block block(4_KiB);
    MemoryQueue queue({.order_seed = seed});
    const uint16_t device = queue.add_disk(disk_, "disk");
    for (int n = 0; n < 20; ++n) {
      queue.submit({.device = device, .data = block.span(), .complete = [&order, n](const Status&) {
                      order.push_back(n);
                    }});
    }
    queue.complete_all();
    return order;
  };
  EXPECT_EQ(order_of(1), order_of(1));
  EXPECT_NE(order_of(1), order_of(2));
}

TEST_F(MemoryFaults, after_a_crash_synced_writes_stay_and_others_as_chosen) {
  std::vector<Block> blocks;
  for (uint64_t i = 0; i < 4; ++i) blocks.emplace_back(4_KiB).fill(i);
  ASSERT_TRUE(run(IoKind::write, blocks[0].span(), 0).is_ok());
  ASSERT_TRUE(run(IoKind::sync, {}).is_ok());
  ASSERT_TRUE(run(IoKind::write, blocks[1].span(), 4_KiB).is_ok());
  ASSERT_TRUE(run(IoKind::write, blocks[2].span(), 8_KiB).is_ok());
  submit(IoKind::write, blocks[3].span(), 12_KiB);  // in flight
  queue_.crash([](uint16_t, const UnsyncedWrite& write) { return write.offset_bytes != 4_KiB; });
  queue_.complete_all();
  EXPECT_EQ(statuses_.back().error_number(), EIO);
  EXPECT_TRUE(disk_holds(blocks[0], disk_->bytes(), 0));
  EXPECT_TRUE(disk_holds(Block(4_KiB), disk_->bytes(), 4_KiB));
  EXPECT_TRUE(disk_holds(blocks[2], disk_->bytes(), 8_KiB));
  EXPECT_TRUE(disk_holds(blocks[3], disk_->bytes(), 12_KiB));
  EXPECT_EQ(run(IoKind::sync, {}).error_number(), EIO);
}

TEST_F(MemoryFaults, a_sync_covers_only_writes_whose_completion_was_seen_before_it) {
  Block block(4_KiB);
  block.fill(9);
  submit(IoKind::write, block.span());
  submit(IoKind::sync, {});
  queue_.complete_all();
  EXPECT_EQ(disk_->unsynced_writes().size(), 1U);
  EXPECT_TRUE(disk_holds(Block(4_KiB), disk_->durable_bytes()));
  EXPECT_TRUE(run(IoKind::sync, {}).is_ok());
  EXPECT_TRUE(disk_->unsynced_writes().empty());
  EXPECT_TRUE(disk_holds(block, disk_->durable_bytes()));
}

}  // namespace
}  // namespace memd::testing
