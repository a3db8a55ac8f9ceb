// Memory that runs out: a request fails, and not the daemon.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "base/units.h"
#include "store_fixture.h"

namespace {

/// Larger pieces are not to be had.
std::atomic<size_t> piece_bytes_max{~size_t{0}};

}  // namespace

void* operator new(size_t bytes) {
  if (bytes > piece_bytes_max) throw std::bad_alloc();
  void* const piece = std::malloc(bytes == 0 ? 1 : bytes);
  if (piece == nullptr) throw std::bad_alloc();
  return piece;
}
void operator delete(void* piece) noexcept { std::free(piece); }
void operator delete(void* piece, size_t) noexcept { std::free(piece); }

namespace memd {
namespace {

using testing::bytes_shard;
using testing::Heart;
using testing::kDiskBytes;

TEST(AllocationTest, a_declaration_for_which_there_is_no_memory_is_refused_and_changes_nothing) {
  Heart heart(std::make_shared<MemoryDisk>(kDiskBytes));
  const uint64_t session = heart.attach(heart.open("job"));
  heart.declare(session, {bytes_shard("first", 10)});
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 20'000; ++i) specs.push_back(bytes_shard(concat("b", i), 0));
  // Of 12 MB of records the vector of shards is the largest piece.
  piece_bytes_max = 1_MiB;
  const Status refused = heart.store().declare(session, specs).status();
  piece_bytes_max = ~size_t{0};
  EXPECT_EQ(refused.code(), StatusCode::capacity);
  EXPECT_NE(refused.message().find("no memory for records"), std::string::npos)
      << refused.message();
  EXPECT_EQ(heart.job(session).shards().size(), 1U);
  heart.declare(session, specs);
  EXPECT_EQ(heart.job(session).shards().size(), 20'001U);
}

}  // namespace
}  // namespace memd
