#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "no_memory.h"
#include "ring/client_session.h"
#include "ring/server_ring.h"

namespace memd {
namespace {

constexpr uint64_t kSegment = 1_MiB;
constexpr uint64_t kSecond = 1'000'000'000;

/// Both ends of a session in one process, over two mappings, and a daemon that answers by hand.
class RingTest : public testing::Test {
 protected:
  RingTest()
      : ring_(ServerRing::create().value()),
        table_(SharedMemory::create("table", sizeof(TableLayout)).value()),
        raw_(SharedMemory::map(copy(ring_.session_fd()), sizeof(SessionLayout)).value()) {
    client_ =
        ClientSession::create({.session = copy(ring_.session_fd()),
                               .table = copy(table_.fd()),
                               .doorbell = copy(ring_.doorbell_fd()),
                               .segment_bytes = kSegment,
                               .arena_reserved_bytes = 4 * kSegment,
                               .more_segments = [this](uint64_t first) { return more(first); }})
            .value();
  }
  static OwnedFd copy(int fd) { return OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

  Result<std::vector<OwnedFd>> more(uint64_t first) {
    ++more_count_;
    EXPECT_EQ(first, more_count_ - 1);
    OwnedFd fd(memfd_create("segment", MFD_CLOEXEC));
    EXPECT_EQ(ftruncate(fd.get(), kSegment), 0);
    std::vector<OwnedFd> fds;
    fds.push_back(std::move(fd));
    return fds;
  }
  /// What any client could write.
  SessionLayout& layout() { return *reinterpret_cast<SessionLayout*>(raw_.data()); }
  ShardRow* rows() { return reinterpret_cast<TableLayout*>(table_.data())->rows; }
  bool doorbell_rang() {
    uint64_t count = 0;
    return read(ring_.doorbell_fd(), &count, sizeof(count)) > 0;
  }
  /// The next one that wants an answer.
  Request next_request() {
    for (;;) {
      const auto request = ring_.poll();
      if (!request) {
        std::this_thread::yield();
      } else if (request->opcode == Opcode::gradient_unused) {
        unused_.push_back(request->shard_id);
      } else {
        return *request;
      }
    }
  }
  /// Grants pin 5 with one page of the arena.
  void grant(const Request& request,
             uint32_t pin,
             uint64_t offset_bytes = 0,
             uint64_t wait_ns = 0,
             uint64_t length_bytes = 4096) {
    ring_.add_pin(pin, request.mode == LeaseMode::read ? kReaderPin : kWriterPin);
    Completion completion{};
    completion.request_id = request.request_id;
    completion.pin = pin;
    completion.offset_bytes = offset_bytes;
    completion.length_bytes = length_bytes;
    completion.generation = request.shard_id;
    completion.wait_ns = wait_ns;
    ASSERT_TRUE(ring_.publish(completion, Status::ok()));
  }

  ServerRing ring_;
  SharedMemory table_;
  SharedMemory raw_;
  std::shared_ptr<ClientSession> client_;
  uint64_t more_count_ = 0;
  std::vector<uint32_t> unused_;  // gradients of which the client said so
};

TEST(SharedMemoryTest, memory_for_readers_is_written_by_its_maker_alone) {
  auto made = SharedMemory::create_for_readers("readers", 8192);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  const SharedMemory memory = std::move(made).value();
  memory.data()[4096] = std::byte{7};
  EXPECT_EQ(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd(), 0), MAP_FAILED);
  EXPECT_EQ(pwrite(memory.fd(), "x", 1, 0), -1);
  EXPECT_EQ(ftruncate(memory.fd(), 4096), -1);
  void* const data = mmap(nullptr, 8192, PROT_READ, MAP_SHARED, memory.fd(), 0);
  ASSERT_NE(data, MAP_FAILED);
  EXPECT_EQ(static_cast<const std::byte*>(data)[4096], std::byte{7});
  EXPECT_EQ(mprotect(data, 8192, PROT_READ | PROT_WRITE), -1);
  munmap(data, 8192);
}

TEST_F(RingTest, requests_and_completions_keep_their_order_across_the_wrap) {
  constexpr uint32_t kCount = 3 * kRingEntries + 7;
  std::thread client([&] {
    for (uint32_t i = 0; i < kCount; ++i) {
      const auto lease = client_->lease(i, Part::value, LeaseMode::read, 10 * kSecond);
      ASSERT_TRUE(lease.is_ok()) << lease.status().message();
      EXPECT_EQ(lease.value().generation, i);
      client_->release(lease.value());
    }
  });
  for (uint32_t i = 0; i < kCount; ++i) {
    const Request request = next_request();
    EXPECT_EQ(request.shard_id, i);
    grant(request, 5);
  }
  client.join();
  EXPECT_EQ(ring_.pins(5), 0u);
  EXPECT_EQ(client_->statistics().lease_count, kCount);
  EXPECT_EQ(client_->statistics().leases_held, 0);
  EXPECT_EQ(more_count_, 1u);
}

TEST_F(RingTest, threads_of_a_client_get_each_their_own_answer) {
  constexpr uint32_t kThreads = 4;
  constexpr uint32_t kEach = 500;
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t shard = thread * kEach + i;
        const auto lease = client_->lease(shard, Part::value, LeaseMode::write, 10 * kSecond);
        if (shard % 3 == 0) {
          ASSERT_EQ(lease.status().code(), StatusCode::capacity);
          EXPECT_EQ(lease.status().message(), concat("no ", shard));
          continue;
        }
        ASSERT_TRUE(lease.is_ok()) << lease.status().message();
        EXPECT_EQ(lease.value().generation, shard);
        client_->release(lease.value());
      }
    });
  }
  for (uint32_t i = 0; i < kThreads * kEach; ++i) {
    const Request request = next_request();
    if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // they sleep
    if (request.shard_id % 3 == 0) {
      Completion completion{};
      completion.request_id = request.request_id;
      ring_.publish(completion, error(StatusCode::capacity, "no ", request.shard_id));
    } else {
      grant(request, request.shard_id % 50);
    }
  }
  for (auto& thread : threads) thread.join();
  for (uint32_t pin = 0; pin < 50; ++pin) EXPECT_EQ(ring_.pins(pin), 0u);
}

TEST_F(RingTest, a_lease_comes_after_the_step_that_the_session_follows_unless_it_says_otherwise) {
  client_->follow(7);
  for (const bool follows : {true, false}) {
    std::thread client([&] {
      const auto leases = client_->lease_together(
          {{.shard_id = 1, .follows = follows}}, 10 * kSecond, StallPhase::other);
      ASSERT_TRUE(leases[0].is_ok()) << leases[0].status().message();
      client_->release(leases[0].value());
    });
    const Request request = next_request();
    EXPECT_EQ(request.after_call, follows ? 7u : 0u);
    grant(request, 5);
    client.join();
  }
}

TEST_F(RingTest, leases_asked_for_together_are_all_in_the_ring_before_the_first_is_answered) {
  std::vector<Result<LeasedBytes>> leases;
  std::thread client([&] {
    leases = client_->lease_together(
        {{.shard_id = 1}, {.shard_id = 2}, {.shard_id = 3}}, 10 * kSecond, StallPhase::forward);
  });
  // Nobody answers before all of them are there.
  std::vector<Request> requests;
  while (requests.size() < 3) requests.push_back(next_request());
  grant(requests[2], 7);
  Completion refused{};
  refused.request_id = requests[1].request_id;
  ring_.publish(refused, error(StatusCode::capacity, "no room"));
  grant(requests[0], 5);
  client.join();
  ASSERT_EQ(leases.size(), 3u);
  EXPECT_EQ(leases[0].value().generation, 1u);
  EXPECT_EQ(leases[1].status().message(), "no room");
  EXPECT_EQ(leases[2].value().generation, 3u);
  for (const size_t i : {0, 2}) client_->release(leases[i].value());
  EXPECT_EQ(client_->statistics().leases_held, 0);
}

