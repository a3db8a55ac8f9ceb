// What every IoQueue promises, as one suite: instantiate IoConformance with the engines to hold to
// it.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/units.h"
#include "block.h"
#include "io/io_queue.h"

namespace memd::testing {

struct EngineUnderTest {
  std::string name;
  std::function<Result<std::unique_ptr<IoQueue>>(const IoQueueOptions&)> make;
};

class IoConformance : public ::testing::TestWithParam<EngineUnderTest> {
 protected:
  void SetUp() override { make_queue(8); }

  void make_queue(uint32_t depth) {
    queue_.reset();
    wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    ASSERT_TRUE(wake_.is_open());
    auto made = GetParam().make({.depth = depth, .wake_fd = wake_.get()});
    if (!made.is_ok() && made.status().code() == StatusCode::unavailable) {
      GTEST_SKIP() << made.status().message();
    }
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    queue_ = std::move(made).value();
  }

  uint16_t add_device(uint64_t bytes) {
    const char* folder = std::getenv("MEMD_TEST_DATA");
    std::string path = std::string(folder == nullptr ? "." : folder) + "/io_conformance_XXXXXX";
    const OwnedFd named(mkstemp(path.data()));
    EXPECT_TRUE(named.is_open()) << path;
    EXPECT_EQ(ftruncate(named.get(), static_cast<off_t>(bytes)), 0);
    OwnedFd file(open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
    EXPECT_TRUE(file.is_open()) << path << ": " << std::strerror(errno);
    unlink(path.c_str());
    return queue_->add_device(std::move(file), path);
  }

  void submit(IoRequest request) {
    request.complete = [this](const Status& status) { statuses_.push_back(status); };
    queue_->submit(std::move(request));
  }

  /// As the server thread does it: sleeps on the eventfd, then reaps.
  void run_until(const std::function<bool()>& done) {
    while (!done()) {
      pollfd wait{.fd = wake_.get(), .events = POLLIN, .revents = 0};
      ASSERT_EQ(poll(&wait, 1, 20'000), 1) << "the eventfd was not written";
      uint64_t count = 0;
      ASSERT_EQ(read(wake_.get(), &count, sizeof count), ssize_t{sizeof count});
      queue_->reap();
    }
  }

  Status run(IoRequest request) {
    statuses_.clear();
    submit(std::move(request));
    run_until([this] { return !statuses_.empty(); });
    return statuses_.empty() ? error(StatusCode::deadline, "no completion") : statuses_.front();
  }

  OwnedFd wake_;
  std::vector<Status> statuses_;
  std::unique_ptr<IoQueue> queue_;
};

TEST_P(IoConformance, reads_back_what_was_written_across_chunks) {
  const uint16_t device = add_device(16_MiB);
  Block written(9_MiB + 4_KiB);
  Block read(9_MiB + 4_KiB);
  written.fill(1);
  Status status =
      run({.kind = IoKind::write, .device = device, .offset_bytes = 4_KiB, .data = written.span()});
  ASSERT_TRUE(status.is_ok()) << status.message();
  status = run({.kind = IoKind::sync, .device = device});
  ASSERT_TRUE(status.is_ok()) << status.message();
  status =
      run({.kind = IoKind::read, .device = device, .offset_bytes = 4_KiB, .data = read.span()});
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_TRUE(read == written);
}

TEST_P(IoConformance, many_requests_of_mixed_sizes_on_two_devices_all_complete_once) {
  const uint16_t first = add_device(64_MiB);
  const uint16_t second = add_device(64_MiB);
  constexpr size_t kCount = 120;
  std::mt19937 random(7);
  std::vector<Block> written;
  std::vector<Block> read;
  std::vector<int> completions(2 * kCount);
  for (size_t i = 0; i < kCount; ++i) {
    const size_t bytes = (1 + random() % 100) * 4_KiB;
    written.emplace_back(bytes).fill(i);
    read.emplace_back(bytes);
  }
  for (const IoKind kind : {IoKind::write, IoKind::read}) {
    const size_t base = kind == IoKind::read ? kCount : 0;
    for (size_t i = 0; i < kCount; ++i) {
      queue_->submit({.kind = kind,
                      .priority = static_cast<IoPriority>(i % 4),
                      .device = i % 2 == 0 ? first : second,
                      .offset_bytes = i * 512_KiB,
                      .data = kind == IoKind::read ? read[i].span() : written[i].span(),
                      .complete = [&completions, n = base + i](const Status& status) {
                        EXPECT_TRUE(status.is_ok()) << status.message();
                        ++completions[n];
                      }});
    }
    EXPECT_EQ(queue_->statistics().in_flight_count, kCount);
    run_until([this] { return queue_->statistics().in_flight_count == 0; });
  }
  EXPECT_EQ(completions, std::vector<int>(2 * kCount, 1));
  for (size_t i = 0; i < kCount; ++i) EXPECT_TRUE(read[i] == written[i]) << i;
}

TEST_P(IoConformance, waiting_requests_start_by_priority_then_in_order) {
  make_queue(1);
  if (IsSkipped()) return;
  const uint16_t device = add_device(1_MiB);
  Block block(4_KiB);
  std::vector<int> order;
  const auto read = [&](IoPriority priority, int n) {
    queue_->submit({.priority = priority,
                    .device = device,
                    .data = block.span(),
                    .complete = [&order, n](const Status&) { order.push_back(n); }});
  };
  read(IoPriority::writeback, 0);  // starts at once
  read(IoPriority::scrub, 6);
  read(IoPriority::writeback, 5);
  read(IoPriority::state, 4);
  read(IoPriority::prefetch, 3);
  read(IoPriority::demand, 1);
  read(IoPriority::demand, 2);
  run_until([&] { return order.size() == 7; });
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6}));
}

TEST_P(IoConformance, reading_past_the_end_is_an_error_that_names_path_and_range) {
  const uint16_t device = add_device(8_KiB);
  Block block(16_KiB);
  const Status status = run({.device = device, .data = block.span()});
  EXPECT_EQ(status.code(), StatusCode::device);
  EXPECT_EQ(status.error_number(), EIO);
  EXPECT_NE(status.message().find("read of 8192 bytes at offset 8192 of "), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("io_conformance_"), std::string::npos) << status.message();
  const IoKindStatistics read = queue_->device_statistics(device).read;
  EXPECT_EQ(read.error_count_by_errno, (std::map<int, uint64_t>{{EIO, 1}}));
  EXPECT_EQ(read.seconds.count(), 1U);
  EXPECT_EQ(read.bytes, 0U);
}

TEST_P(IoConformance, a_descriptor_that_is_not_open_is_an_error_of_each_kind) {
  const uint16_t device = queue_->add_device(OwnedFd(), "closed");
  Block block(4_KiB);
  for (const IoKind kind : {IoKind::read, IoKind::write, IoKind::sync}) {
    const auto data = kind == IoKind::sync ? std::span<std::byte>() : block.span();
    const Status status = run({.kind = kind, .device = device, .data = data});
    EXPECT_EQ(status.error_number(), EBADF) << status.message();
    EXPECT_NE(status.message().find("closed"), std::string::npos) << status.message();
  }
  const IoDeviceStatistics seen = queue_->device_statistics(device);
  for (const IoKindStatistics& kind : {seen.read, seen.write}) {
    EXPECT_EQ(kind.error_count_by_errno, (std::map<int, uint64_t>{{EBADF, 1}}));
  }
  EXPECT_EQ(seen.sync.error_count(), 0U) << "fenced by the failed write, it was never tried";
}

TEST_P(IoConformance, a_failing_request_of_many_chunks_completes_once) {
  const uint16_t device = add_device(4_KiB);
  Block block(64_MiB);  // more chunks than the depth
  submit({.device = device, .data = block.span()});
  run_until([this] { return !statuses_.empty(); });
  EXPECT_FALSE(statuses_.at(0).is_ok());
  const Status after = run({.device = device, .data = block.span().first(4_KiB)});
  EXPECT_TRUE(after.is_ok()) << after.message();
  EXPECT_EQ(statuses_.size(), 1U);
  EXPECT_EQ(queue_->statistics().in_flight_count, 0U);
}

TEST_P(IoConformance, completions_may_submit_further_requests) {
  const uint16_t device = add_device(1_MiB);
  Block block(4_KiB);
  int rest = 50;
  std::function<void(const Status&)> again = [&](const Status& status) {
    EXPECT_TRUE(status.is_ok()) << status.message();
    if (--rest > 0) queue_->submit({.device = device, .data = block.span(), .complete = again});
  };
  queue_->submit({.device = device, .data = block.span(), .complete = again});
  run_until([&] { return rest == 0; });
  EXPECT_EQ(queue_->device_statistics(device).read.seconds.count(), 50U);
}

TEST_P(IoConformance, submit_never_completes_and_an_empty_read_wakes_the_owner) {
  const uint16_t device = add_device(4_KiB);
  submit({.device = device, .data = {}});
  EXPECT_TRUE(statuses_.empty());
  run_until([this] { return !statuses_.empty(); });
  EXPECT_TRUE(statuses_.at(0).is_ok());
}

TEST_P(IoConformance, memory_comes_and_goes_while_other_memory_is_in_use) {
  const uint16_t device = add_device(32_MiB);
  Block pattern(5_MiB);
  pattern.fill(3);
  ASSERT_TRUE(run({.kind = IoKind::write, .device = device, .data = pattern.span()}).is_ok());
  Block busy(16_MiB);
  for (int round = 0; round < 10; ++round) {
    statuses_.clear();
    submit({.device = device, .offset_bytes = 8_MiB, .data = busy.span()});
    Block memory(5_MiB);
    // Two pieces side by side: the transfer crosses their border.
    queue_->add_memory(memory.span().first(1_MiB), PageKind::small);
    queue_->add_memory(memory.span().subspan(1_MiB), PageKind::small);
    submit({.device = device, .data = memory.span()});
    run_until([this] { return statuses_.size() == 2; });
    EXPECT_TRUE(statuses_[0].is_ok() && statuses_[1].is_ok());
    EXPECT_TRUE(memory == pattern) << round;
    queue_->remove_memory(memory.span());
  }
}

TEST_P(IoConformance, the_destructor_completes_what_is_in_flight) {
  const uint16_t device = add_device(64_MiB);
  Block block(1_MiB);
  int completed = 0;
  for (uint64_t i = 0; i < 40; ++i) {
    queue_->submit({.kind = IoKind::write,
                    .device = device,
                    .offset_bytes = i * 1_MiB,
                    .data = block.span(),
                    .complete = [&completed](const Status& status) {
                      EXPECT_TRUE(status.is_ok()) << status.message();
                      ++completed;
                    }});
  }
  queue_.reset();
  EXPECT_EQ(completed, 40);
}

TEST_P(IoConformance, statistics_count_requests_and_bytes_per_device) {
  const uint16_t quiet = add_device(4_KiB);
  const uint16_t device = add_device(16_MiB);
  Block block(8_MiB);
  ASSERT_TRUE(run({.kind = IoKind::write, .device = device, .data = block.span()}).is_ok());
  ASSERT_TRUE(run({.kind = IoKind::sync, .device = device}).is_ok());
  ASSERT_TRUE(run({.device = device, .data = block.span().first(4_KiB)}).is_ok());
  const IoDeviceStatistics seen = queue_->device_statistics(device);
  EXPECT_EQ(seen.write.bytes, 8_MiB);
  EXPECT_EQ(seen.read.bytes, 4_KiB);
  for (const IoKindStatistics& kind : {seen.read, seen.write, seen.sync}) {
    EXPECT_EQ(kind.seconds.count(), 1U);
    EXPECT_EQ(kind.error_count(), 0U);
  }
  if (queue_->name() != "memory") {
    EXPECT_GT(seen.write.seconds.sum_seconds(), 0);
    EXPECT_GT(seen.read.seconds.sum_seconds(), 0);
  }
  EXPECT_EQ(queue_->device_statistics(quiet).read.seconds.count(), 0U);
  EXPECT_EQ(queue_->statistics().in_flight_count, 0U);
}

}  // namespace memd::testing
