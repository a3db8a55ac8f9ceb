// A client that puts requests into its ring and waits for nothing.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "base/owned_fd.h"
#include "ring/layout.h"
#include "ring/shared_memory.h"
#include "store_fixture.h"

namespace memd::testing {

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

}  // namespace memd::testing