TEST_F(RingTest, more_leases_than_the_ring_takes_wait_for_a_place_in_it) {
  constexpr uint32_t kCount = 128;
  std::vector<WantedLease> wanted;
  for (uint32_t i = 0; i < kCount; ++i) wanted.push_back({.shard_id = i});
  std::vector<std::thread> threads;
  constexpr uint32_t kThreads = 12;  // 64 at a time each: more than half of the ring
  for (uint32_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (auto& lease : client_->lease_together(wanted, 30 * kSecond, StallPhase::other)) {
        ASSERT_TRUE(lease.is_ok()) << lease.status().message();
        client_->release(lease.value());
      }
    });
  }
  for (uint32_t i = 0; i < kThreads * kCount; ++i) {
    grant(next_request(), 5);
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ring_.pins(5), 0u);
}

TEST_F(RingTest, waits_are_counted_by_phase_group_and_reason_and_the_daemon_reads_them) {
  const uint32_t group = client_->stalls().group("h.*.attn");
  EXPECT_EQ(client_->stalls().group("h.*.attn"), group);
  std::thread client([&] {
    const auto leases = client_->lease_together(
        {{.shard_id = 1, .stall_group = group}, {.shard_id = 2}}, kSecond, StallPhase::backward);
    EXPECT_EQ(leases[1].status().code(), StatusCode::deadline);
    client_->release(leases[0].value());
  });
  const Request first = next_request();
  const Request second = next_request();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Completion completion{};
  completion.request_id = first.request_id;
  completion.pin = 5;
  completion.length_bytes = 4096;
  completion.wait_ns = 5'000'000;
  completion.wait_reason = static_cast<uint32_t>(LeaseWait::disk);
  ring_.add_pin(5, kReaderPin);
  ASSERT_TRUE(ring_.publish(completion, Status::ok()));
  // It waited beside the first: what it kept the client after that is all that counts.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  completion = {};
  completion.request_id = second.request_id;
  completion.wait_ns = 3600 * kSecond;
  completion.wait_reason = static_cast<uint32_t>(LeaseWait::gradient);
  ASSERT_TRUE(ring_.publish(completion, error(StatusCode::deadline, "waited too long")));
  client.join();
  client_->stalls().note({.phase = StallPhase::step}, static_cast<size_t>(LeaseWait::step), 7);
  client_->stalls().note_step(11);

  const ClientStatistics statistics = client_->statistics();
  const Stalls& stalls = statistics.stalls;
  const StallsByReason& backward = stalls.phase_ns()[static_cast<size_t>(StallPhase::backward)];
  EXPECT_EQ(backward[static_cast<size_t>(LeaseWait::disk)], 5'000'000u);
  EXPECT_GT(backward[kStallRing], 10'000'000u);
  const uint64_t in_vain = backward[static_cast<size_t>(LeaseWait::gradient)];
  EXPECT_GT(in_vain, 0u) << "a refusal says what it waited for too";
  EXPECT_EQ(5'000'000 + in_vain + backward[kStallRing], statistics.lease_wait_ns);
  EXPECT_EQ(stalls.group_ns().at("h.*.attn")[static_cast<size_t>(LeaseWait::disk)], 5'000'000u);
  EXPECT_EQ(stalls.group_ns().at("other")[static_cast<size_t>(LeaseWait::gradient)], in_vain);
  const auto step = static_cast<size_t>(StallPhase::step);
  EXPECT_EQ(stalls.phase_ns()[step][static_cast<size_t>(LeaseWait::step)], 7u);
  EXPECT_EQ(stalls.step_wall_ns(), 11u);
  const Stalls read = ring_.stalls();
  EXPECT_EQ(read.phase_ns(), stalls.phase_ns());
  EXPECT_EQ(read.group_ns(), stalls.group_ns());
  EXPECT_EQ(read.step_wall_ns(), 11u);
}

TEST_F(RingTest, names_of_groups_are_bounded_whatever_a_client_writes) {
  for (uint32_t i = 0; i < 2 * kStallGroupCount; ++i) {
    const uint32_t group = client_->stalls().group(concat("group", i));
    EXPECT_EQ(group, i + 1 < kStallGroupCount ? i + 1 : 0);
  }
  StallBoard& board = layout().header.stalls;
  board.group_count.store(~0u);
  std::memset(board.group_names[1], 0xff, kStallGroupNameBytes);  // no end, and no text
  board.group_names[2][0] = '\n';
  board.group_names[3][0] = '\0';
  Stalls sum;
  for (int session = 0; session < 3; ++session) {
    for (uint32_t group = 4; group < kStallGroupCount; ++group)
      board.group_names[group][0] = static_cast<char>('a' + session);
    sum.add(ring_.stalls());
  }
  EXPECT_EQ(sum.group_ns().size(), kJobStallGroupsMax);
  EXPECT_TRUE(sum.group_ns().contains(std::string(kStallGroupNameBytes, '?')));
  EXPECT_TRUE(sum.group_ns().contains("?roup1"));
  EXPECT_TRUE(sum.group_ns().contains(kStallGroupOther));
}

