// A ShardStore over devices in memory, turned by hand: what tests of leases, steps and commits
// share.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arena/pool.h"
#include "base/turn_budget.h"
#include "base/units.h"
#include "io/memory_queue.h"
#include "store/shard_store.h"
#include "twin.h"

namespace memd::testing {

/// Whoever makes a second store on the same disk starts the daemon again on what is there. Every
/// operation is recorded in the order of its submission.
class DiskQueue final : public IoQueue {
 public:
  DiskQueue(std::shared_ptr<MemoryDisk> disk, const MemoryQueueOptions& options)
      : disk_(std::move(disk)), queue_(options) {}

  struct Operation {
    IoKind kind;
    uint64_t offset_bytes;
    uint64_t length_bytes;
  };

  std::string_view name() const override { return queue_.name(); }
  uint16_t add_device(OwnedFd, std::string path) override {
    return queue_.add_disk(disk_, std::move(path));
  }
  void add_memory(std::span<std::byte> memory, PageKind pages) override {
    (pages == PageKind::huge ? huge_memory_bytes : memory_bytes) += memory.size();
  }
  void remove_memory(std::span<std::byte>) override {}
  void set_limits(uint16_t device, const IoPathLimits& limits) override {
    queue_.set_limits(device, limits);
  }
  void submit(IoRequest request) override {
    operations.push_back({request.kind, request.offset_bytes, request.data.size()});
    if (before_submit) before_submit(operations.back());
    if (after_transfer) {
      request.complete = [this,
                          job = request.job,
                          bytes = request.data.size(),
                          done = std::move(request.complete)](const Status& status) {
        after_transfer(job, bytes);
        done(status);
      };
    }
    if (after_read && request.kind == IoKind::read) {
      request.complete =
          [this, data = request.data, done = std::move(request.complete)](const Status& status) {
            after_read(data);
            done(status);
          };
    }
    queue_.submit(std::move(request));
  }
  void raise(JobId job, std::span<const std::byte> memory) override { queue_.raise(job, memory); }
  void set_weight(JobId job, JobWeight weight) override { queue_.set_weight(job, weight); }
  size_t reap() override { return queue_.reap(); }
  IoQueueStatistics statistics() const override { return queue_.statistics(); }
  std::vector<IoInFlight> in_flight() const override { return queue_.in_flight(); }
  IoDeviceStatistics device_statistics(uint16_t device) const override {
    return queue_.device_statistics(device);
  }

  MemoryQueue& memory() { return queue_; }
  uint64_t memory_bytes = 0;  // of small pages that were added, of removed ones too
  uint64_t huge_memory_bytes = 0;
  std::vector<Operation> operations;
  std::function<void(const Operation&)> before_submit;
  std::function<void(JobId job, uint64_t bytes)> after_transfer;
  /// Between the device's last byte and the continuation.
  std::function<void(std::span<std::byte>)> after_read;

 private:
  std::shared_ptr<MemoryDisk> disk_;
  MemoryQueue queue_;
};

inline constexpr uint64_t kDiskBytes = 224_MiB;
inline constexpr uint64_t kSegmentBytes = 2_MiB;
inline constexpr uint64_t kFloorSegments = kPrivateFloorBytes / kSegmentBytes;
/// The disk's quota of a job in these tests.
inline constexpr uint64_t kQuotaBytes = 200_MiB;

/// The newest valid superblock of the disk, or that of a new volume.
inline Superblock newest_superblock(std::span<const std::byte> disk) {
  const auto found = memd::newest_superblock(
      disk.size(), "disk", [disk](std::span<std::byte> block, uint64_t offset_bytes) {
        std::memcpy(block.data(), disk.data() + offset_bytes, block.size());
        return Status::ok();
      });
  if (found.is_ok()) return found.value();
  Superblock empty;
  empty.volume_count = 1;
  empty.volume_bytes = disk.size();
  return empty;
}

struct Held {
  Status status;
  LeaseGrant grant;
  uint64_t session_id = 0;
  bool is_ok() const { return status.is_ok(); }
  template <typename T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(grant.data), grant.length_bytes / sizeof(T)};
  }
};

