// One history of a daemon's disk, in phases that each end with a commit, and what must be there
// after any of them. Tests kill the daemon, or cut the power, anywhere in it.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arena/pool.h"
#include "base/bulk_bytes.h"
#include "base/descriptor_keeper.h"
#include "io/io_queue.h"
#include "released_memory.h"
#include "store/shard_store.h"
#include "twin.h"

namespace memd::testing {

/// A promise was broken: the process says so and ends with this status.
inline constexpr int kViolation = 1;

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::fprintf(stderr, "VIOLATION: %s\n", concat(parts...).c_str());
  std::fflush(stderr);
  _exit(kViolation);
}

enum class IoMoment : uint8_t { before_submit, after_submit, completed };

/// Shows a test each operation before it is submitted, when it is under way, and when it is done
/// but nobody has heard of it.
class TapQueue final : public IoQueue {
 public:
  using Tap = std::function<void(IoMoment, const IoRequest&)>;
  /// Without `syncs` each one is a read of a block: what is written survives a killed process in
  /// any case, and a disk takes its time for a sync.
  TapQueue(std::unique_ptr<IoQueue> inner, bool syncs, Tap tap)
      : inner_(std::move(inner)),
        tap_(std::move(tap)),
        syncs_(syncs),
        block_(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, kBlockBytes)), std::free) {}

  std::string_view name() const override { return inner_->name(); }
  uint16_t add_device(OwnedFd file, std::string path) override {
    return inner_->add_device(std::move(file), std::move(path));
  }
  void add_memory(std::span<std::byte> memory, PageKind pages) override {
    inner_->add_memory(memory, pages);
  }
  void remove_memory(std::span<std::byte> memory) override { inner_->remove_memory(memory); }
  void submit(IoRequest request) override {
    if (!tap_) return submit_inner(std::move(request));
    IoRequest seen = request;
    seen.complete = nullptr;
    tap_(IoMoment::before_submit, seen);
    request.complete = [this, seen, complete = std::move(request.complete)](const Status& status) {
      tap_(IoMoment::completed, seen);
      complete(status);
    };
    submit_inner(std::move(request));
    tap_(IoMoment::after_submit, seen);
  }
  size_t reap() override { return inner_->reap(); }
  std::vector<IoInFlight> in_flight() const override { return inner_->in_flight(); }
  IoQueueStatistics statistics() const override { return inner_->statistics(); }
  IoDeviceStatistics device_statistics(uint16_t device) const override {
    return inner_->device_statistics(device);
  }

 private:
  void submit_inner(IoRequest request) {
    if (request.kind == IoKind::sync && !syncs_) {
      request.kind = IoKind::read;
      request.data = {block_.get(), kBlockBytes};
    }
    inner_->submit(std::move(request));
  }

  const std::unique_ptr<IoQueue> inner_;
  const Tap tap_;
  const bool syncs_;
  const std::unique_ptr<std::byte, void (*)(void*)> block_;
};

/// One run of the daemon's heart over any devices, turned by hand. Needs no test framework, so that
/// it runs in forked children.
class Daemon {
 public:
  static constexpr uint64_t kSegment = 2_MiB;
  static constexpr uint64_t kFloor = kPrivateFloorBytes / kSegment;

  using MakeQueue = std::function<std::unique_ptr<IoQueue>(int wake_fd)>;
  /// `kept`: what outlived the daemon before, with a keeper.
  Daemon(VolumeSet set,
         const MakeQueue& make_queue,
         bool syncs,
         TapQueue::Tap tap = {},
         DescriptorKeeper* keeper = nullptr,
         KeptDescriptors kept = {})
      : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        io_(make_queue(wake_.get()), syncs, std::move(tap)),
        workers_(2, wake_.get()),
        extents_(io_, workers_, std::move(set), clock_) {
    auto pool = Pool::create({.bytes = 2 * (kFloor + 1) * kSegment,
                              .segment_bytes = kSegment,
                              .huge_pages = false,
                              .lock = LockMode::wanted},
                             keeper,
                             &kept);
    require(pool.is_ok(), pool.status().message());
    pool_ = std::move(pool).value();
    store_ = std::make_unique<ShardStore>(ShardStoreParts{.pool = *pool_,
                                                          .io = io_,
                                                          .extents = extents_,
                                                          .workers = workers_,
                                                          .clock = clock_,
                                                          .keeper = keeper});
    loaded = store_->load(
        [this] {
          io_.reap();
          workers_.reap();
          return Status::ok();
        },
        &kept);
    store_->operations().redo_steps();
    if (!loaded.is_ok() || keeper == nullptr) return;
    for (const KeptDescriptor& left : kept) {
      if (left.fd.is_open()) keeper->forget(left.name);
    }
    loaded = pool_->settle();
  }
  ~Daemon() {
    store_->detach_all();
    store_->give_up_waiting();
    until([this] { return store_->is_idle(); });
    store_.reset();
  }