TEST_F(RingTest, a_burst_of_refusals_keeps_every_message) {
  std::vector<std::thread> threads;
  for (uint32_t shard = 0; shard < 200; ++shard) {
    threads.emplace_back([&, shard] {
      const auto lease = client_->lease(shard, Part::value, LeaseMode::read, 10 * kSecond);
      EXPECT_EQ(lease.status().message(), concat("refused ", shard));
    });
  }
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 200; ++i) requests.push_back(next_request());
  for (const Request& request : requests) {
    Completion completion{};
    completion.request_id = request.request_id;
    ring_.publish(completion, error(StatusCode::deadline, "refused ", request.shard_id));
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(RingTest, a_tail_ahead_by_more_than_the_ring_breaks_it) {
  layout().header.request_tail.store(kRingEntries);
  for (uint32_t i = 0; i < kRingEntries; ++i) EXPECT_TRUE(ring_.poll().has_value());
  EXPECT_FALSE(ring_.broken());
  layout().header.request_tail.store(2 * kRingEntries + 1);
  EXPECT_FALSE(ring_.poll().has_value());
  EXPECT_TRUE(ring_.broken());
  layout().header.request_tail.store(kRingEntries + 1);
  EXPECT_FALSE(ring_.poll().has_value()) << "once broken, nothing more is taken";
}

TEST_F(RingTest, a_client_that_takes_no_completions_breaks_the_ring_instead_of_growing_it) {
  for (uint32_t i = 0; i < kRingEntries; ++i) EXPECT_TRUE(ring_.publish({}, Status::ok()));
  EXPECT_FALSE(ring_.publish({}, error(StatusCode::capacity, "lost")));
  EXPECT_TRUE(ring_.broken());
}

TEST_F(RingTest, a_client_that_claims_completions_which_were_not_made_breaks_the_ring) {
  layout().header.completion_head.store(7);
  EXPECT_FALSE(ring_.publish({}, Status::ok()));
  EXPECT_TRUE(ring_.broken());
}

TEST_F(RingTest, any_thread_gives_a_lease_back_and_rings_only_where_that_is_wanted) {
  std::thread daemon([&] {
    for (int i = 0; i < 2; ++i) grant(next_request(), 5);
  });
  const auto first = client_->lease(1, Part::value, LeaseMode::read, kSecond).value();
  const auto second = client_->lease(2, Part::value, LeaseMode::read, kSecond).value();
  daemon.join();
  doorbell_rang();
  EXPECT_EQ(pin_readers(ring_.pins(5)), 2u);
  std::thread([&] { client_->release(first); }).join();
  EXPECT_FALSE(doorbell_rang());
  ring_.want_release(true);
  std::thread([&] { client_->release(second); }).join();
  EXPECT_TRUE(doorbell_rang());
  EXPECT_EQ(ring_.pins(5), 0u);
}

TEST_F(RingTest, a_request_is_seen_or_rings) {
  EXPECT_FALSE(ring_.prepare_to_sleep());
  ASSERT_TRUE(client_->prefetch(3).is_ok());
  EXPECT_TRUE(doorbell_rang());
  EXPECT_TRUE(ring_.prepare_to_sleep());
  ring_.wake();
  EXPECT_EQ(ring_.poll()->opcode, Opcode::prefetch);
  ASSERT_TRUE(client_->prefetch(3).is_ok());
  EXPECT_FALSE(doorbell_rang());
}

TEST_F(RingTest, no_wake_up_is_lost_between_ends_that_sleep) {
  std::atomic<bool> done{false};
  std::thread daemon([&] {
    while (!done) {
      while (const auto request = ring_.poll()) grant(*request, 5);
      if (ring_.prepare_to_sleep()) continue;
      pollfd wait{.fd = ring_.doorbell_fd(), .events = POLLIN, .revents = 0};
      EXPECT_TRUE(poll(&wait, 1, 5000) > 0 || done) << "a request, and nobody rang";
      doorbell_rang();
      ring_.wake();
    }
  });
  const SteadyClock clock;
  const uint64_t start = clock.now_ns();
  for (uint32_t i = 0; i < 2000; ++i) {
    const auto lease = client_->lease(i, Part::value, LeaseMode::read, 10 * kSecond);
    ASSERT_TRUE(lease.is_ok());
    client_->release(lease.value());
  }
  EXPECT_LT(clock.now_ns() - start, 10 * kSecond);
  done = true;
  const uint64_t one = 1;
  EXPECT_EQ(write(ring_.doorbell_fd(), &one, sizeof(one)), 8);
  daemon.join();
}

TEST_F(RingTest, leases_that_wait_for_nothing_are_told_from_others) {
  std::thread daemon([&] {
    grant(next_request(), 5);
    grant(next_request(), 5, 0, 1000);
  });
  client_->release(client_->lease(1, Part::value, LeaseMode::read, kSecond).value());
  client_->release(client_->lease(2, Part::value, LeaseMode::read, kSecond).value());
  daemon.join();
  publish(rows()[7], {.pin = 9, .offset_bytes = 0, .length_bytes = 4096, .generation = 3});
  client_->release(client_->lease(7, Part::value, LeaseMode::read, 0).value());
  EXPECT_EQ(client_->statistics().lease_count, 3U);
  EXPECT_EQ(client_->statistics().hits, 1U);
  EXPECT_EQ(client_->statistics().resident_count, 2U);
}

TEST_F(RingTest, what_the_table_shows_is_leased_without_a_request) {
  std::thread daemon([&] { grant(next_request(), 5); });
  client_->release(client_->lease(1, Part::value, LeaseMode::read, kSecond).value());
  daemon.join();  // the first segment is mapped
  publish(rows()[7], {.pin = 9, .offset_bytes = 8192, .length_bytes = 4096, .generation = 3});
  EXPECT_EQ(client_->lease_resident(6), std::nullopt);
  EXPECT_EQ(client_->lease_resident(kTableRows), std::nullopt);
  const auto lease = client_->lease(7, Part::value, LeaseMode::read, 0);
  ASSERT_TRUE(lease.is_ok()) << lease.status().message();
  EXPECT_EQ(lease.value().length_bytes, 4096U);
  EXPECT_EQ(lease.value().generation, 3U);
  EXPECT_EQ(ring_.pins(9), kReaderPin);
  EXPECT_FALSE(ring_.poll().has_value()) << "nothing was asked";
  EXPECT_EQ(client_->statistics().hits, 1U);
  EXPECT_EQ(client_->statistics().lease_count, 2U);
  EXPECT_EQ(client_->statistics().leases_held, 1);
  withdraw(rows()[7]);
  EXPECT_EQ(client_->lease_resident(7), std::nullopt);
  EXPECT_EQ(ring_.pins(9), kReaderPin) << "what is held stays";
  ring_.want_release(true);
  doorbell_rang();
  client_->release(lease.value());
  EXPECT_EQ(ring_.pins(9), 0U);
  EXPECT_TRUE(doorbell_rang());
  std::vector<Use> uses;
  ring_.take_uses(&uses);
  ASSERT_EQ(uses.size(), 2U);
  EXPECT_FALSE(uses[0].is_resident);
  EXPECT_EQ(
      uses[1],
      (Use{.shard_id = 7, .part = Part::value, .mode = LeaseMode::read, .is_resident = true}));
}

TEST_F(RingTest, what_is_not_mapped_or_pinned_too_often_is_asked_for) {
  publish(rows()[7], {.pin = 9, .offset_bytes = 0, .length_bytes = 4096, .generation = 3});
  EXPECT_EQ(client_->lease_resident(7), std::nullopt) << "no segment is mapped yet";
  EXPECT_EQ(ring_.pins(9), 0U);
  std::thread daemon([&] { grant(next_request(), 9); });
  const auto first = client_->lease(7, Part::value, LeaseMode::read, kSecond);
  daemon.join();
  ASSERT_TRUE(first.is_ok());
  uint32_t count = 1;
  std::optional<LeasedBytes> last;
  while (const auto lease = client_->lease_resident(7)) {
    last = lease;
    ++count;
  }
  EXPECT_GT(count, kPinReadersMax / 2);
  EXPECT_LT(count, kPinReadersMax);
  EXPECT_EQ(ring_.pins(9), count * kReaderPin);
  client_->release(*last);
  EXPECT_TRUE(client_->lease_resident(7).has_value());
  publish(rows()[8], {.pin = kPinCount, .offset_bytes = 0, .length_bytes = 1, .generation = 0});
  EXPECT_EQ(client_->lease_resident(8), std::nullopt);
  publish(rows()[9], {.pin = 3, .offset_bytes = ~0ULL, .length_bytes = 4096, .generation = 0});
  EXPECT_EQ(client_->lease_resident(9), std::nullopt);
  EXPECT_EQ(ring_.pins(3), 0U);
}

TEST_F(RingTest, nothing_is_leased_without_a_request_while_the_session_is_away_or_at_its_end) {
  std::thread daemon([&] { grant(next_request(), 9); });
  client_->release(client_->lease(7, Part::value, LeaseMode::read, kSecond).value());
  daemon.join();
  publish(rows()[7], {.pin = 9, .offset_bytes = 0, .length_bytes = 4096, .generation = 3});
  const auto held = client_->lease_resident(7);
  ASSERT_TRUE(held.has_value());
  client_->suspend();
  EXPECT_EQ(client_->lease_resident(7), std::nullopt);
  client_->reconnect(OwnedFd());
  EXPECT_EQ(ring_.pins(9), kReaderPin) << "it is held, and was not granted by anybody";
  EXPECT_TRUE(client_->lease_resident(7).has_value());
  const pid_t child = fork();
  if (child == 0) _exit(client_->lease_resident(7) ? 1 : 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(ring_.pins(9), 2 * kReaderPin);
  ring_.end_resident_leases();
  EXPECT_EQ(client_->lease_resident(7), std::nullopt);
  EXPECT_EQ(ring_.pins(9), 2 * kReaderPin);
}

TEST_F(RingTest, leases_without_a_request_are_counted_once_while_a_session_reconnects) {
  std::thread daemon([&] { grant(next_request(), 9); });
  client_->release(client_->lease(7, Part::value, LeaseMode::read, kSecond).value());
  daemon.join();
  publish(rows()[7], {.pin = 9, .offset_bytes = 0, .length_bytes = 4096, .generation = 3});
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      while (!done) {
        if (const auto lease = client_->lease_resident(7)) client_->release(*lease);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    client_->suspend();
    client_->reconnect(OwnedFd());
    std::this_thread::yield();
    EXPECT_LE(pin_readers(ring_.pins(9)), 3U);
    EXPECT_EQ(pin_writers(ring_.pins(9)), 0U) << "below zero";
  }
  done = true;
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ring_.pins(9), 0U);
}

TEST_F(RingTest, the_daemon_reads_what_was_leased_in_its_order_across_the_laps) {
  constexpr uint32_t kCount = kUseLogEntries + 99;
  std::thread daemon([&] {
    for (uint32_t i = 0; i < kCount; ++i) grant(next_request(), 5);
  });
  std::vector<Use> uses;
  for (uint32_t i = 0; i < kCount; ++i) {
    const Part part = i % 2 == 0 ? Part::value : Part::gradient;
    const auto mode = static_cast<LeaseMode>(i % 3);
    client_->release(client_->lease(i, part, mode, 10 * kSecond).value());
    if (i % 1000 != 0 && i + 1 != kCount) continue;
    ASSERT_TRUE(ring_.take_uses(&uses));
    ASSERT_EQ(uses.size(), i + 1);
  }
  daemon.join();
  for (uint32_t i = 0; i < kCount; ++i) {
    const Use expected{.shard_id = i,
                       .part = i % 2 == 0 ? Part::value : Part::gradient,
                       .mode = static_cast<LeaseMode>(i % 3)};
    ASSERT_EQ(uses[i], expected) << i;
  }
  EXPECT_TRUE(ring_.take_uses(&uses));
  EXPECT_EQ(uses.size(), kCount);
}

TEST_F(RingTest, what_was_not_granted_is_no_use) {
  std::thread daemon([&] {
    Completion completion{};
    completion.request_id = next_request().request_id;
    ring_.publish(completion, error(StatusCode::capacity, "no room"));
  });
  EXPECT_FALSE(client_->lease(1, Part::value, LeaseMode::read, kSecond).is_ok());
  daemon.join();
  ASSERT_TRUE(client_->prefetch(2).is_ok());
  std::vector<Use> uses;
  EXPECT_TRUE(ring_.take_uses(&uses));
  EXPECT_EQ(uses.size(), 0U);
}

TEST_F(RingTest, uses_that_were_overwritten_before_they_were_read_are_told) {
  const auto write_uses = [this](uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t index = layout().header.use_tail.fetch_add(1);
      layout().uses[index % kUseLogEntries].store(
          use_word(index, static_cast<uint32_t>(index), Part::value, LeaseMode::read));
    }
  };
  write_uses(kUseLogEntries);
  std::vector<Use> uses;
  EXPECT_TRUE(ring_.take_uses(&uses)) << "as many as the log holds are kept";
  EXPECT_EQ(uses.size(), kUseLogEntries);
  uses.clear();
  write_uses(kUseLogEntries + 1);
  EXPECT_FALSE(ring_.take_uses(&uses));
  write_uses(1);
  EXPECT_TRUE(ring_.take_uses(&uses)) << "from here on they follow one another";
  ASSERT_EQ(uses.size(), 1U);
  EXPECT_EQ(uses[0].shard_id, 2 * kUseLogEntries + 1);
}

