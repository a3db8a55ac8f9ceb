// Memory of the pool that a job cannot map.
#include "store/host_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "released_memory.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

/// The kernel maps this much more and refuses the rest.
class AddressLimit {
 public:
  explicit AddressLimit(uint64_t more_bytes) {
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) + more_bytes;
    EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  ~AddressLimit() { EXPECT_EQ(setrlimit(RLIMIT_AS, &before_), 0); }

 private:
  rlimit before_{};
};

TEST(JobMemoryTest, the_queue_is_told_which_pages_are_huge) {
  for (const bool is_gathered : {false, true}) {
    std::vector<Segment> segments;
    for (uint64_t i = 0; i < JobMemory::segment_count_min(kSegmentBytes) + 2; ++i) {
      auto made = Segment::create({.bytes = kSegmentBytes, .gathered = is_gathered});
      ASSERT_TRUE(made.is_ok()) << made.status().message();
      if (made.value().is_gathered() != is_gathered)
        GTEST_SKIP() << "this kernel gathers no pages (Linux 6.1)";
      segments.push_back(std::move(made).value());
    }
    DiskQueue io(std::make_shared<MemoryDisk>(kDiskBytes), {});
    const auto memory = JobMemory::create(segments, kSegmentBytes, io, nullptr);
    ASSERT_TRUE(memory.is_ok()) << memory.status().message();
    while (memory.value()->grow_arena() || memory.value()->grow_private()) {
    }
    EXPECT_EQ(io.memory_bytes, is_gathered ? 0 : memory.value()->bytes());
    EXPECT_EQ(io.huge_memory_bytes, is_gathered ? memory.value()->bytes() : 0);
  }
}

TEST(HostMemoryTest, segments_that_cannot_be_mapped_are_replaced_by_who_asked_and_used_again) {
  constexpr uint64_t kSegments = kFloorSegments + 64;
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes), kSegments);
  HostMemory& memory = heart.store().memory();
  const OpenJobRequest request{.name = "job",
                               .uid = 1000,
                               .host_bytes = kSegments * kSegmentBytes,
                               .nvme_bytes = kQuotaBytes,
                               .fresh = false,
                               .durability = std::nullopt};
  {
    // Two ranges of addresses are wanted, each as large as the job's memory.
    const AddressLimit limit(kSegments * kSegmentBytes / 2);
    const auto refused = heart.store().admissions().open(request);
    ASSERT_FALSE(refused.is_ok());
    EXPECT_EQ(refused.status().error_number(), ENOMEM) << refused.status().message();
  }
  // The server thread has touched no segment: all of them wait for somebody else.
  EXPECT_EQ(heart.store().admissions().open(request).status().code(), StatusCode::capacity);
  EXPECT_EQ(replace_released(memory), kSegments);
  const auto job = heart.store().admissions().open(request);
  ASSERT_TRUE(job.is_ok()) << job.status().message();
  EXPECT_NE(heart.attach(job.value().job_id), 0u);
}

}  // namespace
}  // namespace memd::testing
