#include "server/server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <poll.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "ring/client_session.h"

namespace memd {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kHostBytes = 48_MiB;
constexpr uint64_t kJobBytes = 20_MiB;

ShardSpec blob(const std::string& name, uint64_t bytes) {
  return {.name = name,
          .kind = ShardKind::blob,
          .dtype = DType::uint8,
          .tier = Tier::nvme,
          .shape = {bytes}};
}
ShardSpec weight(const std::string& name, uint64_t elements) {
  return {.name = name,
          .kind = ShardKind::parameter,
          .dtype = DType::float32,
          .tier = Tier::nvme,
          .shape = {elements}};
}

/// What a device does not answer, and what was seen of it.
struct Stalls {
  std::atomic<bool> all{false};            // for as long as it is set
  std::atomic<bool> writes{false};         // the same of writes
  uint64_t reads_answered = ~uint64_t{0};  // those that come after are never answered
  uint64_t read_count = 0;
  uint64_t read_offset_bytes = 0;  // of the one that is not answered
  std::mutex turn;                 // the server thread stands still while somebody has it
  std::atomic<bool> stands_still{false};
  uint64_t looks_at_young = 0;  // so often it is asked what is in flight, and all is young
  bool waits_awake = false;     // at the last look, the wake descriptor would have kept it awake
};

/// An engine whose device stops answering.
class StallingQueue final : public IoQueue {
 public:
  StallingQueue(std::unique_ptr<IoQueue> queue, std::shared_ptr<Stalls> stalls, int wake_fd)
      : queue_(std::move(queue)), stalls_(std::move(stalls)), wake_fd_(wake_fd) {}

  std::string_view name() const override { return queue_->name(); }
  uint16_t add_device(OwnedFd file, std::string path) override {
    return queue_->add_device(std::move(file), std::move(path));
  }
  void add_memory(std::span<std::byte> memory, PageKind pages) override {
    queue_->add_memory(memory, pages);
  }
  void remove_memory(std::span<std::byte> memory) override { queue_->remove_memory(memory); }
  void submit(IoRequest request) override {
    if (request.kind == IoKind::read && stalls_->read_count++ >= stalls_->reads_answered) {
      stalls_->read_offset_bytes = request.offset_bytes;
      never_.push_back(std::move(request));
      return;
    }
    const bool is_held = stalls_->all || (stalls_->writes && request.kind == IoKind::write);
    is_held ? held_.push_back(std::move(request)) : queue_->submit(std::move(request));
  }
  size_t reap() override {
    std::unique_lock turn(stalls_->turn, std::try_to_lock);
    if (!turn) {
      stalls_->stands_still = true;
      turn.lock();
    }
    if (!stalls_->all && !stalls_->writes) {
      for (IoRequest& request : std::exchange(held_, {})) queue_->submit(std::move(request));
    }
    return queue_->reap();
  }
  IoQueueStatistics statistics() const override {
    IoQueueStatistics statistics = queue_->statistics();
    statistics.in_flight_count += held_.size() + never_.size();
    return statistics;
  }
  std::vector<IoInFlight> in_flight() const override {
    std::vector<IoInFlight> all;
    const bool is_young = stalls_->looks_at_young > 0;
    if (is_young) --stalls_->looks_at_young;
    for (const IoRequest& request : never_) {
      pollfd wake{.fd = wake_fd_, .events = POLLIN, .revents = 0};
      stalls_->waits_awake = poll(&wake, 1, 0) > 0;
      all.push_back({.kind = request.kind,
                     .priority = request.priority,
                     .device = request.device,
                     .offset_bytes = request.offset_bytes,
                     .length_bytes = request.data.size(),
                     .age_ns = is_young ? 0 : 3600ull * 1'000'000'000,
                     .started = true});
    }
    for (const IoInFlight& each : queue_->in_flight()) all.push_back(each);
    for (const IoRequest& request : held_) {
      all.push_back({.kind = request.kind,
                     .priority = request.priority,
                     .device = request.device,
                     .offset_bytes = request.offset_bytes,
                     .length_bytes = request.data.size(),
                     .started = true});
    }
    return all;
  }
  IoDeviceStatistics device_statistics(uint16_t device) const override {
    return queue_->device_statistics(device);
  }
  void set_limits(uint16_t device, const IoPathLimits& limits) override {
    queue_->set_limits(device, limits);
  }
  IoPathLimits limits(uint16_t device) const override { return queue_->limits(device); }