  ShardStore& store() { return *store_; }
  ExtentStore& extents() { return extents_; }
  const Pool& pool() const { return *pool_; }

  bool turn() {
    const bool reaped = io_.reap() + workers_.reap() > 0;
    // As the server does with a dropped job's memory.
    testing::replace_released(store_->memory());
    return store_->advance() || reaped;
  }
  /// A hang is a violation; two minutes tell it from a busy machine.
  void until(const std::function<bool()>& holds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (!holds()) {
      if (turn()) continue;
      struct pollfd wake{.fd = wake_.get(), .events = POLLIN, .revents = 0};
      ::poll(&wake, 1, 1);
      uint64_t count = 0;
      [[maybe_unused]] const auto drained = ::read(wake_.get(), &count, sizeof count);
      require(std::chrono::steady_clock::now() < end, "the store hangs");
    }
  }

  uint64_t open(const std::string& name, uint64_t nvme_bytes) {
    const auto job = store_->admissions().open({.name = name,
                                                .uid = 1000,
                                                .host_bytes = (kFloor + 1) * kSegment,
                                                .nvme_bytes = nvme_bytes,
                                                .fresh = false});
    require(job.is_ok(), job.status().message());
    return job.value().job_id;
  }
  /// As the server does it: once the job has gone back to what it was before a load.
  uint64_t attach(uint64_t job_id) {
    bool has_gone_back = false;
    store_->returns_to_snapshots().when_ended(job_id, [&] { has_gone_back = true; });
    until([&] { return has_gone_back; });
    const auto session = store_->attach(job_id);
    require(session.is_ok(), session.status().message());
    return session.value()->session_id;
  }
  Job& job(uint64_t session) { return *store_->job_of(session).value(); }
  uint32_t id(uint64_t session, const std::string& name) {
    const auto found = job(session).shards().find(name);
    require(found.has_value(), "no shard ", name);
    return *found;
  }