/// Keeps copies of descriptors, as systemd or the holder would.
class TestKeeper final : public DescriptorKeeper {
 public:
  void keep(const std::string& name, int fd) override {
    if (before_keep) before_keep(name, fd);
    kept_[name] = OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  }
  void forget(const std::string& name) override {
    if (before_forget) before_forget(name);
    kept_.erase(name);
  }
  KeptDescriptors hand_over() const {
    KeptDescriptors copies;
    for (const auto& [name, fd] : kept_) {
      copies.push_back({.name = name, .fd = OwnedFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0))});
    }
    return copies;
  }
  int find(const std::string& name) const {
    const auto found = kept_.find(name);
    return found == kept_.end() ? -1 : found->second.get();
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [name, fd] : kept_) all.push_back(name);
    return all;
  }

  std::function<void(const std::string& name, int fd)> before_keep;
  std::function<void(const std::string& name)> before_forget;

 private:
  std::map<std::string, OwnedFd> kept_;
};

/// Time passes where somebody looks, and at no other time.
class SteppedClock final : public Clock {
 public:
  explicit SteppedClock(uint64_t step_ns) : step_ns_(step_ns) {}
  uint64_t now_ns() const override { return now_ns_ += step_ns_; }

 private:
  const uint64_t step_ns_;
  mutable uint64_t now_ns_ = 0;
};

struct HeartOptions {
  uint64_t segment_count = kFloorSegments + 8;
  TestKeeper* keeper = nullptr;
  uint32_t worker_count = 2;  // with one the order of all I/O is the same in every run
  bool redo_steps = true;
  uint64_t bytes_per_second = 0;  // of the disk, by the clock of the Heart; 0: no limit
  bool workers_by_hand = false;   // nothing runs but what workers().run_next() runs
  /// A turn has time for so many pieces of work, and for one of each of its parts; 0: for all.
  /// MEMD_HURRIED=1 runs every test with as little as there is.
  uint64_t pieces_a_turn = std::getenv("MEMD_HURRIED") != nullptr ? 1 : 0;
  std::function<void(MemoryQueue&)> before_load = [](MemoryQueue&) {};
  std::function<void(MemoryQueue&)> while_loading = [](MemoryQueue&) {};
};

/// One run of the daemon's heart. Destroying it is an orderly end without a last sync.
class Heart {
 public:
  explicit Heart(std::shared_ptr<MemoryDisk> disk,
                 uint64_t segment_count = kFloorSegments + 8,
                 TestKeeper* keeper = nullptr)
      : Heart(std::move(disk), HeartOptions{.segment_count = segment_count, .keeper = keeper}) {}
  Heart(std::shared_ptr<MemoryDisk> disk, const HeartOptions& options)
      : is_hurried_(options.pieces_a_turn != 0),
        turn_clock_(is_hurried_ ? TurnBudget::kTurnNs / options.pieces_a_turn : 0),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        io_(disk,
            {.depth = 32,
             .wake_fd = wake_.get(),
             .automatic = true,
             .clock = &clock,
             .bytes_per_second = options.bytes_per_second,
             .turn = &turn_budget_}),
        workers_(options.workers_by_hand
                     ? std::make_unique<Workers>(Workers::ByHand{}, wake_.get(), &turn_budget_)
                     : std::make_unique<Workers>(options.worker_count, wake_.get(), &turn_budget_)),
        extents_(io_, *workers_, volume_set(*disk), clock) {
    TestKeeper* const keeper = options.keeper;
    KeptDescriptors kept;
    if (keeper != nullptr) kept = keeper->hand_over();
    auto pool = Pool::create({.bytes = options.segment_count * kSegmentBytes,
                              .segment_bytes = kSegmentBytes,
                              .huge_pages = false,
                              .lock = LockMode::wanted},
                             keeper,
                             &kept);
    EXPECT_TRUE(pool.is_ok()) << pool.status().message();
    pool_ = std::move(pool).value();
    store_ = std::make_unique<ShardStore>(ShardStoreParts{.pool = *pool_,
                                                          .io = io_,
                                                          .extents = extents_,
                                                          .workers = *workers_,
                                                          .clock = clock,
                                                          .turn = &turn_budget_,
                                                          .keeper = keeper});
    options.before_load(io_.memory());
    loaded = store_->load(
        [&] {
          io_.reap();
          while (options.workers_by_hand && workers_->run_next()) {
          }
          workers_->reap();
          clock.advance(1'000'000);
          options.while_loading(io_.memory());
          return Status::ok();
        },
        &kept);
    if (!loaded.is_ok()) return;
    for (const KeptDescriptor& left : kept) {
      if (left.fd.is_open() && keeper != nullptr) keeper->forget(left.name);
    }
    loaded = pool_->settle();
    if (options.redo_steps) store_->operations().redo_steps();
  }
  /// As kill -9 would: nothing is ended, and what was not written by now never is. The object must
  /// not be destroyed or used any more.
  void kill() { workers_.reset(); }
  /// The same where a worker stands still for good.
  void kill_with_stopped_workers() { [[maybe_unused]] auto* const leaked = workers_.release(); }
  ~Heart() {
    io_.memory().clear_faults();
    io_.memory().release_stalled();
    store_->detach_all();
    store_->give_up_waiting();
    EXPECT_TRUE(until([this] { return store_->is_idle(); }));
    store_.reset();
  }