TEST_F(RingTest, no_more_uses_are_taken_than_are_wanted) {
  for (uint64_t i = 0; i < 10; ++i) {
    const uint64_t index = layout().header.use_tail.fetch_add(1);
    layout().uses[index].store(
        use_word(index, static_cast<uint32_t>(index), Part::value, LeaseMode::read));
  }
  EXPECT_EQ(ring_.use_tail(), 10U);
  std::vector<Use> uses;
  EXPECT_TRUE(ring_.take_uses(&uses, 4));
  ASSERT_EQ(uses.size(), 4U);
  EXPECT_EQ(ring_.use_head(), 4U);
  EXPECT_TRUE(ring_.take_uses(&uses, 100));
  ASSERT_EQ(uses.size(), 10U);
  EXPECT_EQ(uses[9].shard_id, 9U);
  // The client's word: what it can't have written does not count.
  layout().header.use_tail.store(uint64_t{1} << 60);
  EXPECT_EQ(ring_.use_tail(), 10U + kUseLogEntries);
}

TEST_F(RingTest, uses_of_all_threads_arrive_and_each_thread_s_in_their_order) {
  constexpr uint32_t kThreads = 4;
  constexpr uint32_t kEach = 2000;
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint32_t i = 0; i < kEach; ++i) {
        const uint32_t shard = thread * kEach + i;
        client_->release(client_->lease(shard, Part::value, LeaseMode::read, kSecond).value());
      }
    });
  }
  std::vector<Use> uses;
  for (uint32_t i = 0; i < kThreads * kEach; ++i) {
    grant(next_request(), 5);
    ASSERT_TRUE(ring_.take_uses(&uses));
  }
  for (auto& thread : threads) thread.join();
  ASSERT_TRUE(ring_.take_uses(&uses));
  ASSERT_EQ(uses.size(), kThreads * kEach);
  std::vector<uint32_t> next(kThreads, 0);
  for (const Use& use : uses) {
    ASSERT_LT(use.shard_id, kThreads * kEach);
    EXPECT_EQ(use.shard_id % kEach, next[use.shard_id / kEach]++);
  }
}

TEST_F(RingTest, a_client_that_writes_what_is_no_use_breaks_the_ring) {
  layout().uses[0].store(use_word(0, 1, static_cast<Part>(3), LeaseMode::read));
  std::vector<Use> uses;
  ring_.take_uses(&uses);
  EXPECT_TRUE(ring_.broken());
  EXPECT_EQ(uses.size(), 0U);
}

TEST_F(RingTest, a_tail_that_no_use_follows_holds_nobody_up) {
  layout().header.use_tail.store(12345);
  layout().uses[0].store(use_word(kUseLogEntries, 1, Part::value, LeaseMode::read));
  std::vector<Use> uses;
  EXPECT_FALSE(ring_.take_uses(&uses));
  EXPECT_TRUE(ring_.take_uses(&uses));
  EXPECT_EQ(uses.size(), 0U);
  EXPECT_FALSE(ring_.broken());
}

