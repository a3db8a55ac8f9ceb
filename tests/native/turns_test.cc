// What one turn of the store does for each session, whatever the others ask for.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "block.h"
#include "ring/layout.h"
#include "ring/shared_memory.h"
#include "store_fixture.h"

namespace memd::testing {
namespace {

constexpr uint32_t kRequestsATurn = 64;

/// Writes requests into a session's ring, as its client does.
class AskingClient {
 public:
  AskingClient(Heart& heart, uint64_t session_id) {
    const int fd = heart.store().sessions().at(session_id)->ring.session_fd();
    auto mapped = SharedMemory::map(OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), sizeof(SessionLayout));
    EXPECT_TRUE(mapped.is_ok()) << mapped.status().message();
    memory_.emplace(std::move(mapped).value());
  }

  void ask(uint32_t shard_id, uint32_t count) {
    const uint32_t tail = layout().header.request_tail.load();
    for (uint32_t i = 0; i < count; ++i) {
      Request request{};
      request.opcode = Opcode::lease;
      request.request_id = tail + i;
      request.shard_id = shard_id;
      request.timeout_ns = 1'000'000'000;
      layout().requests[(tail + i) % kRingEntries] = request;
    }
    layout().header.request_tail.store(tail + count);
  }
  uint32_t taken_count() const { return layout().header.request_head.load(); }
  uint32_t answered_count() const { return layout().header.completion_tail.load(); }

 private:
  SessionLayout& layout() const { return *reinterpret_cast<SessionLayout*>(memory_->data()); }

  std::optional<SharedMemory> memory_;
};

TEST(TurnsTest, a_session_that_floods_has_64_requests_served_before_anothers) {
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  const uint64_t job_id = heart.open("job");
  const uint64_t flooding = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const uint32_t shard_id = heart.declare(
      flooding,
      {{.name = "blob", .kind = ShardKind::blob, .dtype = DType::float32, .shape = {64}}})[0];
  heart.write(flooding, shard_id, std::vector<float>(64, 1.0F));
  heart.touch(flooding, shard_id);
  AskingClient flood(heart, flooding);
  AskingClient client(heart, other);

  flood.ask(shard_id, kRingEntries);
  client.ask(shard_id, 1);
  ASSERT_TRUE(heart.store().advance());
  EXPECT_EQ(flood.taken_count(), kRequestsATurn);
  EXPECT_EQ(client.answered_count(), 1u);

  // What is left is served by the turns that follow, and nobody has to ring for it.
  for (uint32_t turn = 2; turn <= kRingEntries / kRequestsATurn; ++turn) {
    client.ask(shard_id, 1);
    ASSERT_TRUE(heart.store().advance());
    EXPECT_EQ(flood.taken_count(), turn * kRequestsATurn);
    EXPECT_EQ(client.answered_count(), turn);
  }
  EXPECT_EQ(flood.answered_count(), kRingEntries);
}

TEST(TurnsTest, leases_that_sleep_are_not_tried) {
  constexpr uint32_t kSleeping = 1000;
  constexpr int kTurns = 100;
  Heart heart(std::make_shared<MemoryDisk>(400_MiB));
  const uint64_t job_id = heart.open("job");
  const uint64_t session = heart.attach(job_id);
  const uint64_t other = heart.attach(job_id);
  const uint32_t shard_id = heart.declare(
      session,
      {{.name = "blob", .kind = ShardKind::blob, .dtype = DType::float32, .shape = {64}}})[0];
  const Held first = heart.lease(session, shard_id, LeaseMode::overwrite);
  ASSERT_TRUE(first.is_ok());
  AskingClient client(heart, other);
  client.ask(shard_id, kSleeping);
  const Leases& leases = heart.job(session).cache().leases();
  ASSERT_TRUE(heart.until([&] { return client.taken_count() == kSleeping; }));
  EXPECT_EQ(leases.try_count(), 1 + kSleeping);

  for (int turn = 0; turn < kTurns; ++turn) EXPECT_FALSE(heart.store().advance());
  EXPECT_EQ(leases.try_count(), 1 + kSleeping);
  EXPECT_EQ(client.answered_count(), 0u);

  // One event: each of them is tried once.
  heart.release(first);
  ASSERT_TRUE(heart.store().advance());
  EXPECT_EQ(client.answered_count(), kSleeping);
  EXPECT_EQ(leases.try_count(), 1 + 2 * kSleeping);
}

}  // namespace
}  // namespace memd::testing