  struct Held {
    Status status;
    LeaseGrant grant{};
    uint64_t session = 0;
  };
  std::shared_ptr<std::optional<Held>> ask(uint64_t session,
                                           const std::string& name,
                                           LeaseMode mode,
                                           Part part = Part::value) {
    auto answer = std::make_shared<std::optional<Held>>();
    store_->lease({.session_id = session,
                   .shard_id = id(session, name),
                   .part = part,
                   .mode = mode,
                   .timeout_ns = 60'000'000'000,
                   .for_service = false,
                   .prefetch = false},
                  [answer, session](const Status& status, const LeaseGrant& grant) {
                    *answer = Held{.status = status, .grant = grant, .session = session};
                  });
    return answer;
  }
  Held lease(uint64_t session,
             const std::string& name,
             LeaseMode mode = LeaseMode::read,
             Part part = Part::value) {
    const auto answer = ask(session, name, mode, part);
    until([&] { return answer->has_value(); });
    return **answer;
  }
  void release(const Held& held) {
    const auto found = store_->sessions().find(held.session);
    if (found == store_->sessions().end()) return;
    found->second->ring.add_pin(held.grant.slot->pin_first + held.grant.index, ~held.grant.pin + 1);
  }
  template <typename T>
  void write(uint64_t session,
             const std::string& name,
             const std::vector<T>& values,
             Part part = Part::value,
             LeaseMode mode = LeaseMode::overwrite) {
    const Held held = lease(session, name, mode, part);
    require(held.status.is_ok(), held.status.message());
    require(held.grant.length_bytes == values.size() * sizeof(T), "length of ", name);
    std::memcpy(held.grant.data, values.data(), held.grant.length_bytes);
    release(held);
  }
  Result<std::string> read(uint64_t session, const std::string& name) {
    const Held held = lease(session, name);
    if (!held.status.is_ok()) return held.status;
    std::string bytes(reinterpret_cast<const char*>(held.grant.data), held.grant.length_bytes);
    release(held);
    return bytes;
  }
  Result<std::string> moments(uint64_t session, const std::string& name) {
    std::optional<Status> answer;
    std::string bytes;
    const uint32_t shard = id(session, name);
    store_->operations().read_moments(
        {.session_id = session,
         .shard_id = shard,
         .element_first = 0,
         .element_count = job(session).shards()[shard].element_count()},
        [&](const Status& status, const MomentValues& values) {
          answer = status;
          for (const auto* const part :
               {&values.exp_avg, &values.exp_avg_sq, &values.max_exp_avg_sq})
            bytes.append(reinterpret_cast<const char*>(part->data()), part->size() * 4);
        });
    until([&] { return answer.has_value(); });
    if (!answer->is_ok()) return *answer;
    return bytes;
  }
  Status step(const StepRequest& request) {
    std::optional<Status> answer;
    store_->operations().step(request,
                              [&](const Status& status, const StepReport&) { answer = status; });
    until([&] { return answer.has_value(); });
    return *answer;
  }
  Status sync(uint64_t session) {
    std::optional<Status> answer;
    store_->operations().sync(session,
                              [&](const Status& status, const StepReport&) { answer = status; });
    until([&] { return answer.has_value(); });
    return *answer;
  }
  void detach(uint64_t session) {
    const auto detached = store_->detach(session);
    require(detached.is_ok(), detached.status().message());
  }

  Status loaded;

 private:
  const OwnedFd wake_;
  const SteadyClock clock_;
  std::unique_ptr<Pool> pool_;
  TapQueue io_;
  Workers workers_;
  ExtentStore extents_;
  std::unique_ptr<ShardStore> store_;
};

// ---- The history --------------------------------------------------------------------------------

inline constexpr uint64_t kWeights = 24'000;  // fp32, with kBias in one bucket
inline constexpr uint64_t kBias = 3'000;
inline constexpr uint64_t kHalves = 20'000;  // bf16
inline constexpr uint64_t kBlob = 120'000;
inline constexpr uint64_t kBuffer = 5'000;
/// Held while gradients are written, so that they find no room and are spilled.
inline constexpr uint64_t kBallast = 1'880'000;
inline constexpr uint64_t kJobDisk = 11_MiB;
inline constexpr uint64_t kOtherDisk = 512_KiB;

inline uint32_t gradient_seed(Daemon& daemon, uint64_t session) {
  return static_cast<uint32_t>(daemon.job(session).progress().committed_step()) * 10 + 50;
}

/// All of it is updated before the step is closed; then a gradient changes, and of one bucket it
/// was in vain.
inline void update_early(Daemon& daemon, const StepRequest& request) {
  const uint64_t session = request.session_id;
  const auto seed = gradient_seed(daemon, session);
  const Status expected = daemon.store().gradients().expect_step(session, request.groups);
  require(expected.is_ok(), expected.message());
  for (const StepGroup& group : request.groups) {
    for (const uint32_t id : group.shard_ids) daemon.store().gradients().is_final(session, id);
  }
  Job& job = daemon.job(session);
  daemon.until(
      [&] { return !job.state().early().has_waiting() && !job.cache().activities().any(); });
  require(job.state().early().bucket_count() == 2,
          "buckets made early: ",
          job.state().early().bucket_count());
  daemon.write(session, "b", numbers(kBias, seed + 1), Part::gradient, LeaseMode::write);
  require(job.state().early().bucket_count() == 1, "what was made with another gradient");
}

/// Maxima that an update keeps, and others that it replaces.
inline std::vector<float> large_and_small(uint64_t count) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = i % 2 == 0 ? 9.0F : 0.0F;
  return values;
}