TEST_F(RingTest, a_wanted_use_is_seen_or_rings_once) {
  // The ring is the daemon's: whoever answers has ended before this thread asks it to sleep.
  const auto use = [this] {
    std::thread daemon([this] { grant(next_request(), 5); });
    client_->release(client_->lease(1, Part::value, LeaseMode::read, kSecond).value());
    daemon.join();
  };
  std::vector<Use> uses;
  use();
  ring_.take_uses(&uses);
  ring_.want_use_after(2);
  EXPECT_FALSE(ring_.prepare_to_sleep());
  // What asks for a grant rings by itself while the daemon sleeps.
  layout().header.server_sleeping.store(0);
  use();
  EXPECT_FALSE(doorbell_rang());
  use();
  EXPECT_FALSE(doorbell_rang()) << "the daemon is awake";
  EXPECT_TRUE(ring_.prepare_to_sleep()) << "and looks before it sleeps";
  EXPECT_FALSE(ring_.prepare_to_sleep()) << "it was told";
  ring_.wake();
  ring_.take_uses(&uses);
  EXPECT_EQ(uses.size(), 3U);
  for (int i = 0; i < 3; ++i) use();
  EXPECT_FALSE(ring_.prepare_to_sleep()) << "nothing is wanted";
  ring_.want_use_after(4);
  EXPECT_FALSE(ring_.prepare_to_sleep());
  ring_.want_use_after(3);
  EXPECT_TRUE(ring_.prepare_to_sleep()) << "it has come";
  ring_.want_use_after(4);
  ring_.wake();
  use();
  EXPECT_TRUE(ring_.prepare_to_sleep());
}

TEST_F(RingTest, a_use_that_is_wanted_while_the_daemon_sleeps_rings_once) {
  ring_.want_use_after(1);
  EXPECT_FALSE(ring_.prepare_to_sleep());
  std::thread daemon([&] {
    for (int i = 0; i < 2; ++i) {
      const Request request = next_request();
      while (!doorbell_rang()) std::this_thread::yield();  // for the request
      grant(request, 5);
    }
  });
  for (int i = 0; i < 2; ++i) {
    const auto lease = client_->lease(1, Part::value, LeaseMode::read, kSecond);
    ASSERT_TRUE(lease.is_ok());
    EXPECT_EQ(doorbell_rang(), i == 0);
    client_->release(lease.value());
  }
  daemon.join();
}

TEST_F(RingTest, the_next_daemon_goes_on_with_the_uses_that_were_not_read) {
  std::thread daemon([&] {
    for (int i = 0; i < 3; ++i) grant(next_request(), 5);
  });
  std::vector<Use> uses;
  for (uint32_t shard = 0; shard < 3; ++shard) {
    client_->release(client_->lease(shard, Part::value, LeaseMode::read, kSecond).value());
    if (shard == 0) ring_.take_uses(&uses);
  }
  daemon.join();
  ring_.want_use_after(1);
  ServerRing next = ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd())).value();
  EXPECT_EQ(layout().header.use_wanted.load(), 0U);
  uses.clear();
  EXPECT_TRUE(next.take_uses(&uses));
  ASSERT_EQ(uses.size(), 2U);
  EXPECT_EQ(uses[0].shard_id, 1U);
}

TEST_F(RingTest, a_session_that_was_given_up_fences_its_client_also_while_it_waits) {
  std::thread waiting([&] {
    const auto lease = client_->lease(1, Part::value, LeaseMode::read, 60 * kSecond);
    EXPECT_EQ(lease.status().code(), StatusCode::fenced) << lease.status().message();
  });
  next_request();
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const SteadyClock clock;
  const uint64_t start = clock.now_ns();
  ring_.end();
  waiting.join();
  EXPECT_LT(clock.now_ns() - start, kSecond);
  EXPECT_EQ(client_->lease(1, Part::value, LeaseMode::read, kSecond).status().code(),
            StatusCode::fenced);
  EXPECT_EQ(client_->prefetch(1).code(), StatusCode::fenced);
}

TEST_F(RingTest, a_lease_granted_after_its_client_gave_up_is_given_back) {
  const auto lease = client_->lease(1, Part::value, LeaseMode::write, 0);
  EXPECT_EQ(lease.status().code(), StatusCode::unavailable) << lease.status().message();
  grant(next_request(), 9);
  EXPECT_EQ(pin_writers(ring_.pins(9)), 1u);
  std::thread daemon([&] { grant(next_request(), 5); });
  client_->release(client_->lease(2, Part::value, LeaseMode::read, kSecond).value());
  daemon.join();
  EXPECT_EQ(ring_.pins(9), 0u);
  EXPECT_EQ(client_->statistics().leases_held, 0);
}

TEST_F(RingTest, what_was_asked_ahead_is_leased_without_another_request) {
  client_->ask_ahead({{3}});
  client_->ask_ahead({{3}});  // asked for already
  const Request request = next_request();
  EXPECT_EQ(request.shard_id, 3u);
  EXPECT_EQ(request.is_expected, 1u);
  grant(request, 7);
  const auto lease = client_->lease(3, Part::gradient, LeaseMode::overwrite, kSecond);
  ASSERT_TRUE(lease.is_ok()) << lease.status().message();
  EXPECT_EQ(lease.value().pin_index, 7u);
  EXPECT_FALSE(ring_.poll().has_value());
  client_->release(lease.value());
  EXPECT_EQ(ring_.pins(7), 0u);
  // The next one is a request again.
  std::thread again([&] {
    EXPECT_TRUE(client_->lease(3, Part::gradient, LeaseMode::overwrite, 10 * kSecond).is_ok());
  });
  grant(next_request(), 7);
  again.join();
  EXPECT_EQ(ring_.pins(7), kWriterPin);
}

TEST_F(RingTest, several_slots_are_asked_for_ahead_at_once) {
  client_->ask_ahead({{3}});
  client_->ask_ahead({{4, 3, 5}});
  for (const uint32_t shard_id : {3u, 4u, 5u}) EXPECT_EQ(next_request().shard_id, shard_id);
  EXPECT_FALSE(ring_.poll().has_value());
}

TEST_F(RingTest, no_more_slots_are_asked_for_ahead_than_there_are_places) {
  std::vector<uint32_t> shard_ids(200);
  std::iota(shard_ids.begin(), shard_ids.end(), 0);
  client_->ask_ahead(shard_ids);
  uint32_t count = 0;
  while (ring_.poll()) ++count;
  EXPECT_EQ(count, 64u);
}

