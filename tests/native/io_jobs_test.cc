// Several jobs on one path: bytes by weight, and a bound for what stands before a read of another.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/units.h"
#include "block.h"
#include "io/memory_queue.h"

namespace memd::testing {
namespace {

constexpr JobId kA{1};
constexpr JobId kB{2};
constexpr uint64_t kBytesPerSecond = 64_MiB;
constexpr uint64_t kSecond = 1'000'000'000;

/// A device that moves 64 MiB a second, whose depth is 8 chunks of 64 KiB.
class Jobs : public ::testing::Test {
 protected:
  static constexpr uint64_t kChunk = 64_KiB;
  static constexpr uint32_t kDepth = 8;

  Jobs() {
    path_ = queue_.add_disk(std::make_shared<MemoryDisk>(1_MiB), "disk");
    queue_.set_limits(path_, {.depth = kDepth, .chunk_bytes = kChunk});
  }
  ~Jobs() override { ending_ = true; }

  struct Load {
    JobId job;
    IoKind kind = IoKind::read;
    IoPriority priority = IoPriority::demand;
    uint64_t bytes = kChunk;
  };
  void submit(const Load& load, std::function<void()> done = [] {}) {
    queue_.submit({.kind = load.kind,
                   .priority = load.priority,
                   .job = load.job,
                   .device = path_,
                   .data = data_.span().first(load.bytes),
                   .complete = [this, load, done = std::move(done)](const Status& status) {
                     EXPECT_TRUE(status.is_ok()) << status.message();
                     moved_[load.job] += load.bytes;
                     done();
                   }});
  }
  /// As soon as one is done the next one waits.
  void keep_busy(const Load& load, int count) {
    for (int i = 0; i < count; ++i) again(load);
  }
  void run_for(uint64_t nanoseconds) {
    const uint64_t end_ns = clock_.now_ns() + nanoseconds;
    while (queue_.next_ready_ns().value_or(end_ns) < end_ns) queue_.complete_next();
  }
  /// The part of all bytes that the job moves in the next seconds.
  double part_of(JobId job, uint64_t seconds = 4) {
    moved_.clear();
    run_for(seconds * kSecond);
    uint64_t all = 0;
    for (const auto& [each, bytes] : moved_) all += bytes;
    EXPECT_NEAR(static_cast<double>(all),
                static_cast<double>(seconds * kBytesPerSecond),
                static_cast<double>(2_MiB))
        << "the device is never idle";
    return static_cast<double>(moved_[job]) / static_cast<double>(all);
  }
  JobWeight weight(double value) { return JobWeight::of(value).value(); }

  ManualClock clock_;
  Block data_{256_KiB};
  std::map<JobId, uint64_t> moved_;
  bool ending_ = false;
  MemoryQueue queue_{{.depth = 64, .clock = &clock_, .bytes_per_second = kBytesPerSecond}};
  uint16_t path_ = 0;