 private:
  std::unique_ptr<IoQueue> queue_;
  std::shared_ptr<Stalls> stalls_;
  int wake_fd_;
  std::vector<IoRequest> held_;
  std::vector<IoRequest> never_;
};

/// Says that everything is kept.
class GullibleKeeper final : public DescriptorKeeper {
 public:
  void keep(const std::string&, int) override {}
  void forget(const std::string&) override {}
};

/// A daemon without its Python, on a file and with threads of its own.
class ServerTest : public testing::Test {
 protected:
  void SetUp() override {
    // Not the temporary folder: it may lie in memory, which memd refuses.
    const char* configured = std::getenv("MEMD_TEST_DATA");
    std::string path = fs::absolute(configured != nullptr ? configured : ".");
    path += "/server-test-XXXXXX";
    ASSERT_NE(::mkdtemp(path.data()), nullptr) << path;
    root_ = path;
  }
  void TearDown() override {
    server_.reset();
    fs::remove_all(root_);
  }
  void start() {
    auto started = start_on(root_);
    ASSERT_TRUE(started.is_ok()) << started.status().message();
    server_ = std::move(started).value();
  }
  Result<std::shared_ptr<Server>> start_on(const fs::path& directory) {
    return start_on(std::vector<std::string>{directory}, {});
  }
  Result<std::shared_ptr<Server>> start_on(const std::vector<std::string>& directories,
                                           const std::vector<IoPathLimits>& limits) {
    ServerOptions options;
    options.directories = directories;
    options.path_limits = limits;
    options.nvme_bytes = 64_MiB;
    options.host_bytes = kHostBytes;
    options.lock_required = false;
    options.huge_pages = false;
    options.update_thread_count = 2;
    options.keeper = keeper_;
    options.make_queue = [stalls = stalls_](const IoQueueOptions& queue_options) {
      auto choice = make_io_queue(queue_options);
      if (choice.is_ok()) {
        choice.value().queue = std::make_unique<StallingQueue>(
            std::move(choice.value().queue), stalls, queue_options.wake_fd);
      }
      return choice;
    };
    return Server::start(options);
  }
  /// A copy of the volume, for a daemon that does not let go of its own.
  fs::path copied(const std::string& name) {
    fs::create_directory(root_ / name);
    fs::copy_file(root_ / "memd.volume", root_ / name / "memd.volume");
    return root_ / name;
  }
  uint64_t open(const std::string& name, uint64_t host_bytes = kJobBytes, bool fresh = false) {
    const auto job = server_->open_job(
        {.name = name, .uid = 1, .host_bytes = host_bytes, .nvme_bytes = 40_MiB, .fresh = fresh});
    EXPECT_TRUE(job.is_ok()) << job.status().message();
    return job.is_ok() ? job.value().job_id : 0;
  }
  struct Client {
    uint64_t session_id = 0;
    std::shared_ptr<ClientSession> session;
  };
  Client attach(uint64_t job_id) {
    auto grant = server_->attach(job_id);
    EXPECT_TRUE(grant.is_ok()) << grant.status().message();
    Client client{.session_id = grant.value().session_id, .session = nullptr};
    const auto segments = [server = server_, id = client.session_id](uint64_t first) {
      return server->segment_fds(id, first);
    };
    client.session =
        ClientSession::create({.session = std::move(grant.value().session),
                               .table = std::move(grant.value().table),
                               .doorbell = std::move(grant.value().doorbell),
                               .segment_bytes = grant.value().segment_bytes,
                               .arena_reserved_bytes = grant.value().arena_reserved_bytes,
                               .more_segments = segments})
            .value();
    return client;
  }
  uint32_t declare(const Client& client, const ShardSpec& spec) {
    const auto infos = server_->declare(client.session_id, {spec});
    EXPECT_TRUE(infos.is_ok()) << infos.status().message();
    return infos.value().first.at(0).shard_id;
  }
  static Result<LeasedBytes> lease(const Client& client,
                                   uint32_t shard,
                                   LeaseMode mode,
                                   Part part = Part::value) {
    return client.session->lease(shard, part, mode, 20'000'000'000);
  }
  static void fill(const Client& client, uint32_t shard, uint8_t value, Part part = Part::value) {
    const auto held = lease(client, shard, LeaseMode::overwrite, part);
    ASSERT_TRUE(held.is_ok()) << held.status().message();
    std::memset(held.value().data, value, held.value().length_bytes);
    client.session->release(held.value());
  }
  static void expect_filled(const Client& client, uint32_t shard, uint8_t value) {
    const auto held = lease(client, shard, LeaseMode::read);
    ASSERT_TRUE(held.is_ok()) << held.status().message();
    const auto* const first = reinterpret_cast<const uint8_t*>(held.value().data);
    EXPECT_TRUE(std::all_of(
        first, first + held.value().length_bytes, [&](uint8_t byte) { return byte == value; }));
    client.session->release(held.value());
  }

  ServerStatistics statistics() { return server_->statistics().value(); }
  std::vector<JobInfo> jobs() { return server_->jobs().value(); }
  std::vector<Activity> in_flight() { return server_->in_flight().value(); }
  /// The server thread takes no command until the lock is gone.
  std::unique_lock<std::mutex> stand_still() {
    std::unique_lock turn(stalls_->turn);
    while (!stalls_->stands_still) std::this_thread::yield();
    return turn;
  }
  /// Until stop() takes nothing more.
  void wait_for_the_end_to_begin() {
    while (server_->moments().read({}, 0.001).status().code() != StatusCode::unavailable) {
    }
  }

  fs::path root_;
  std::shared_ptr<DescriptorKeeper> keeper_;
  std::shared_ptr<Stalls> stalls_ = std::make_shared<Stalls>();
  std::shared_ptr<Server> server_;
};

TEST_F(ServerTest, clients_in_many_threads_read_what_each_of_them_put) {
  start();
  const uint64_t job = open("job");
  std::vector<std::thread> threads;
  for (uint8_t thread = 1; thread <= 6; ++thread) {
    threads.emplace_back([&, thread] {
      const Client client = attach(job);
      const uint32_t shard = declare(client, blob("b" + std::to_string(thread), 3_MiB));
      for (uint8_t round = 0; round < 5; ++round) {
        const auto value = static_cast<uint8_t>(thread * 16 + round);
        fill(client, shard, value);
        expect_filled(client, shard, value);
        EXPECT_TRUE(client.session->prefetch(shard).is_ok());
        if (round == 3) {
          const auto synced = server_->sync(client.session_id, 20);
          EXPECT_TRUE(synced.is_ok()) << synced.status().message();
        }
        EXPECT_EQ(statistics().jobs.size(), 1u);
      }
      const auto leases = server_->detach(client.session_id);
      ASSERT_TRUE(leases.is_ok());
      EXPECT_EQ(leases.value(), 0u);
      EXPECT_EQ(lease(client, shard, LeaseMode::read).status().code(), StatusCode::fenced);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(jobs().at(0).lease_count, 0u);
  EXPECT_GT(statistics().jobs.at(0).counters.spilled_bytes, 0u) << "18 MiB in 12";
}

TEST_F(ServerTest, no_freed_memory_waits_to_be_joined_in_one_turn) {
  const auto waiting_bytes = [] {
    std::vector<void*> chunks(1000);
    for (void*& chunk : chunks) chunk = std::malloc(48);
    for (void* chunk : chunks) std::free(chunk);
    return mallinfo2().fsmblks;
  };
  mallopt(M_MXFAST, 128);  // as it is without a server
  if (waiting_bytes() == 0) GTEST_SKIP() << "this allocator has no fast bins";
  start();
  EXPECT_EQ(waiting_bytes(), 0u);
}

TEST_F(ServerTest, a_session_that_ends_counts_no_lease_of_another_one) {
  start();
  const uint64_t job = open("job");
  const Client reader = attach(job);
  const uint32_t shard = declare(reader, blob("read", 4096));
  fill(reader, shard, 1);
  std::atomic<bool> is_over = false;
  std::thread reading([&] {
    while (!is_over) expect_filled(reader, shard, 1);
  });
  for (int round = 0; round < 500; ++round) {
    const Client client = attach(job);
    const auto leases = server_->detach(client.session_id);
    ASSERT_TRUE(leases.is_ok());
    EXPECT_EQ(leases.value(), 0u);
  }
  is_over = true;
  reading.join();
}

TEST_F(ServerTest, an_attach_whose_caller_gave_up_leaves_no_session) {
  start();
  const uint64_t job_id = open("job");
  uint32_t attached = 0;
  uint32_t given_up = 0;
  // The server thread is too late for some, and answers when nobody waits any more. How many
  // depends on the machine: fewer than one in a hundred where it has a core to itself.
  for (int i = 0; i < 200'000 && given_up < 20; ++i) {
    auto grant = server_->attach(job_id, {}, 1e-9);
    if (grant.is_ok()) {
      ++attached;
      ASSERT_TRUE(server_->detach(grant.value().session_id).is_ok());
      continue;
    }
    EXPECT_EQ(grant.status().code(), StatusCode::deadline) << grant.status().message();
    ++given_up;
  }
  ASSERT_EQ(given_up, 20U) << attached << " were attached all the same";
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (statistics().session_count != 0 && std::chrono::steady_clock::now() < end)
    std::this_thread::yield();
  EXPECT_EQ(statistics().session_count, 0U);
}

TEST_F(ServerTest, a_session_begins_behind_the_step_that_one_before_it_has_closed) {
  start();
  const uint64_t job_id = open("job");
  std::thread stepping;
  {
    const Client client = attach(job_id);
    const uint32_t parameter = declare(client, weight("w", 300'000));
    fill(client, parameter, 0);
    fill(client, parameter, 0, Part::gradient);
    StepRequest request;
    request.session_id = client.session_id;
    request.groups = {{.settings = {}, .shard_ids = {parameter}}};
    stalls_->all = true;
    stepping = std::thread(
        [request, server = server_] { EXPECT_TRUE(server->step(request, {}, 20).is_ok()); });
    while (in_flight().empty()) std::this_thread::yield();
    ASSERT_TRUE(server_->detach(client.session_id).is_ok());
  }
  EXPECT_EQ(server_->attach(job_id, {}, 20).status().code(), StatusCode::in_use);
  stalls_->all = false;
  stepping.join();
  const auto grant = server_->attach(job_id, {}, 20);
  ASSERT_TRUE(grant.is_ok()) << grant.status().message();
  EXPECT_EQ(grant.value().committed_step, 1U);
  EXPECT_EQ(grant.value().durable_step, 1U);
}

TEST_F(ServerTest, each_path_has_the_limits_of_its_directory_in_whatever_order_they_are_named) {
  const std::string one = root_ / "one";
  const std::string two = root_ / "two";
  fs::create_directory(one);
  fs::create_directory(two);
  const IoPathLimits narrow{.depth = 3, .chunk_bytes = 256_KiB};
  const IoPathLimits wide{.depth = 20, .chunk_bytes = 2_MiB};
  for (const bool swapped : {false, true}) {
    auto started =
        swapped ? start_on({two, one}, {wide, narrow}) : start_on({one, two}, {narrow, wide});
    ASSERT_TRUE(started.is_ok()) << started.status().message();
    server_ = std::move(started).value();
    for (const DeviceStatistics& device : statistics().devices) {
      const IoPathLimits& expected = device.path.starts_with(one) ? narrow : wide;
      EXPECT_EQ(device.limits.depth, expected.depth) << device.path;
      EXPECT_EQ(device.limits.chunk_bytes, expected.chunk_bytes) << device.path;
    }
    server_.reset();
  }
}

TEST_F(ServerTest, limits_that_no_path_can_have_are_refused) {
  for (const std::vector<IoPathLimits>& limits : {std::vector<IoPathLimits>{{.depth = 0}},
                                                  std::vector<IoPathLimits>{{.chunk_bytes = 1}},
                                                  std::vector<IoPathLimits>{{}, {}}}) {
    const auto refused = start_on({root_.string()}, limits);
    EXPECT_EQ(refused.status().code(), StatusCode::invalid_argument);
  }
}

TEST_F(ServerTest, what_is_resident_is_leased_while_the_server_thread_stands_still) {
  start();
  const Client client = attach(open("job"));
  const uint32_t shard = declare(client, blob("a", 1_MiB));
  fill(client, shard, 7);
  expect_filled(client, shard, 7);  // and the writer is known to be gone
  const uint64_t hits = statistics().jobs.at(0).counters.lease_hits;
  {
    const auto turn = stand_still();
    for (int i = 0; i < 1000; ++i) expect_filled(client, shard, 7);
    const auto held = client.session->lease_resident(shard);
    ASSERT_TRUE(held.has_value());
    client.session->release(*held);
  }
  EXPECT_EQ(client.session->statistics().hits, 1001U);
  // The daemon reads of them at its next turn.
  const SteadyClock clock;
  const uint64_t end_ns = clock.now_ns() + 10'000'000'000;
  while (statistics().jobs.at(0).counters.lease_hits < hits + 1001 && clock.now_ns() < end_ns) {
    std::this_thread::yield();
  }
  EXPECT_EQ(statistics().jobs.at(0).counters.lease_hits, hits + 1001);
  ASSERT_TRUE(server_->detach(client.session_id).is_ok());
  EXPECT_EQ(client.session->lease_resident(shard), std::nullopt);
}

TEST_F(ServerTest, who_writes_a_shard_is_waited_for_and_its_neighbours_are_not) {
  start();
  const Client client = attach(open("job"));
  const Client other = attach(open("job"));
  const auto infos = server_->declare(client.session_id, {weight("a", 1000), weight("b", 1000)});
  ASSERT_TRUE(infos.is_ok()) << infos.status().message();
  const uint32_t a = infos.value().first[0].shard_id;
  const uint32_t b = infos.value().first[1].shard_id;
  fill(client, a, 1);
  fill(client, b, 2);
  expect_filled(other, a, 1);
  expect_filled(other, b, 2);
  const auto old = other.session->lease_resident(a);
  ASSERT_TRUE(old.has_value());
  const auto writer = lease(client, a, LeaseMode::write);
  ASSERT_TRUE(writer.is_ok()) << writer.status().message();
  EXPECT_EQ(other.session->lease_resident(a), std::nullopt);
  expect_filled(other, b, 2);
  const uint64_t hits = other.session->statistics().hits;
  expect_filled(other, b, 2);
  EXPECT_EQ(other.session->statistics().hits, hits + 1);
  std::memset(writer.value().data, 3, writer.value().length_bytes);
  EXPECT_EQ(old->data[5], std::byte{1}) << "a live view is never written";
  client.session->release(writer.value());
  other.session->release(*old);
  expect_filled(other, a, 3);
  EXPECT_TRUE(other.session->lease_resident(a).has_value());
}

TEST_F(ServerTest, bytes_under_a_lease_stay_while_shards_are_evicted_and_overwritten) {
  start();
  const uint64_t job = open("job", 12_MiB);  // 4 MiB of arena
  constexpr uint32_t kBlobs = 6;
  const Client writer = attach(job);
  std::vector<uint32_t> shards;
  for (uint32_t i = 0; i < kBlobs; ++i) {
    shards.push_back(declare(writer, blob("b" + std::to_string(i), 256_KiB)));
    fill(writer, shards.back(), static_cast<uint8_t>(16 * i));
  }
  const uint32_t large = declare(writer, blob("large", 2_MiB));
  std::atomic<bool> done{false};
  std::atomic<uint64_t> hits{0};
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      const Client client = attach(job);
      for (uint32_t i = thread; !done; ++i) {
        const uint32_t index = i % kBlobs;
        const auto held = lease(client, shards[index], LeaseMode::read);
        ASSERT_TRUE(held.is_ok()) << held.status().message();
        const auto* const bytes = reinterpret_cast<const uint8_t*>(held.value().data);
        const uint8_t first = bytes[0];
        EXPECT_EQ(first / 16, index);
        for (int again = 0; again < 2; ++again) {
          EXPECT_TRUE(std::all_of(bytes, bytes + held.value().length_bytes, [&](uint8_t byte) {
            return byte == first;
          }));
        }
        client.session->release(held.value());
      }
      hits += client.session->statistics().hits;
    });
  }
  for (uint32_t round = 0; round < 40; ++round) {
    fill(writer, large, static_cast<uint8_t>(round));  // in the way of some of them
    const uint32_t index = round % kBlobs;
    fill(writer, shards[index], static_cast<uint8_t>(16 * index + round % 16));
  }
  done = true;
  for (auto& thread : threads) thread.join();
  EXPECT_GT(hits.load(), 0U);
  EXPECT_GT(statistics().jobs.at(0).counters.evicted_bytes, 0U);
  EXPECT_EQ(jobs().at(0).lease_count, 0U);
}

TEST_F(ServerTest, a_release_wakes_who_waits_for_room) {
  start();
  const uint64_t job = open("job", 12_MiB);  // 4 MiB of arena
  const Client one = attach(job);
  const Client two = attach(job);
  const uint32_t a = declare(one, blob("a", 3_MiB));
  const uint32_t b = declare(two, blob("b", 3_MiB));
  fill(one, a, 1);
  const auto held = lease(one, a, LeaseMode::read);
  ASSERT_TRUE(held.is_ok());
  std::thread waiting([&] { fill(two, b, 2); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const SteadyClock clock;
  const uint64_t start_ns = clock.now_ns();
  one.session->release(held.value());
  waiting.join();
  EXPECT_LT(clock.now_ns() - start_ns, 5'000'000'000u);
  expect_filled(one, a, 1);
}

TEST_F(ServerTest, a_wait_for_a_stalled_device_ends_with_what_is_in_flight) {
  start();
  const Client client = attach(open("job"));
  const uint32_t shard = declare(client, blob("a", 1_MiB));
  fill(client, shard, 1);
  EXPECT_TRUE(in_flight().empty());
  stalls_->all = true;
  const Status sync = server_->sync(client.session_id, 0.2).status();
  EXPECT_EQ(sync.code(), StatusCode::deadline);
  for (const char* part : {"the sync is not done yet", "sync of job job (writes back", "write"}) {
    EXPECT_NE(sync.message().find(part), std::string::npos) << sync.message();
  }
  std::thread second([&] { EXPECT_TRUE(server_->sync(client.session_id, 20).is_ok()); });
  std::vector<Activity> seen;
  while (seen.size() < 3) seen = in_flight();
  const auto count = [&](const std::string& kind, bool waits) {
    return std::count_if(seen.begin(), seen.end(), [&](const Activity& each) {
      return each.kind == kind && each.waits_on.empty() != waits;
    });
  };
  EXPECT_EQ(count("sync", false), 1);
  EXPECT_EQ(count("sync", true), 1) << "behind the first one";
  EXPECT_GE(count("write", false), 1);
  for (const Activity& each : seen) {
    if (each.kind == "write") EXPECT_NE(each.what.find(root_.string()), std::string::npos);
    if (each.kind == "sync") EXPECT_EQ(each.job, "job");
  }
  stalls_->all = false;
  second.join();
  EXPECT_TRUE(in_flight().empty());
  EXPECT_TRUE(server_->stop(20).is_ok());
}

TEST_F(ServerTest, a_device_that_never_answers_does_not_hold_up_the_end) {
  start();
  const Client client = attach(open("job"));
  const uint32_t shard = declare(client, blob("a", 1_MiB));
  fill(client, shard, 1);
  stalls_->all = true;
  Status waiting_sync;
  std::thread waiting([&] { waiting_sync = server_->sync(client.session_id, 600).status(); });
  while (in_flight().empty()) std::this_thread::yield();
  const Status stopped = server_->stop(0.3);
  waiting.join();  // it does not wait for its ten minutes
  EXPECT_EQ(waiting_sync.code(), StatusCode::unavailable) << waiting_sync.message();
  EXPECT_EQ(stopped.code(), StatusCode::deadline);
  for (const char* part : {"every job is on disk as of its last commit", "write", "memd.volume"}) {
    EXPECT_NE(stopped.message().find(part), std::string::npos) << stopped.message();
  }
  EXPECT_TRUE(server_->stop(0.3).is_ok()) << "once is enough";
}

TEST_F(ServerTest, an_end_that_cannot_ask_for_the_last_sync_is_no_good_end) {
  keeper_ = std::make_shared<GullibleKeeper>();  // so that no session is ended first
  start();
  const Client client = attach(open("job"));
  fill(client, declare(client, blob("a", 1_MiB)), 1);
  auto turn = stand_still();
  Status stopped;
  std::thread stopping([&] { stopped = server_->stop(0.01); });
  wait_for_the_end_to_begin();
  turn.unlock();
  stopping.join();
  EXPECT_EQ(stopped.code(), StatusCode::deadline);
  EXPECT_NE(stopped.message().find("listing the jobs to sync"), std::string::npos)
      << stopped.message();
}

TEST_F(ServerTest, a_lease_granted_after_its_caller_gave_up_is_given_back) {
  start();
  const Client client = attach(open("job"));
  const uint32_t shard = declare(client, blob("a", 1_MiB));
  fill(client, shard, 1);
  auto turn = stand_still();
  // Ten seconds of grace are added.
  const auto late = server_->lease(client.session_id, shard, Part::value, LeaseMode::read, -9.99);
  EXPECT_EQ(late.status().code(), StatusCode::deadline) << late.status().message();
  turn.unlock();
  for (int i = 0; i < 1000 && jobs().at(0).lease_count > 0; ++i) {
  }
  EXPECT_EQ(jobs().at(0).lease_count, 0u);
}

TEST_F(ServerTest, an_end_waits_for_streams_that_use_memory_and_leaves_it_to_those_that_stay) {
  for (const bool stays : {false, true}) {
    start();
    const Client client = attach(open("job"));
    const uint32_t shard = declare(client, blob("a", 1_MiB));
    fill(client, shard, 7);
    auto lease = server_->lease(client.session_id, shard, Part::value, LeaseMode::read, 20);
    ASSERT_TRUE(lease.is_ok()) << lease.status().message();
    const std::span<const std::byte> bytes(lease.value()->data(), lease.value()->bytes());
    const auto expect_mapped = [&] {
      EXPECT_TRUE(std::all_of(
          bytes.begin(), bytes.end(), [](std::byte each) { return each == std::byte{7}; }));
    };
    Status stopped;
    std::thread stopping([&] { stopped = server_->stop(stays ? 0.2 : 20); });
    wait_for_the_end_to_begin();
    if (stays) stopping.join();
    expect_mapped();
    lease.value()->release(false);
    if (!stays) stopping.join();
    EXPECT_EQ(stopped.code(), stays ? StatusCode::deadline : StatusCode::ok) << stopped.message();
    if (stays) {
      EXPECT_NE(stopped.message().find("1 leases"), std::string::npos) << stopped.message();
      expect_mapped();
    }
  }
}

TEST_F(ServerTest, a_start_gives_up_a_device_that_does_not_answer_and_names_the_place) {
  start();
  const auto small = server_->open_job(
      {.name = "one", .uid = 1, .host_bytes = kJobBytes, .nvme_bytes = 8_MiB, .fresh = false});
  ASSERT_TRUE(small.is_ok()) << small.status().message();
  const Client client = attach(open("two"));
  std::vector<ShardSpec> specs;
  for (int i = 0; i < 1'100; ++i)
    specs.push_back(blob(std::string(1'000, 'n') + std::to_string(i), 1));
  ASSERT_TRUE(server_->declare(client.session_id, specs).is_ok());
  ASSERT_TRUE(server_->stop(20).is_ok());
  server_.reset();

  const auto expect_refused = [&](const fs::path& directory) {
    const auto refused = start_on(directory);
    ASSERT_EQ(refused.status().code(), StatusCode::deadline) << refused.status().message();
    for (const std::string& part :
         {std::string("a device does not answer, so that the daemon cannot start"),
          concat("read (", directory.string(), "/memd.volume at ", stalls_->read_offset_bytes)}) {
      EXPECT_NE(refused.status().message().find(part), std::string::npos)
          << refused.status().message() << "\nwithout: " << part;
    }
    EXPECT_FALSE(stalls_->waits_awake);
  };
  std::vector<uint64_t> offsets_bytes;
  for (uint64_t reads = 0;; ++reads) {
    const fs::path directory = copied(std::to_string(reads));
    stalls_ = std::make_shared<Stalls>();
    stalls_->reads_answered = reads;
    // What a worker has just finished wakes once.
    stalls_->looks_at_young = 2;
    if (reads == 4) {
      const auto started = start_on(directory);
      ASSERT_TRUE(started.is_ok()) << started.status().message();
      break;
    }
    expect_refused(directory);
    offsets_bytes.push_back(stalls_->read_offset_bytes);
  }
  EXPECT_EQ(std::set(offsets_bytes.begin(), offsets_bytes.end()).size(), 4u)
      << "the root, a catalogue, and another one in two extents";

  // The second attempt, after a mismatch.
  const fs::path directory = copied("mismatch");
  {
    std::fstream volume(directory / "memd.volume", std::ios::in | std::ios::out | std::ios::binary);
    volume.seekp(static_cast<std::streamoff>(offsets_bytes.at(0)));
    volume.put('!');
  }
  stalls_ = std::make_shared<Stalls>();
  stalls_->reads_answered = 1;
  stalls_->looks_at_young = 2;
  expect_refused(directory);
  EXPECT_EQ(stalls_->read_offset_bytes, offsets_bytes.at(0));
}

TEST_F(ServerTest, stopping_while_leases_wait_answers_all_of_them) {
  start();
  const Client client = attach(open("job"));
  const uint32_t shard = declare(client, blob("a", 1_MiB));
  fill(client, shard, 1);
  const auto held = lease(client, shard, LeaseMode::overwrite);
  ASSERT_TRUE(held.is_ok());
  std::vector<std::thread> threads;
  std::atomic<int> answered{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const auto refused = lease(client, shard, LeaseMode::overwrite);
      EXPECT_TRUE(refused.status().code() == StatusCode::fenced ||
                  refused.status().code() == StatusCode::unavailable)
          << refused.status().message();
      ++answered;
    });
    threads.emplace_back([&] {
      const auto refused =
          server_->lease(client.session_id, shard, Part::value, LeaseMode::overwrite, 20);
      EXPECT_FALSE(refused.is_ok());
      ++answered;
    });
  }
  std::atomic<bool> done{false};
  threads.emplace_back([&] {
    while (!done) [[maybe_unused]]
      const auto answer = server_->statistics();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const SteadyClock clock;
  const uint64_t start_ns = clock.now_ns();
  EXPECT_TRUE(server_->stop(20).is_ok());
  while (answered < 8 && clock.now_ns() - start_ns < 10'000'000'000) std::this_thread::yield();
  EXPECT_EQ(answered, 8);
  done = true;
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(server_->stop(1).is_ok()) << "a second time does nothing";
  EXPECT_EQ(server_->sync(client.session_id, 1).status().code(), StatusCode::unavailable);
  EXPECT_EQ(server_->find_job("job").status().code(), StatusCode::unavailable);
}

TEST_F(ServerTest, what_was_put_is_there_after_a_restart_and_a_step_in_flight_is_finished) {
  start();
  uint32_t shard = 0;
  uint32_t parameter = 0;
  {
    const Client client = attach(open("job"));
    shard = declare(client, blob("a", 1_MiB));
    parameter = declare(client, weight("w", 300'000));
    fill(client, shard, 7);
    fill(client, parameter, 0);
    fill(client, parameter, 0, Part::gradient);
    const auto half_written = lease(client, shard, LeaseMode::overwrite);
    ASSERT_TRUE(half_written.is_ok());
    StepRequest request;
    request.session_id = client.session_id;
    request.groups = {{.settings = {}, .shard_ids = {parameter}}};
    std::thread stepping([&, server = server_] {
      const auto report = server->step(request, {}, 20);
      EXPECT_TRUE(report.is_ok()) << report.status().message();
    });
    while (statistics().jobs.at(0).job.committed_step == 0) {
      std::this_thread::yield();  // its commit has begun
    }
    EXPECT_TRUE(server_->stop(20).is_ok());
    stepping.join();
  }
  server_.reset();
  start();
  EXPECT_FALSE(server_->report().formatted);
  const auto job = server_->find_job("job");
  ASSERT_TRUE(job.is_ok());
  EXPECT_EQ(job.value().committed_step, 1u);
  // Nobody opened it: attaching gives it memory.
  const Client client = attach(job.value().job_id);
  expect_filled(client, shard, 7);
  expect_filled(client, parameter, 0);
  EXPECT_EQ(server_->shards(job.value().job_id).value().at(parameter).generation, 1u);
}

TEST_F(ServerTest,
       a_job_that_goes_back_to_a_snapshot_is_waited_for_and_keeps_no_other_one_waiting) {
  start();
  {
    const Client client = attach(open("host"));
    ShardSpec spec = weight("w", 100'000);
    spec.tier = Tier::host;
    const uint32_t parameter = declare(client, spec);
    fill(client, parameter, 0);
    const auto step = [&] {
      fill(client, parameter, 0, Part::gradient);
      StepRequest request;
      request.session_id = client.session_id;
      request.groups = {{.settings = {}, .shard_ids = {parameter}}};
      EXPECT_TRUE(server_->step(request, {}, 20).is_ok());
    };
    step();
    const auto job = server_->find_job("host");
    ASSERT_TRUE(job.is_ok());
    const auto made =
        server_->snapshots().create({.job_id = job.value().job_id, .name = "kept"}, 20);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    step();
    EXPECT_TRUE(server_->stop(20).is_ok());
  }
  server_.reset();
  stalls_->writes = true;
  start();
  std::atomic<bool> is_open{false};
  std::thread opening([&] {
    open("host");
    is_open = true;
  });
  const auto other =
      server_->open_job({.name = "other", .uid = 1, .host_bytes = kJobBytes, .nvme_bytes = 8_MiB});
  EXPECT_TRUE(other.is_ok()) << other.status().message();
  EXPECT_FALSE(is_open) << "it goes back";
  stalls_->writes = false;
  opening.join();
  const auto job = server_->find_job("host");
  ASSERT_TRUE(job.is_ok());
  EXPECT_EQ(job.value().committed_step, 1U);
}

TEST_F(ServerTest, starting_over_gets_its_memory_back_first_and_another_job_keeps_its_own) {
  start();
  for (int round = 0; round < 3; ++round) {
    const uint64_t job = open("job", kHostBytes - 12_MiB, true);
    const Client client = attach(job);
    const auto infos = server_->shards(job);
    ASSERT_TRUE(infos.is_ok());
    EXPECT_TRUE(infos.value().empty());
    fill(client, declare(client, blob("a", 1_MiB)), 1);
    const auto busy = server_->open_job(
        {.name = "job", .uid = 1, .host_bytes = 0, .nvme_bytes = 0, .fresh = true});
    EXPECT_EQ(busy.status().code(), StatusCode::in_use) << "a session is attached";
    ASSERT_TRUE(server_->detach(client.session_id).is_ok());
  }
  EXPECT_EQ(jobs().size(), 1u);
  EXPECT_TRUE(server_->drop_job(jobs()[0].job_id, false).is_ok());
  EXPECT_EQ(statistics().pool_bytes_free, kHostBytes);
}

TEST_F(ServerTest, a_client_that_breaks_the_protocol_loses_its_session_and_nobody_else_does) {
  start();
  const uint64_t job = open("job");
  const Client good = attach(job);
  const uint32_t shard = declare(good, blob("a", 1_MiB));
  fill(good, shard, 1);
  for (int kind = 0; kind < 3; ++kind) {
    auto grant = server_->attach(job);
    ASSERT_TRUE(grant.is_ok());
    const SharedMemory memory =
        SharedMemory::map(std::move(grant.value().session), sizeof(SessionLayout)).value();
    auto& layout = *reinterpret_cast<SessionLayout*>(memory.data());
    for (uint32_t i = 0; i < kRingEntries; ++i) {
      std::memset(&layout.requests[i], kind == 1 ? 0xff : 0, sizeof(Request));
      if (kind != 2) continue;
      layout.requests[i].opcode = Opcode::lease;  // waits for itself, again and again
      layout.requests[i].shard_id = shard;
      layout.requests[i].mode = LeaseMode::overwrite;
      layout.requests[i].timeout_ns = ~uint64_t{0};
    }
    const uint64_t one = 1;
    const SteadyClock clock;
    const uint64_t start_ns = clock.now_ns();
    while (layout.header.ended.load() == 0 && clock.now_ns() - start_ns < 10'000'000'000) {
      const uint32_t ahead = kind == 0 ? 5 * kRingEntries : kRingEntries;
      layout.header.request_tail.store(layout.header.request_head.load() + ahead);
      EXPECT_EQ(write(grant.value().doorbell.get(), &one, sizeof(one)), 8);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    EXPECT_EQ(layout.header.ended.load(), 1u) << kind;
    expect_filled(good, shard, 1);
  }
  EXPECT_EQ(statistics().session_count, 1u);
  EXPECT_GE(statistics().ring_protocol_errors, 3u);
}

}  // namespace
}  // namespace memd