TEST_F(RingTest, a_gradient_is_copied_into_its_slot_which_is_given_back) {
  // From an address and to a place that no line of a cache begins at, and longer than is copied
  // through the caches.
  std::vector<std::byte> gradient(300'000);
  for (size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = static_cast<std::byte>(i * 7 + i / 251);
  const std::span bytes = std::span(gradient).subspan(3);
  const WantedLease wanted{.shard_id = 3, .part = Part::gradient, .mode = LeaseMode::overwrite};
  std::thread client([&] {
    const Status status =
        client_->overwrite_gradient(wanted, bytes, 10 * kSecond, StallPhase::backward);
    EXPECT_TRUE(status.is_ok()) << status.message();
  });
  const Request request = next_request();
  EXPECT_EQ(request.part, Part::gradient);
  EXPECT_EQ(request.mode, LeaseMode::overwrite);
  grant(request, 7, 40, 0, bytes.size());
  client.join();
  EXPECT_EQ(ring_.pins(7), 0u);
  std::thread reader([&] {
    const auto lease = client_->lease(3, Part::gradient, LeaseMode::read, 10 * kSecond);
    ASSERT_TRUE(lease.is_ok()) << lease.status().message();
    const std::span slot(lease.value().data, lease.value().length_bytes);
    EXPECT_TRUE(std::ranges::equal(slot.first(bytes.size()), bytes));
    EXPECT_EQ(slot.back(), std::byte{0}) << "beyond it";
    client_->release(lease.value());
  });
  grant(next_request(), 7, 40, 0, bytes.size() + 1);
  reader.join();
  EXPECT_EQ(client_->statistics().leases_held, 0);
}

TEST_F(RingTest, a_gradient_of_another_size_than_its_slot_is_refused) {
  const std::vector<std::byte> gradient(64);
  const WantedLease wanted{.shard_id = 3, .part = Part::gradient, .mode = LeaseMode::overwrite};
  std::thread client([&] {
    const Status status =
        client_->overwrite_gradient(wanted, gradient, 10 * kSecond, StallPhase::backward);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_NE(status.message().find("64 bytes against 128"), std::string::npos) << status.message();
  });
  grant(next_request(), 7, 0, 0, 128);
  client.join();
  EXPECT_EQ(ring_.pins(7), 0u);
}

TEST_F(RingTest, who_comes_before_the_answer_to_what_was_asked_ahead_waits_for_that) {
  client_->ask_ahead({{3}});
  const Request request = next_request();
  std::thread client([&] {
    const auto lease = client_->lease(3, Part::gradient, LeaseMode::overwrite, 10 * kSecond);
    ASSERT_TRUE(lease.is_ok()) << lease.status().message();
    EXPECT_EQ(lease.value().pin_index, 7u);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  grant(request, 7);
  client.join();
  EXPECT_FALSE(ring_.poll().has_value());
}

TEST_F(RingTest, what_was_asked_ahead_and_is_not_wanted_is_given_back) {
  client_->ask_ahead({{1}});  // granted before
  client_->ask_ahead({{2}});  // granted after
  grant(next_request(), 5);
  const Request late = next_request();
  EXPECT_EQ(ring_.pins(5), kWriterPin);
  EXPECT_TRUE(client_->forget_asked());
  EXPECT_EQ(ring_.pins(5), 0u);
  EXPECT_FALSE(client_->forget_asked());
  grant(late, 6);
  EXPECT_EQ(ring_.pins(6), kWriterPin);
  // Whatever the client does next takes what has come.
  std::thread client([&] {
    const auto lease = client_->lease(3, Part::value, LeaseMode::write, 10 * kSecond);
    ASSERT_TRUE(lease.is_ok()) << lease.status().message();
    client_->release(lease.value());
  });
  grant(next_request(), 8);
  client.join();
  EXPECT_EQ(ring_.pins(6), 0u);
  EXPECT_EQ(unused_, (std::vector<uint32_t>{1, 2}));
}

TEST_F(RingTest, what_was_asked_ahead_is_no_answer_to_another_lease_of_the_shard) {
  client_->ask_ahead({{1}});
  grant(next_request(), 5);
  std::thread client([&] {
    const auto lease = client_->lease(1, Part::gradient, LeaseMode::write, 10 * kSecond);
    ASSERT_TRUE(lease.is_ok()) << lease.status().message();
    client_->release(lease.value());
  });
  const Request request = next_request();
  EXPECT_EQ(request.mode, LeaseMode::write);
  EXPECT_EQ(ring_.pins(5), 0u);  // or the writer would wait for itself
  grant(request, 5);
  client.join();
  EXPECT_EQ(unused_, std::vector<uint32_t>{1});
}

TEST_F(RingTest, what_was_asked_ahead_of_a_step_is_no_answer_to_a_lease_after_it) {
  client_->ask_ahead({{1}});
  grant(next_request(), 5);
  client_->follow(7);
  std::atomic<bool> is_over = false;
  std::thread client([&] {
    const auto lease = client_->lease(1, Part::gradient, LeaseMode::overwrite, 10 * kSecond);
    EXPECT_TRUE(lease.is_ok()) << lease.status().message();
    is_over = true;
  });
  std::optional<Request> request;
  while (!is_over && !(request && request->opcode == Opcode::lease)) request = ring_.poll();
  EXPECT_TRUE(request.has_value()) << "the slot of before the step was leased";
  if (request) {
    EXPECT_EQ(request->after_call, 7u);
    EXPECT_EQ(ring_.pins(5), 0u);
    grant(*request, 6);
  }
  client.join();
}

TEST_F(RingTest, answers_that_nobody_waits_for_any_more_keep_their_places_in_the_ring) {
  std::vector<uint32_t> shard_ids(64);
  std::iota(shard_ids.begin(), shard_ids.end(), 0);
  std::vector<Request> asked;
  const auto ask_and_forget = [&] {
    client_->ask_ahead(shard_ids);
    client_->forget_asked();
    while (const auto request = ring_.poll()) {
      if (request->opcode == Opcode::lease) asked.push_back(*request);
    }
  };
  for (int round = 0; round < 40; ++round) ask_and_forget();
  // The other half is for answers that somebody waits for.
  ASSERT_EQ(asked.size(), kRingEntries / 2);
  for (const Request& request : asked) grant(request, 5);
  std::thread client([&] {
    const auto lease = client_->lease(1, Part::value, LeaseMode::read, 10 * kSecond);
    EXPECT_TRUE(lease.is_ok()) << lease.status().message();
  });
  grant(next_request(), 6);
  client.join();
  EXPECT_EQ(ring_.pins(5), 0u);
}

TEST_F(RingTest, an_error_of_what_was_asked_ahead_is_asked_for_again) {
  client_->ask_ahead({{1}});
  Completion completion{};
  completion.request_id = next_request().request_id;
  ring_.publish(completion, error(StatusCode::capacity, "no room then"));
  std::thread client([&] {
    const auto lease = client_->lease(1, Part::gradient, LeaseMode::overwrite, 10 * kSecond);
    EXPECT_TRUE(lease.is_ok()) << lease.status().message();
  });
  grant(next_request(), 5);
  client.join();
}

TEST_F(RingTest, a_lease_without_room_gets_what_was_asked_ahead) {
  client_->ask_ahead({{1}});
  grant(next_request(), 5);
  std::thread client([&] {
    const auto lease = client_->lease(2, Part::value, LeaseMode::write, 10 * kSecond);
    EXPECT_TRUE(lease.is_ok()) << lease.status().message();
  });
  Completion full{};
  full.request_id = next_request().request_id;
  ring_.publish(full, error(StatusCode::capacity, "all pins are this session's"));
  const Request again = next_request();
  EXPECT_EQ(ring_.pins(5), 0u);
  grant(again, 6);
  client.join();
  // Nothing is asked ahead any more: now it is the answer.
  std::thread other([&] {
    EXPECT_EQ(client_->lease(2, Part::value, LeaseMode::write, 10 * kSecond).status().code(),
              StatusCode::capacity);
  });
  full.request_id = next_request().request_id;
  ring_.publish(full, error(StatusCode::capacity, "all pins are this session's"));
  other.join();
}

TEST_F(RingTest, what_was_asked_of_one_daemon_is_not_leased_from_the_next) {
  client_->ask_ahead({{1}});
  client_->ask_ahead({{2}});
  grant(next_request(), 5);
  client_->suspend();
  EXPECT_EQ(ring_.pins(5), 0u);
  client_->ask_ahead({{3}});  // of nobody
  client_->reconnect(OwnedFd());
  EXPECT_EQ(next_request().shard_id, 2u);
  EXPECT_FALSE(ring_.poll().has_value());
  std::thread client([&] {
    EXPECT_TRUE(client_->lease(1, Part::gradient, LeaseMode::overwrite, 10 * kSecond).is_ok());
  });
  grant(next_request(), 5);
  client.join();
}

TEST_F(RingTest, a_closed_session_refuses_leases_and_takes_them_back) {
  std::thread daemon([&] { grant(next_request(), 5); });
  const auto lease = client_->lease(1, Part::value, LeaseMode::read, kSecond).value();
  daemon.join();
  client_->close();
  EXPECT_EQ(client_->lease(1, Part::value, LeaseMode::read, 1).status().code(),
            StatusCode::invalid_argument);
  client_->release(lease);
  EXPECT_EQ(ring_.pins(5), 0u);
}

TEST_F(RingTest, a_forked_child_reads_what_it_inherited_and_can_neither_lease_nor_release) {
  std::thread daemon([&] { grant(next_request(), 5); });
  const auto lease = client_->lease(1, Part::value, LeaseMode::read, kSecond).value();
  daemon.join();
  lease.data[7] = std::byte{77};
  const pid_t child = fork();
  if (child == 0) {
    bool right = lease.data[7] == std::byte{77};
    lease.data[7] = std::byte{78};
    right = right && client_->lease(1, Part::value, LeaseMode::read, 1).status().code() ==
                         StatusCode::invalid_argument;
    right = right && client_->prefetch(1).code() == StatusCode::invalid_argument;
    client_->release(lease);
    // Addresses that were not inherited may be used again; the dying session leaves them alone.
    std::vector<unsigned char*> own;
    for (int i = 0; i < 64; ++i) {
      void* const memory =
          mmap(nullptr, 1_MiB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      own.push_back(static_cast<unsigned char*>(memory));
    }
    client_.reset();
    for (unsigned char* const memory : own) memory[5] = 1;
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(ring_.pins(5), kReaderPin);
  EXPECT_EQ(lease.data[7], std::byte{77});
  client_->release(lease);
  EXPECT_EQ(ring_.pins(5), 0u);
}

TEST_F(RingTest, what_is_written_through_a_lease_for_reading_reaches_nobody) {
  std::thread daemon([&] {
    for (int i = 0; i < 4; ++i) grant(next_request(), 5);
  });
  const auto read = [&] {
    return client_->lease(1, Part::value, LeaseMode::read, kSecond).value();
  };
  LeasedBytes lease = read();
  EXPECT_TRUE(client_->reads().are_private());
  lease.data[7] = std::byte{77};
  EXPECT_TRUE(client_->reads().is_written(lease.data, lease.length_bytes));
  client_->release(lease);
  EXPECT_EQ(ring_.pins(5), 0u) << "nobody watches it";
  // A lease for writing is the arena itself.
  const auto writer = client_->lease(1, Part::value, LeaseMode::write, kSecond).value();
  EXPECT_EQ(writer.data[7], std::byte{0});
  writer.data[8] = std::byte{8};
  client_->release(writer);
  lease = read();
  EXPECT_EQ(lease.data[7], std::byte{0});
  EXPECT_EQ(lease.data[8], std::byte{8});
  client_->release(lease);
  const auto gradient = client_->lease(1, Part::gradient, LeaseMode::read, kSecond).value();
  EXPECT_EQ(gradient.data, writer.data);
  client_->release(gradient);
  daemon.join();
}

TEST_F(RingTest, a_watched_lease_that_was_written_lives_until_it_is_taken) {
  std::thread daemon([&] {
    for (int i = 0; i < 3; ++i) grant(next_request(), 5, 0, 0, 4096);
  });
  client_->reads().watch(1);
  const auto read = [&](uint32_t shard) {
    return client_->lease(shard, Part::value, LeaseMode::read, kSecond).value();
  };
  const LeasedBytes untouched = read(1);
  EXPECT_FALSE(client_->reads().is_written(untouched.data, untouched.length_bytes));
  client_->release(untouched);
  EXPECT_FALSE(client_->reads().has_written());
  const LeasedBytes written = read(1);
  written.data[7] = std::byte{77};
  client_->release(written);
  EXPECT_TRUE(client_->reads().has_written());
  EXPECT_EQ(ring_.pins(5), kReaderPin);
  EXPECT_FALSE(client_->reads().take_written(2).has_value());
  auto taken = client_->reads().take_written(1);
  ASSERT_TRUE(taken.has_value());
  EXPECT_EQ(taken->data[7], std::byte{77});
  EXPECT_FALSE(client_->reads().has_written());
  client_->release(*taken);  // the caller could not do with it what it wanted
  EXPECT_EQ(ring_.pins(5), kReaderPin);
  taken = client_->reads().take_written(1);
  ASSERT_TRUE(taken.has_value());
  EXPECT_FALSE(client_->reads().take_written(1).has_value());
  taken->is_taken = true;
  client_->release(*taken);
  EXPECT_EQ(ring_.pins(5), 0u);
  const LeasedBytes after = read(1);
  EXPECT_EQ(after.data[7], std::byte{0});
  client_->release(after);
  daemon.join();
}

TEST_F(RingTest, a_written_lease_ends_when_nobody_watches_its_shard_any_more) {
  std::thread daemon([&] {
    for (int i = 0; i < 2; ++i) grant(next_request(), 5, 0, 0, 4096);
  });
  ReadLeases& reads = client_->reads();
  reads.watch(1);
  reads.watch(1);
  const auto write_and_release = [&] {
    const LeasedBytes lease = client_->lease(1, Part::value, LeaseMode::read, kSecond).value();
    lease.data[7] = std::byte{77};
    client_->release(lease);
  };
  write_and_release();
  EXPECT_TRUE(reads.unwatch(2).empty());
  EXPECT_TRUE(reads.unwatch(1).empty());
  EXPECT_EQ(ring_.pins(5), kReaderPin);
  const std::vector<LeasedBytes> left = reads.unwatch(1);
  ASSERT_EQ(left.size(), 1U);
  EXPECT_FALSE(reads.has_written());
  client_->release(left[0]);
  EXPECT_EQ(ring_.pins(5), 0u);
  write_and_release();
  EXPECT_FALSE(reads.has_written());
  EXPECT_EQ(ring_.pins(5), 0u);
  daemon.join();
}

TEST_F(RingTest, a_lease_fails_without_memory_for_a_view_of_its_own) {
  if (!NoMemory::is_possible()) GTEST_SKIP() << "a sanitizer needs memory";
  std::thread daemon([&] {
    for (int i = 0; i < 3; ++i) grant(next_request(), 5, 0, 0, kSegment);
  });
  const auto read = [&] { return client_->lease(1, Part::value, LeaseMode::read, kSecond); };
  const LeasedBytes written = read().value();
  written.data[7] = std::byte{77};
  {
    const NoMemory none;
    const auto refused = read();
    ASSERT_EQ(refused.status().code(), StatusCode::device);
    EXPECT_EQ(refused.status().error_number(), ENOMEM);
  }
  EXPECT_EQ(ring_.pins(5), kReaderPin) << "its pin is given back";
  const LeasedBytes view = read().value();
  EXPECT_EQ(view.data[7], std::byte{0});
  client_->release(view);
  client_->release(written);
  EXPECT_EQ(ring_.pins(5), 0u);
  daemon.join();
}

TEST_F(RingTest, another_layout_or_version_is_refused_with_both_named) {
  layout().header.protocol_version = 7;
  const auto refused = ClientSession::create({.session = copy(ring_.session_fd()),
                                              .table = copy(table_.fd()),
                                              .doorbell = copy(ring_.doorbell_fd()),
                                              .segment_bytes = kSegment,
                                              .arena_reserved_bytes = kSegment,
                                              .more_segments = {}});
  EXPECT_EQ(refused.status().code(), StatusCode::invalid_argument);
  EXPECT_NE(refused.status().message().find(concat(kProtocolVersion, " here, 7 there")),
            std::string::npos)
      << refused.status().message();
  const auto small = SharedMemory::map(copy(table_.fd()), sizeof(SessionLayout));
  EXPECT_EQ(small.status().code(), StatusCode::invalid_argument);
}

TEST_F(RingTest, the_next_daemon_goes_on_with_rings_and_pins) {
  ASSERT_TRUE(client_->prefetch(1).is_ok());
  ASSERT_TRUE(client_->prefetch(2).is_ok());
  ASSERT_TRUE(ring_.poll().has_value());
  ring_.add_pin(5, kReaderPin);
  ring_.set_in_group(true);
  EXPECT_EQ(layout().header.in_group.load(), 1U);
  ring_.set_resident_call(3);
  auto adopted = ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd()));
  ASSERT_TRUE(adopted.is_ok()) << adopted.status().message();
  ServerRing next = std::move(adopted).value();
  EXPECT_EQ(next.pins(5), kReaderPin);
  EXPECT_FALSE(next.in_group());
  EXPECT_EQ(layout().header.in_group.load(), 0U) << "it has formed no group yet";
  EXPECT_EQ(layout().header.resident_call.load(), 0U) << "it has accounted for no step yet";
  EXPECT_FALSE(next.poll().has_value()) << "its client has not come back";
  EXPECT_FALSE(next.prepare_to_sleep()) << "and keeps nobody awake";
  next.wake();
  ASSERT_TRUE(client_->prefetch(3).is_ok());
  next.discard_requests();
  EXPECT_FALSE(next.poll().has_value());
  ASSERT_TRUE(client_->prefetch(4).is_ok());
  EXPECT_EQ(next.poll()->shard_id, 4U);
  EXPECT_FALSE(next.broken());

  layout().header.request_tail.fetch_add(kRingEntries + 1);
  next.discard_requests();
  EXPECT_TRUE(next.broken()) << "more requests than the ring has";
}

TEST_F(RingTest, who_waits_is_told_and_asks_the_next_daemon) {
  std::vector<Result<LeasedBytes>> answers(3, error(StatusCode::unavailable, "none"));
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 3; ++i) {
    threads.emplace_back(
        [&, i] { answers[i] = client_->lease(i, Part::value, LeaseMode::read, 60 * kSecond); });
  }
  const Request first = next_request();
  grant(first, 5);
  const Request second = next_request();
  ring_.add_pin(6, kWriterPin);  // and the daemon dies before it tells
  // The third is left in the ring.
  while (layout().header.request_tail.load() != 3) std::this_thread::yield();
  client_->suspend();
  for (std::thread& thread : threads) thread.join();
  for (uint32_t i = 0; i < 3; ++i) {
    if (i == first.shard_id) {
      EXPECT_TRUE(answers[i].is_ok()) << "what was told holds";
    } else {
      EXPECT_EQ(answers[i].status().code(), StatusCode::unavailable);
      EXPECT_NE(answers[i].status().message().find("the daemon has ended"), std::string::npos);
    }
  }
  EXPECT_NE(second.shard_id, first.shard_id);
  EXPECT_EQ(client_->lease(9, Part::value, LeaseMode::read, kSecond).status().code(),
            StatusCode::unavailable);
  EXPECT_EQ(layout().header.request_tail.load(), 3U) << "nothing is asked meanwhile";

  ring_ = std::move(ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd()))).value();
  ring_.discard_requests();
  client_->reconnect(OwnedFd());
  EXPECT_EQ(ring_.pins(5), kReaderPin) << "a lease that is held stays";
  EXPECT_EQ(ring_.pins(6), 0U) << "a grant that nobody was told of is given back";
  std::thread again(
      [&] { answers[0] = client_->lease(7, Part::value, LeaseMode::write, 60 * kSecond); });
  grant(next_request(), 6);
  again.join();
  ASSERT_TRUE(answers[0].is_ok()) << answers[0].status().message();
  client_->suspend();
  client_->reconnect(OwnedFd());
  EXPECT_EQ(ring_.pins(6), kWriterPin);
  client_->release(answers[0].value());
  EXPECT_EQ(ring_.pins(6), 0U);
}

TEST_F(RingTest, leases_given_back_while_a_session_reconnects_are_counted_once) {
  constexpr int kLeases = 2000;
  std::vector<LeasedBytes> leases;
  std::thread granting([this] {
    for (int i = 0; i < kLeases; ++i) grant(next_request(), static_cast<uint32_t>(i % 7));
  });
  for (int i = 0; i < kLeases; ++i) {
    auto lease = client_->lease(1, Part::value, LeaseMode::read, 60 * kSecond);
    ASSERT_TRUE(lease.is_ok()) << lease.status().message();
    leases.push_back(lease.value());
  }
  granting.join();
  std::thread releasing([&] {
    for (const LeasedBytes& lease : leases) client_->release(lease);
  });
  for (int i = 0; i < 5; ++i) {
    client_->suspend();
    client_->reconnect(OwnedFd());
  }
  releasing.join();
  for (uint32_t index = 0; index < 7; ++index) EXPECT_EQ(ring_.pins(index), 0U);
}

TEST_F(RingTest, what_is_no_session_is_not_adopted) {
  EXPECT_FALSE(ServerRing::adopt(copy(table_.fd()), copy(ring_.doorbell_fd())).is_ok());
  EXPECT_FALSE(ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.session_fd())).is_ok());
  ring_.end();
  EXPECT_EQ(ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd())).status().code(),
            StatusCode::fenced);
}