/// A `full` step spills its gradients and replaces a buffer, whose old bytes are free after the
/// commit that follows; after another one the disk holds nothing that no catalogue names.
inline StepRequest backward(Daemon& daemon, uint64_t session, bool full) {
  const uint32_t seed = gradient_seed(daemon, session);
  std::optional<Daemon::Held> ballast;
  if (full) {
    ballast = daemon.lease(session, "ballast");
    require(ballast->status.is_ok(), ballast->status.message());
  }
  daemon.write(session, "w", numbers(kWeights, seed), Part::gradient);
  daemon.write(session, "b", numbers(kBias, seed + 1), Part::gradient, LeaseMode::write);
  daemon.write(session, "h", halves(kHalves, seed + 2), Part::gradient);
  daemon.write(session, "blob", pattern(kBlob, static_cast<uint8_t>(seed + 3)));
  if (full) daemon.write(session, "staged", pattern(kBuffer, static_cast<uint8_t>(seed + 4)));
  if (ballast) daemon.release(*ballast);
  StepRequest request;
  request.session_id = session;
  const uint32_t weights_id = daemon.id(session, "w");
  // Once its moments have a maximum.
  const bool amsgrad = daemon.job(session).shards()[weights_id].keeps_maximum;
  request.groups = {{.settings = {.lr = 1e-2, .amsgrad = amsgrad}, .shard_ids = {weights_id}},
                    {.settings = {.lr = 1e-2}, .shard_ids = {daemon.id(session, "b")}},
                    {.settings = {.lr = 1e-3}, .shard_ids = {daemon.id(session, "h")}}};
  if (full) {
    request.staged_buffers = {{daemon.id(session, "staged"), daemon.id(session, "buffer")}};
  }
  return request;
}

inline void do_step(Daemon& daemon, uint64_t session, bool full) {
  const StepRequest request = backward(daemon, session, full);
  update_early(daemon, request);
  const Status status = daemon.step(request);
  require(status.is_ok(), status.message());
}

inline void make_snapshot(Daemon& daemon, uint64_t job_id, const std::string& name) {
  std::optional<Status> made;
  daemon.store().snapshots().create(
      {.job_id = job_id, .name = name, .number = 1},
      [&](const Result<SnapshotInfo>& answer) { made = answer.status(); });
  daemon.until([&] { return made.has_value(); });
  require(made->is_ok(), made->message());
}

inline void write_moments(Daemon& daemon, uint64_t session, uint32_t seed) {
  std::optional<Status> moved;
  daemon.store().operations().write_moments({.session_id = session,
                                             .shard_id = daemon.id(session, "w"),
                                             .element_first = 0,
                                             .element_count = kWeights},
                                            7,
                                            {.exp_avg = numbers(kWeights, seed),
                                             .exp_avg_sq = std::vector<float>(kWeights, 0.25F),
                                             .max_exp_avg_sq = large_and_small(kWeights)},
                                            [&](const Status& status) { moved = status; });
  daemon.until([&] { return moved.has_value(); });
  require(moved->is_ok(), moved->message());
}

/// All of a load but its end; a part is committed half-way.
inline void load(Daemon& daemon, uint64_t session, const std::string& name, uint32_t seed) {
  std::optional<Status> made;
  daemon.store().snapshots().create(
      {.job_id = daemon.job(session).job_id(), .name = name, .number = seed, .session_id = session},
      [&](const Result<SnapshotInfo>& answer) { made = answer.status(); });
  daemon.until([&] { return made.has_value(); });
  require(made->is_ok(), made->message());
  daemon.write(session, "w", numbers(kWeights, seed));
  daemon.write(session, "h", halves(kHalves, seed + 1));
  const Status synced = daemon.sync(session);
  require(synced.is_ok(), synced.message());
  daemon.write(session, "b", numbers(kBias, seed + 2));
  daemon.write(session, "blob", pattern(kBlob, static_cast<uint8_t>(seed + 3)));
  write_moments(daemon, session, seed + 4);
}

/// One that breaks off, and one that counts.
inline void load_twice(Daemon& daemon, uint64_t job_id, uint64_t session) {
  load(daemon, session, "load/20261126T092228Z-0123456789ab", 40);
  daemon.detach(session);
  const uint64_t next = daemon.attach(job_id);
  const std::string name = "load/20261126T092229Z-0123456789ab";
  load(daemon, next, name, 60);
  std::optional<Status> ended;
  daemon.store().snapshots().end_load(next, name, [&](const Status& status) { ended = status; });
  daemon.until([&] { return ended.has_value(); });
  require(ended->is_ok(), ended->message());
  daemon.detach(next);
}