  ShardStore& store() { return *store_; }
  DiskQueue& io() { return io_; }
  MemoryQueue& faults() { return io_.memory(); }
  ExtentStore& extents() { return extents_; }
  Workers& workers() { return *workers_; }

  bool turn() {
    if (is_hurried_) turn_budget_.begin();
    const bool reaped = io_.reap() + workers_->reap() > 0;
    if (store_->advance() || reaped || turn_budget_.is_cut()) return true;
    if (tries_sleepers) expect_sleepers_wait();
    // Time stands still here: what waits for its next try has it as soon as nothing else is done.
    const uint64_t due_ns = holds_tries_up ? 0 : extents_.next_ns();
    if (due_ns > clock.now_ns()) clock.advance(due_ns - clock.now_ns());
    return when_idle && when_idle();
  }
  /// Turns until `holds`; false where it hangs, which is told from a busy machine by two minutes.
  bool until(const std::function<bool()>& holds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (!holds()) {
      if (!turn()) std::this_thread::yield();
      if (std::chrono::steady_clock::now() > end) return false;
    }
    return true;
  }
  void turns(int count = 50) {
    for (int i = 0; i < count; ++i) {
      turn();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  /// Turns until many in a row had nothing to do, however long workers and devices take.
  void settle() {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    for (int idle_count = 0; idle_count < 50;) {
      idle_count = turn() ? 0 : idle_count + 1;
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  uint64_t open(const std::string& name,
                uint64_t arena_segments = 8,
                uint64_t nvme_bytes = kQuotaBytes,
                std::optional<Durability> durability = std::nullopt) {
    const auto job =
        store_->admissions().open({.name = name,
                                   .uid = 1000,
                                   .host_bytes = (kFloorSegments + arena_segments) * kSegmentBytes,
                                   .nvme_bytes = nvme_bytes,
                                   .fresh = false,
                                   .durability = durability});
    EXPECT_TRUE(job.is_ok()) << job.status().message();
    return job.is_ok() ? job.value().job_id : 0;
  }
  uint64_t attach(uint64_t job_id) {
    const auto session = store_->attach(job_id, {.pid = 1, .start_time = 2, .uid = 3});
    EXPECT_TRUE(session.is_ok()) << session.status().message();
    return session.is_ok() ? session.value()->session_id : 0;
  }
  Job& job(uint64_t session_id) { return *store_->job_of(session_id).value(); }
  /// As a trainer's call makes them, on a thread that has no store.
  static LabelledSpecs labelled(std::vector<ShardSpec> specs) {
    const WorkerBytes of_another_thread;
    return LabelledSpecs(std::move(specs));
  }
  std::vector<uint32_t> declare(uint64_t session_id, const std::vector<ShardSpec>& specs) {
    const auto infos = store_->declare(session_id, labelled(specs));
    EXPECT_TRUE(infos.is_ok()) << infos.status().message();
    std::vector<uint32_t> ids;
    if (!infos.is_ok()) return ids;
    for (const ShardInfo& info : infos.value().first) ids.push_back(info.shard_id);
    return ids;
  }

  /// From now on the job's state has `bytes` of disk, whatever it declared.
  void limit_state(uint64_t session_id, uint64_t bytes) {
    JobSpace& space = job(session_id).space();
    space.set_quota_bytes(bytes + space.metadata_bytes());
  }

  std::vector<ShardInfo> shards(uint64_t job_id) {
    return store_->reports().shards(job_id).value();
  }

  /// Asks and returns at once; `*answer` is there when the store has answered.
  std::shared_ptr<std::optional<Held>> ask(const LeaseRequest& request) {
    auto answer = std::make_shared<std::optional<Held>>();
    store_->lease(request,
                  [answer, id = request.session_id](const Status& status, const LeaseGrant& grant) {
                    *answer = Held{.status = status, .grant = grant, .session_id = id};
                  });
    return answer;
  }
  std::shared_ptr<std::optional<Held>> ask(uint64_t session_id,
                                           uint32_t shard_id,
                                           LeaseMode mode = LeaseMode::read,
                                           Part part = Part::value) {
    return ask({.session_id = session_id,
                .shard_id = shard_id,
                .part = part,
                .mode = mode,
                .timeout_ns = 60'000'000'000,
                .for_service = false,
                .prefetch = false});
  }
  Held lease(uint64_t session_id,
             uint32_t shard_id,
             LeaseMode mode = LeaseMode::read,
             Part part = Part::value) {
    const auto answer = ask(session_id, shard_id, mode, part);
    if (!until([&] { return answer->has_value(); })) {
      ADD_FAILURE() << "no answer to a lease of shard " << shard_id;
      return {.status = error(StatusCode::deadline, "no answer"), .grant = {}, .session_id = 0};
    }
    return **answer;
  }
  /// What the client's deleter does.
  void release(const Held& held) {
    const auto found = store_->sessions().find(held.session_id);
    if (found == store_->sessions().end()) return;
    found->second->ring.add_pin(held.grant.slot->pin_first + held.grant.index, ~held.grant.pin + 1);
  }

  template <typename T>
  void write(uint64_t session_id,
             uint32_t shard_id,
             const std::vector<T>& values,
             Part part = Part::value,
             LeaseMode mode = LeaseMode::overwrite) {
    const Held held = lease(session_id, shard_id, mode, part);
    ASSERT_TRUE(held.is_ok()) << held.status.message();
    ASSERT_EQ(held.as<T>().size(), values.size());
    std::copy(values.begin(), values.end(), held.as<T>().begin());
    release(held);
  }
  template <typename T>
  std::vector<T> read(uint64_t session_id, uint32_t shard_id, Part part = Part::value) {
    const Held held = lease(session_id, shard_id, LeaseMode::read, part);
    EXPECT_TRUE(held.is_ok()) << held.status.message();
    if (!held.is_ok()) return {};
    std::vector<T> values(held.as<T>().begin(), held.as<T>().end());
    release(held);
    return values;
  }
  /// Leases and lets go, so that others are evicted or spilled for it.
  void touch(uint64_t session_id, uint32_t shard_id) {
    const Held held = lease(session_id, shard_id);
    ASSERT_TRUE(held.is_ok()) << held.status.message();
    release(held);
  }

  std::pair<Status, StepReport> step(const StepRequest& request) {
    std::optional<std::pair<Status, StepReport>> answer;
    store_->operations().step(request, [&](const Status& status, const StepReport& report) {
      answer.emplace(status, report);
    });
    EXPECT_TRUE(until([&] { return answer.has_value(); }));
    return answer.value_or(std::pair(error(StatusCode::deadline, "no answer"), StepReport{}));
  }
  Status sync(uint64_t session_id) {
    std::optional<Status> answer;
    store_->operations().sync(session_id,
                              [&](const Status& status, const StepReport&) { answer = status; });
    EXPECT_TRUE(until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }
  std::pair<std::vector<float>, std::vector<float>> moments(uint64_t session_id,
                                                            uint32_t shard_id) {
    MomentValues all = moment_values(session_id, shard_id);
    return {std::move(all.exp_avg), std::move(all.exp_avg_sq)};
  }
  MomentValues moment_values(uint64_t session_id, uint32_t shard_id, bool with_masters = false) {
    const uint64_t count = job(session_id).shards()[shard_id].element_count();
    MomentValues all;
    const auto add = [](std::vector<float>& to, const std::vector<float>& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    for (uint64_t first = 0; first < count; first += kTileElements) {
      bool answered = false;
      store_->operations().read_moments({.session_id = session_id,
                                         .shard_id = shard_id,
                                         .element_first = first,
                                         .element_count = std::min(kTileElements, count - first),
                                         .reads_masters = with_masters},
                                        [&](const Status& status, const MomentValues& values) {
                                          EXPECT_TRUE(status.is_ok()) << status.message();
                                          add(all.exp_avg, values.exp_avg);
                                          add(all.exp_avg_sq, values.exp_avg_sq);
                                          add(all.max_exp_avg_sq, values.max_exp_avg_sq);
                                          add(all.masters, values.masters);
                                          answered = true;
                                        });
      EXPECT_TRUE(until([&] { return answered; }));
    }
    return all;
  }
  /// `values`: of all its elements; they lie within one tile.
  Status write_moments(uint64_t session_id,
                       uint32_t shard_id,
                       uint64_t generation,
                       MomentValues values) {
    const uint64_t count = values.exp_avg.size();
    std::optional<Status> answer;
    store_->operations().write_moments({.session_id = session_id,
                                        .shard_id = shard_id,
                                        .element_first = 0,
                                        .element_count = count},
                                       generation,
                                       std::move(values),
                                       [&](const Status& status) { answer = status; });
    EXPECT_TRUE(until([&] { return answer.has_value(); }));
    return answer.value_or(error(StatusCode::deadline, "no answer"));
  }

  ManualClock clock;
  Status loaded;
  /// A read that failed is tried again when the test moves the clock.
  bool holds_tries_up = false;
  /// Where nothing is to be done, each lease that sleeps is tried: it has to go on sleeping.
  bool tries_sleepers = true;
  /// Called where the daemon has nothing to do: true where the machine did something then.
  std::function<bool()> when_idle;

 private:
  /// No event was lost: tried again, nobody is granted or refused, waits for anything else, or
  /// starts something.
  void expect_sleepers_wait() {
    std::set<Job*> jobs;
    for (const auto& [session_id, session] : store_->sessions()) jobs.insert(&job(session_id));
    for (Job* const job : jobs) {
      const auto reasons = [job] {
        std::map<uint64_t, std::string> all;
        job->cache().waiters().for_each([&](const LeaseWaiter& waiter) {
          all[waiter.ticket()] = job->cache().waiters().describe(waiter);
        });
        return all;
      };
      const auto before = reasons();
      if (before.empty()) continue;
      const bool was_active = job->cache().activities().any() || !job->operations().is_idle();
      job->cache().waits().wake_all();
      TurnBudget without_bound;
      job->cache().leases().advance(without_bound);
      EXPECT_EQ(reasons(), before) << "somebody sleeps whom an event should have woken";
      EXPECT_EQ(job->cache().activities().any() || !job->operations().is_idle(), was_active)
          << "somebody sleeps who would have started something";
    }
  }

  static VolumeSet volume_set(MemoryDisk& disk) {
    VolumeSet set;
    Volume volume;
    volume.path = "disk";
    volume.bytes = disk.bytes().size();
    volume.data_begin_bytes = 2_MiB;
    volume.data_end_bytes = volume.bytes - 2_MiB;
    set.superblock = newest_superblock(disk.bytes());
    set.volumes.push_back(std::move(volume));
    return set;
  }

  const bool is_hurried_;
  const SteppedClock turn_clock_;
  TurnBudget turn_budget_{turn_clock_};
  OwnedFd wake_;
  std::unique_ptr<Pool> pool_;
  DiskQueue io_;
  std::unique_ptr<Workers> workers_;
  ExtentStore extents_;
  std::unique_ptr<ShardStore> store_;
};

/// Ascending.
inline std::vector<uint64_t> dirty_keys(const PrivateTiles& tiles) {
  std::vector<uint64_t> keys;
  for (auto dirty = tiles.next_dirty(0); dirty; dirty = tiles.next_dirty(dirty->key + 1))
    keys.push_back(dirty->key);
  return keys;
}

/// Each byte of an idle job's quota, arena and private side is something's.
inline void expect_all_bytes_held(Job& job) {
  uint64_t named_bytes = 0;
  job.shards().for_each_replica([&](ReplicaPlace each) { named_bytes += each->length_bytes(); });
  EXPECT_EQ(job.space().used_bytes(), named_bytes);
  job.cache().slots().free_retired();
  uint64_t slot_bytes = 0;
  for (const Entry* const entry : job.shards().entries()) {
    if (entry == nullptr) continue;
    if (entry->slot() != nullptr) slot_bytes += align_up(entry->slot()->bytes, kBlockBytes);
    if (entry->pending() != nullptr) slot_bytes += align_up(entry->pending()->bytes, kBlockBytes);
    EXPECT_EQ(entry->task_count(), 0U);
  }
  EXPECT_EQ(job.memory()->arena().used_bytes(), slot_bytes);
  uint64_t tile_bytes = 0;
  job.tiles().for_each([&](uint64_t key, uint64_t) {
    const Bucket& bucket = job.shards().bucket(bucket_of(key));
    tile_bytes += bucket.value->replica_bytes(tile_of(key)) + bucket.rest_bytes(tile_of(key));
  });
  EXPECT_EQ(job.memory()->private_side().used_bytes(), tile_bytes);
  EXPECT_EQ(job.memory()->host_side().used_bytes(), job.kept().host_tiles().bytes());
}

}  // namespace memd::testing