TEST_F(RingTest, a_client_that_spoils_its_words_loses_its_ring_and_not_its_pins) {
  ring_.add_pin(5, kWriterPin);
  ring_.add_pin(6, kReaderPin);
  ASSERT_TRUE(client_->prefetch(1).is_ok());
  const auto expect_broken = [this] {
    auto adopted = ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd()));
    ASSERT_TRUE(adopted.is_ok()) << adopted.status().message();
    ServerRing next = std::move(adopted).value();
    EXPECT_TRUE(next.broken());
    EXPECT_FALSE(next.poll().has_value());
    EXPECT_FALSE(next.prepare_to_sleep());
    next.wake();
    EXPECT_EQ(next.pins(5), kWriterPin) << "what it half wrote is known";
    EXPECT_EQ(next.pins(6), kReaderPin);
  };
  layout().header.protocol_version = 9;
  expect_broken();
  layout().header.protocol_version = kProtocolVersion;
  layout().header.magic ^= 1;
  expect_broken();
  layout().header.magic ^= 1;
  EXPECT_FALSE(
      ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd())).value().broken());
}

TEST_F(RingTest, no_client_can_hold_up_the_next_daemon_with_its_doorbell) {
  // The client's descriptor and the daemon's are of one open file description.
  const int flags = fcntl(ring_.doorbell_fd(), F_GETFL);
  ASSERT_EQ(fcntl(ring_.doorbell_fd(), F_SETFL, flags & ~O_NONBLOCK), 0);
  EXPECT_TRUE(ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd())).is_ok());
  // Nor does the daemon take what rang: nothing is read at all.
  const uint64_t rung = 3;
  ASSERT_EQ(write(ring_.doorbell_fd(), &rung, sizeof(rung)), ssize_t{sizeof(rung)});
  EXPECT_TRUE(ServerRing::adopt(copy(ring_.session_fd()), copy(ring_.doorbell_fd())).is_ok());
  uint64_t left = 0;
  ASSERT_EQ(read(ring_.doorbell_fd(), &left, sizeof(left)), ssize_t{sizeof(left)});
  EXPECT_EQ(left, rung);
}

TEST(RingTimeouts, any_number_of_seconds_becomes_a_wait_of_an_hour_at_most) {
  EXPECT_EQ(timeout_ns_of(1.5), 1'500'000'000u);
  EXPECT_EQ(timeout_ns_of(-1), 0u);
  EXPECT_EQ(timeout_ns_of(__builtin_nan("")), 0u);
  EXPECT_EQ(timeout_ns_of(1e30), kTimeoutNsMax);
}

}  // namespace
}  // namespace memd
