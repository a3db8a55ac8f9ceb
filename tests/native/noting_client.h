// A client that writes down what it leases, so that the store has plans.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "store_fixture.h"

namespace memd::testing {

/// What the client does beside asking: writes down what it leased.
class NotingClient {
 public:
  NotingClient(Heart& heart, uint64_t session_id) : heart_(heart), session_id_(session_id) {
    const int fd = heart.store().sessions().at(session_id)->ring.session_fd();
    auto mapped = SharedMemory::map(OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), sizeof(SessionLayout));
    EXPECT_TRUE(mapped.is_ok()) << mapped.status().message();
    memory_.emplace(std::move(mapped).value());
  }

  void note(uint32_t shard_id, LeaseMode mode, Part part) {
    auto* const layout = reinterpret_cast<SessionLayout*>(memory_->data());
    const uint64_t index = layout->header.use_tail.fetch_add(1);
    layout->uses[index % kUseLogEntries].store(use_word(index, shard_id, part, mode));
  }
  /// Of what was noted, what the daemon has taken.
  uint64_t taken_count() const {
    return reinterpret_cast<const SessionLayout*>(memory_->data())->header.use_head.load();
  }
  uint64_t noted_count() const {
    return reinterpret_cast<const SessionLayout*>(memory_->data())->header.use_tail.load();
  }
  /// Leases and lets go; whether it was there at once.
  bool use(uint32_t shard_id, LeaseMode mode = LeaseMode::read, Part part = Part::value) {
    const Job& job = heart_.job(session_id_);
    const uint64_t misses = job.cache().counters().lease_misses;
    const Held held = heart_.lease(session_id_, shard_id, mode, part);
    EXPECT_TRUE(held.is_ok()) << held.status.message();
    if (!held.is_ok()) return false;
    if (part == Part::gradient) std::memset(held.grant.data, 0, held.grant.length_bytes);
    note(shard_id, mode, part);
    heart_.release(held);
    return job.cache().counters().lease_misses == misses;
  }
  /// A use that a fast enough disk has time for.
  bool use_slowly(uint32_t shard_id, LeaseMode mode = LeaseMode::read, Part part = Part::value) {
    const bool was_there = use(shard_id, mode, part);
    settle();
    return was_there;
  }
  /// Until nothing is being read for a plan.
  void settle() {
    heart_.turn();
    EXPECT_TRUE(heart_.until(
        [&] { return heart_.job(session_id_).cache().window().reading_bytes() == 0; }));
    heart_.turn();
  }

 private:
  Heart& heart_;
  uint64_t session_id_;
  std::optional<SharedMemory> memory_;
};

}  // namespace memd::testing