 private:
  void again(const Load& load) {
    if (ending_) return;
    submit(load, [this, load] { again(load); });
  }
};

TEST_F(Jobs, the_device_has_the_speed_that_it_was_given) {
  for (int i = 0; i < 512; ++i) submit({.job = kA, .bytes = 128_KiB});
  queue_.complete_all();
  EXPECT_NEAR(static_cast<double>(clock_.now_ns()), 1e9, 1e3);
  clock_.advance(kSecond);
  submit({.job = kA, .kind = IoKind::write, .bytes = 256_KiB});
  queue_.complete_all();
  EXPECT_NEAR(static_cast<double>(clock_.now_ns()), 2e9 + 1e9 / 256, 2e3)
      << "an idle device saves no time up";
}

TEST_F(Jobs, a_small_read_does_not_wait_for_all_reads_of_another_job) {
  // 64 GiB, as it would be with chunks of 1 MiB.
  for (uint64_t bytes = 0; bytes < 4_GiB; bytes += 256_KiB) submit({.job = kA, .bytes = 256_KiB});
  const uint64_t start_ns = clock_.now_ns();
  uint64_t done_ns = 0;
  submit({.job = kB, .bytes = 64_KiB}, [&] { done_ns = clock_.now_ns(); });
  while (done_ns == 0) queue_.complete_next();
  // What was in flight when it came, and itself.
  EXPECT_LE(done_ns - start_ns, (kDepth + 1) * kChunk * kSecond / kBytesPerSecond);
  EXPECT_LE(moved_[kA], (kDepth + 1) * kChunk);
}

TEST_F(Jobs, equal_jobs_move_the_same_whatever_they_do) {
  constexpr std::array<Load, 5> kLoads = {
      Load{.job = kB, .bytes = 64_KiB},
      Load{.job = kB, .bytes = 4_KiB},
      Load{.job = kB, .priority = IoPriority::prefetch, .bytes = 256_KiB},
      Load{.job = kB, .priority = IoPriority::state, .bytes = 4_KiB},
      Load{.job = kB, .kind = IoKind::write, .priority = IoPriority::writeback, .bytes = 192_KiB}};
  // A class of one job is not before one of another: demand beside writeback gets a half as well.
  keep_busy({.job = kA, .bytes = 256_KiB}, 64);
  keep_busy(kLoads[4], 64);
  EXPECT_NEAR(part_of(kA), 0.5, 0.05);
  for (const Load& load : kLoads) {
    keep_busy(load, 64);
    EXPECT_NEAR(part_of(kA, 2), 0.5, 0.05);
  }
}

TEST_F(Jobs, weights_divide_the_bytes_and_count_from_when_they_are_set) {
  keep_busy({.job = kA}, 64);
  keep_busy({.job = kB, .priority = IoPriority::state, .bytes = 16_KiB}, 64);
  queue_.set_weight(kA, weight(3));
  EXPECT_NEAR(part_of(kA), 0.75, 0.03);
  queue_.set_weight(kB, weight(3));
  EXPECT_NEAR(part_of(kA), 0.5, 0.03);
  queue_.set_weight(kA, weight(0.5));
  EXPECT_NEAR(part_of(kA), 0.5 / 3.5, 0.03);
}

TEST_F(Jobs, inside_a_job_classes_are_as_they_were) {
  keep_busy({.job = kA, .priority = IoPriority::writeback}, 64);
  keep_busy({.job = kB, .priority = IoPriority::state}, 64);
  for (int i = 0; i < 8; ++i) {
    submit({.job = kB, .priority = IoPriority::prefetch, .bytes = 256_KiB});
  }
  run_for(kSecond / 8);
  // 4 MiB of B's: 8 parts of 10 are prefetches while any wait.
  EXPECT_LE(moved_[kB], 5_MiB);
  std::map<IoPriority, size_t> waiting;
  for (const IoInFlight& each : queue_.in_flight()) ++waiting[each.priority];
  EXPECT_EQ(waiting[IoPriority::prefetch], 0u);
}

TEST_F(Jobs, what_a_job_has_in_flight_is_bounded_while_another_wants_the_path) {
  keep_busy({.job = kA, .bytes = 256_KiB}, 64);
  EXPECT_EQ(queue_.ready_count(), kDepth) << "alone it has all of it";
  // One read after the other, as a trainer's misses come: in between nothing of B waits.
  std::vector<uint64_t> waits_ns;
  for (int i = 0; i < 50; ++i) {
    const uint64_t start_ns = clock_.now_ns();
    bool done = false;
    submit({.job = kB, .bytes = 4_KiB}, [&] { done = true; });
    while (!done) queue_.complete_next();
    waits_ns.push_back(clock_.now_ns() - start_ns);
    EXPECT_LE(queue_.ready_count(), i == 0 ? kDepth : kDepth / 2);
    queue_.complete_next();  // the trainer computes, and A moves on
  }
  for (size_t i = 1; i < waits_ns.size(); ++i) {
    EXPECT_LE(waits_ns[i], (kDepth / 2 * kChunk + 4_KiB) * kSecond / kBytesPerSecond) << i;
  }
  run_for(kSecond);
  EXPECT_EQ(queue_.ready_count(), kDepth) << "it is alone again";
}

TEST_F(Jobs, a_small_weight_has_a_chunk_in_flight_at_least) {
  queue_.set_weight(kA, weight(10));
  queue_.set_weight(kB, weight(0.1));
  keep_busy({.job = kB}, 8);
  keep_busy({.job = kA}, 64);
  EXPECT_NEAR(part_of(kB, 100), 0.1 / 10.1, 0.002);
}

TEST_F(Jobs, what_the_daemon_does_for_all_of_them_is_never_starved_and_starves_nobody) {
  for (uint64_t id = 1; id <= 9; ++id) keep_busy({.job = {id}}, 16);
  run_for(kSecond / 4);
  // A catalogue, and a sync after it.
  const uint64_t start_ns = clock_.now_ns();
  bool synced = false;
  submit(
      {.job = kDaemonJob, .kind = IoKind::write, .priority = IoPriority::writeback, .bytes = 4_KiB},
      [&] {
        queue_.submit({.kind = IoKind::sync, .device = path_, .complete = [&](const Status&) {
                         synced = true;
                       }});
      });
  while (!synced) queue_.complete_next();
  // Each waits for what is in flight when it comes, and for nothing that waits.
  EXPECT_LE(clock_.now_ns() - start_ns, 2 * (kDepth + 1) * kChunk * kSecond / kBytesPerSecond);
  // And without end: one part of ten.
  keep_busy({.job = kDaemonJob, .kind = IoKind::write, .priority = IoPriority::writeback}, 16);
  EXPECT_NEAR(part_of(kDaemonJob), 0.1, 0.01);
  EXPECT_NEAR(static_cast<double>(moved_[JobId{5}]),
              0.1 * 4 * static_cast<double>(kBytesPerSecond),
              static_cast<double>(1_MiB));
}

TEST_F(Jobs, scrub_is_below_all_jobs) {
  keep_busy({.job = kDaemonJob, .priority = IoPriority::scrub}, 1);
  EXPECT_NEAR(part_of(kDaemonJob), 1.0, 0.0) << "alone it has the path";
  keep_busy({.job = kA, .priority = IoPriority::writeback}, 64);
  keep_busy({.job = kB, .priority = IoPriority::state}, 64);
  const double part = part_of(kDaemonJob);
  EXPECT_LE(part, 1.2 / IoScheduler::kScrubStride);
  EXPECT_GE(part, 0.8 / IoScheduler::kScrubStride) << "and it comes to its end";
}

TEST_F(Jobs, a_raise_looks_at_the_requests_of_its_job_alone) {
  std::vector<JobId> order;
  for (const JobId job : {kA, kB}) {
    keep_busy({.job = job}, 8);
    submit({.job = job, .priority = IoPriority::prefetch, .bytes = 128_KiB},
           [&, job] { order.push_back(job); });
  }
  queue_.raise(kB, data_.span());
  while (order.size() < 2) queue_.complete_next();
  EXPECT_EQ(order, (std::vector{kB, kA}));
}

}  // namespace
}  // namespace memd::testing