/// A trainer has a session for each phase. Every phase starts from what is on disk after the one
/// before, in the same daemon or in another.
inline constexpr size_t kPhaseCount = 12;
inline constexpr size_t kLoadPhase = 10;
inline constexpr size_t kFirstKilledPhase = 3;  // an earlier step is committed by then
inline void run_phase(Daemon& daemon, size_t phase) {
  const bool on_other = phase == 1;
  const uint64_t job_id =
      on_other ? daemon.open("other", kOtherDisk) : daemon.open("job", kJobDisk);
  const uint64_t session = daemon.attach(job_id);
  const auto synced = [&] {
    const Status status = daemon.sync(session);
    require(status.is_ok(), status.message());
  };
  const auto declare = [&](const std::vector<ShardSpec>& specs) {
    const auto infos = daemon.store().declare(session, specs);
    require(infos.is_ok(), infos.status().message());
  };
  switch (phase) {
    case 0:
      declare({parameter("w", kWeights),
               parameter("b", kBias),
               parameter("h", kHalves, DType::bfloat16),
               bytes_shard("blob", kBlob),
               bytes_shard("extra", kBlob),
               bytes_shard("ballast", kBallast),
               bytes_shard("buffer", kBuffer, ShardKind::buffer),
               bytes_shard("staged", kBuffer, ShardKind::buffer)});
      daemon.write(session, "w", numbers(kWeights, 1));
      daemon.write(session, "b", numbers(kBias, 2));
      daemon.write(session, "h", halves(kHalves, 3));
      daemon.write(session, "blob", pattern(kBlob, 4));
      daemon.write(session, "extra", pattern(kBlob, 5));
      daemon.write(session, "buffer", pattern(kBuffer, 6));
      daemon.write(session, "ballast", pattern(kBallast, 7));
      synced();
      break;
    case 1:
      declare({bytes_shard("theirs", 50'000)});
      daemon.write(session, "theirs", pattern(50'000, 8));
      make_snapshot(daemon, job_id, "goes with its job");
      break;
    case 4:
      make_snapshot(daemon, job_id, "kept");
      break;
    case 3: {  // what is put outside of steps
      const auto reader = daemon.lease(session, "b");
      daemon.write(session, "b", numbers(kBias, 20), Part::value, LeaseMode::write);
      daemon.release(reader);
      daemon.write(session, "h", halves(kHalves, 21), Part::value, LeaseMode::write);
      daemon.write(session, "blob", pattern(kBlob, 22), Part::value, LeaseMode::write);
      write_moments(daemon, session, 23);
      require(daemon.moments(session, "w").is_ok(), "moments that were written");
      synced();
      break;
    }
    case 2:
    case 11:
      do_step(daemon, session, false);
      break;
    case kLoadPhase:
      return load_twice(daemon, job_id, session);
    case 5:
      do_step(daemon, session, true);
      break;
    case 8: {
      daemon.detach(session);
      std::optional<Status> restored;
      daemon.store().snapshots().restore(
          job_id, "kept", [&](const Result<SnapshotInfo>& answer) { restored = answer.status(); });
      daemon.until([&] { return restored.has_value(); });
      require(restored->is_ok(), restored->message());
      return;
    }
    case 9: {
      std::optional<Status> dropped;
      daemon.store().snapshots().drop(
          job_id, "kept", [&](const Status& status) { dropped = status; });
      daemon.until([&] { return dropped.has_value(); });
      require(dropped->is_ok(), dropped->message());
      break;
    }
    case 6: {
      // Where memory outlived a daemon that was killed here, it may be gone already.
      if (daemon.job(session).shards().find("extra").has_value()) {
        std::optional<bool> removed;
        daemon.store().delete_shard(
            session, "extra", [&](const Result<bool>& result) { removed = result.is_ok(); });
        daemon.until([&] { return removed.has_value(); });
        require(*removed, "a blob was not deleted");
      }
      declare({bytes_shard("late", kBlob)});  // with the id of the other one
      daemon.write(session, "late", pattern(kBlob, 30));
      daemon.job(session).durable().note_change();
      synced();
      break;
    }
    case 7: {
      const auto other = daemon.store().reports().find_job("other");
      require(other.is_ok(), "there is no other job");
      std::optional<Status> dropped;
      daemon.store().drop_job(
          other.value().job_id, true, [&](const Status& status) { dropped = status; });
      daemon.until([&] { return dropped.has_value(); });
      require(dropped->is_ok(), dropped->message());
      break;
    }
    default:
      require(false, "no such phase");
  }
  daemon.detach(session);
}

/// Everything that the daemon holds, bit for bit, as one string; a read that fails is its reason.
/// `parts`: the bytes of each shard that has some, and the lines that begin a job.
inline Result<std::string> state_of(Daemon& daemon,
                                    std::map<std::string, std::string>* parts = nullptr) {
  std::string out;
  for (const JobInfo& info : daemon.store().reports().jobs()) {
    const uint64_t session = daemon.attach(info.job_id);
    std::string title = concat(
        "job ", info.name, " at step ", daemon.job(session).progress().committed_step(), ":\n");
    const auto snapshots = daemon.store().snapshots().list(info.job_id);
    require(snapshots.is_ok(), snapshots.status().message());
    for (const SnapshotInfo& each : snapshots.value()) {
      title += concat("snapshot ", each.name, " of step ", each.step, ", ", each.bytes, " bytes\n");
    }
    out += title;
    if (parts != nullptr) (*parts)[concat(info.name, "/")] = title;
    std::map<std::string, ShardInfo> sorted;
    const auto shards = daemon.store().reports().shards(info.job_id);
    for (const ShardInfo& shard : shards.value()) sorted[shard.spec.name] = shard;
    for (const auto& [name, shard] : sorted) {
      out += concat(name, " ", shard.generation, shard.written ? "" : " unwritten", "\n");
      if (!shard.written) continue;
      const auto bytes = daemon.read(session, name);
      if (!bytes.is_ok()) return bytes.status();
      std::string part = bytes.value();
      if (shard.spec.kind == ShardKind::parameter) {
        const auto moments = daemon.moments(session, name);
        if (!moments.is_ok()) return moments.status();
        part += moments.value();
      }
      out += part;
      if (parts != nullptr) (*parts)[concat(info.name, "/", name)] = std::move(part);
    }
    daemon.detach(session);
  }
  return out;
}

/// What the newest superblock of `volume` leads to: every extent intact, and once, whether a job or
/// its snapshots or all of them name it.
struct NamedExtents {
  uint64_t state_bytes = 0;  // of jobs; their quota counts these
  std::vector<ExtentRecord> all;
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const ExtentRecord& extent : all) sum += extent.length_bytes;
    return sum;
  }
};
inline NamedExtents named_extents(std::span<const std::byte> volume) {
  end_turns();  // what a test reads is no turn of a store
  NamedExtents named;
  const auto superblock = memd::newest_superblock(
      volume.size(), "volume", [volume](std::span<std::byte> block, uint64_t offset_bytes) {
        std::memcpy(block.data(), volume.data() + offset_bytes, block.size());
        return Status::ok();
      });
  require(superblock.is_ok(), superblock.status().message());
  if (superblock.value().root_bytes == 0) return named;
  std::set<std::tuple<uint64_t, uint64_t, uint64_t>> kept;  // by the snapshots of one job
  const auto take = [&](const ExtentRecord& extent, bool is_of_snapshot) {
    if (!extent.exists()) return;
    require(ExtentStore::matches(extent,
                                 volume.subspan(extent.address.offset_bytes, extent.length_bytes)),
            "an extent that the catalogue names is not what was written, at ",
            extent.address.offset_bytes);
    const std::tuple key(extent.address.offset_bytes, extent.length_bytes, extent.checksum);
    const bool is_shared = kept.contains(key);
    if (is_of_snapshot) kept.insert(key);
    if (!is_shared) named.all.push_back(extent);
  };
  const auto record =
      [&](const std::vector<ExtentRecord>& extents, uint64_t length_bytes, bool is_of_snapshot) {
        std::vector<std::byte> bytes;
        for (const ExtentRecord& extent : extents) {
          take(extent, is_of_snapshot);
          const auto part = volume.subspan(extent.address.offset_bytes, extent.length_bytes);
          bytes.insert(bytes.end(), part.begin(), part.end());
        }
        bytes.resize(length_bytes);
        return bytes;
      };
  const auto take_job = [&](const RootEntry& entry, bool is_of_snapshot) {
    const auto job = decode_job(record(entry.catalogue, entry.catalogue_bytes, is_of_snapshot));
    require(job.is_ok(), job.status().message());
    for (const ExtentRecord& extent : all_extents(job.value())) {
      if (!is_of_snapshot) named.state_bytes += extent.length_bytes;
      take(extent, is_of_snapshot);
    }
  };
  const auto root =
      decode_root(record({superblock.value().root}, superblock.value().root_bytes, false));
  require(root.is_ok(), root.status().message());
  for (const RootEntry& entry : root.value().jobs) {
    kept.clear();
    for (const SnapshotEntry& snapshot : root.value().snapshots) {
      if (snapshot.job.job_id == entry.job_id) take_job(snapshot.job, true);
    }
    take_job(entry, false);
  }
  std::sort(named.all.begin(), named.all.end(), [](const ExtentRecord& a, const ExtentRecord& b) {
    return a.address.offset_bytes < b.address.offset_bytes;
  });
  for (size_t i = 1; i < named.all.size(); ++i) {
    require(named.all[i - 1].address.offset_bytes + named.all[i - 1].length_bytes <=
                named.all[i].address.offset_bytes,
            "two owners of the bytes at ",
            named.all[i].address.offset_bytes);
  }
  return named;
}

/// Nothing but what the disk names is taken, in all and of the jobs' quotas.
inline void check_accounts(Daemon& daemon, std::span<const std::byte> volume) {
  const NamedExtents named = named_extents(volume);
  const uint64_t taken_bytes = daemon.extents().capacity_bytes() - daemon.extents().free_bytes();
  require(taken_bytes == named.bytes(), "leaked: ", taken_bytes, " != ", named.bytes());
  uint64_t used_bytes = 0;
  for (const JobInfo& info : daemon.store().reports().jobs()) used_bytes += info.nvme_bytes_used;
  require(used_bytes == named.state_bytes, "quota: ", used_bytes, " != ", named.state_bytes);
}

/// Nothing is leaked of memory: slots of arenas are of entries, segments are of jobs or free.
inline void check_memory(Daemon& daemon) {
  daemon.until([&] { return daemon.store().is_idle(); });
  while (daemon.turn()) {
  }
  uint64_t segments = daemon.pool().segment_count_free();
  for (const JobInfo& info : daemon.store().reports().jobs()) {
    const uint64_t session = daemon.attach(info.job_id);
    Job& job = daemon.job(session);
    job.cache().slots().free_retired();
    require(job.cache().slots().lease_count() == 0,
            "leases of nobody: ",
            job.cache().slots().lease_count());
    uint64_t slot_bytes = 0;
    for (Entry* const entry : job.shards().entries()) {
      if (entry == nullptr) continue;
      require(
          entry->pending() == nullptr, "bytes of nobody wait for ", job.shards().describe(*entry));
      if (entry->slot() != nullptr) slot_bytes += align_up(entry->slot()->bytes, kBlockBytes);
    }
    for (const auto& slot : job.cache().slots().retired())
      slot_bytes += align_up(slot->bytes, kBlockBytes);
    require(slot_bytes == job.memory()->arena().used_bytes(),
            "slots: ",
            slot_bytes,
            " != ",
            job.memory()->arena().used_bytes());
    segments += job.memory()->bytes() / daemon.pool().segment_bytes();
    daemon.detach(session);
  }
  const uint64_t all = daemon.pool().report().bytes / daemon.pool().segment_bytes();
  require(segments == all,
          "segments: ",
          daemon.pool().segment_count_free(),
          " free, in all ",
          segments,
          " != ",
          all,
          ", jobs ",
          daemon.store().reports().jobs().size());
}

}  // namespace memd::testing
