#include "powercut/recording.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "io/memory_queue.h"
#include "powercut/runner.h"
#include "powercut/volumes.h"
#include "powercut/workload.h"

namespace memd::powercut {
namespace {

constexpr uint64_t kDeviceBytes = 16_MiB;
constexpr uint64_t kDataBytes = 6_MiB;
// Beside a first state of some 40 KiB, which doubles with the moments: room for a second one and
// little more. With 144 KiB one seed of twelve found no 16 KiB in one piece among 52 free ones.
constexpr uint64_t kFreeBytes = 176_KiB;
constexpr uint64_t kFreeBytesWithSnapshots = 336_KiB;

/// When a daemon is killed: at the `event_count`-th of its events from now on, or with the
/// `superblock_count`-th copy of a superblock in the drive's cache.
struct KillPoint {
  uint64_t event_count = 0;  // 0: never
  uint64_t superblock_count = 0;
};

/// Devices in memory that complete in a random order, and a list of what they were told until the
/// daemon is killed. What it does after that never happened.
class RecordingQueue final : public IoQueue {
 public:
  RecordingQueue(Recording& recording, std::vector<std::byte> image, int wake_fd)
      : recording_(recording),
        visible_(std::move(image)),
        queue_({.depth = 32, .wake_fd = wake_fd, .automatic = true, .order_seed = recording.seed}) {
  }

  std::string_view name() const override { return queue_.name(); }
  uint16_t add_device(OwnedFd, std::string path) override {
    const uint64_t device_bytes = recording_.geometry.device_bytes;
    auto disk = std::make_shared<MemoryDisk>(device_bytes);
    const auto bytes = std::span(visible_).subspan(device_count_++ * device_bytes, device_bytes);
    std::copy(bytes.begin(), bytes.end(), disk->bytes().begin());
    return queue_.add_disk(std::move(disk), std::move(path));
  }
  void add_memory(std::span<std::byte> memory, PageKind pages) override {
    queue_.add_memory(memory, pages);
  }
  void remove_memory(std::span<std::byte> memory) override { queue_.remove_memory(memory); }
  void submit(IoRequest request) override {
    if (request.kind == IoKind::write) watch_write(request);
    if (request.kind == IoKind::sync) watch_sync(request);
    queue_.submit(std::move(request));
  }
  size_t reap() override { return queue_.reap(); }
  std::vector<IoInFlight> in_flight() const override { return queue_.in_flight(); }
  IoQueueStatistics statistics() const override { return queue_.statistics(); }
  IoDeviceStatistics device_statistics(uint16_t device) const override {
    return queue_.device_statistics(device);
  }

  void kill_at(const KillPoint& point) { kill_point_ = point; }
  bool is_killed() const { return killed_; }
  /// Of what is in flight any part reaches the drive's cache, and the rest never will.
  void kill(std::mt19937_64& random) {
    killed_ = true;
    for (const uint64_t index : in_flight_) {
      const bool reached = random() % 2 == 0;
      if (reached) show(index);
      recording_.events.push_back(
          {reached ? EventKind::write_completed : EventKind::write_dropped, index});
    }
    in_flight_.clear();
  }
  /// What the next daemon reads.
  const std::vector<std::byte>& visible() const { return visible_; }

 private:
  void watch_write(IoRequest& request) {
    if (killed_) return;
    const uint64_t index = recording_.writes.size();
    recording_.writes.push_back(
        {.begin_bytes = request.device * recording_.geometry.device_bytes + request.offset_bytes,
         .bytes = {request.data.begin(), request.data.end()}});
    in_flight_.insert(index);
    add({EventKind::write_submitted, index});
    request.complete = [this, index, data = request.data, complete = std::move(request.complete)](
                           const Status& status) {
      MEMD_CHECK(status.is_ok());
      if (!killed_) {
        const RecordedWrite& write = recording_.writes[index];
        if (!std::equal(data.begin(), data.end(), write.bytes.begin())) {
          recording_.fault =
              concat("the bytes of write ", index, " changed while it was in flight");
        }
        in_flight_.erase(index);
        show(index);
        superblock_count_ += data.size() == kSuperblockBytes && is_superblock(write);
        add({EventKind::write_completed, index});
      }
      complete(status);
    };
  }
  void watch_sync(IoRequest& request) {
    if (killed_) return;
    const uint64_t index = recording_.sync_devices.size();
    recording_.sync_devices.push_back(request.device);
    add({EventKind::sync_submitted, index});
    request.complete = [this, index, complete = std::move(request.complete)](const Status& status) {
      MEMD_CHECK(status.is_ok());
      if (!killed_) add({EventKind::sync_completed, index});
      complete(status);
    };
  }
  void add(const Event& event) {
    recording_.events.push_back(event);
    if (kill_point_.superblock_count > 0) {
      if (superblock_count_ == kill_point_.superblock_count) killed_ = true;
    } else if (kill_point_.event_count > 0) {
      killed_ = --kill_point_.event_count == 0;
    }
  }
  void show(uint64_t index) {
    const RecordedWrite& write = recording_.writes[index];
    std::memcpy(visible_.data() + write.begin_bytes, write.bytes.data(), write.bytes.size());
  }
  bool is_superblock(const RecordedWrite& write) const {
    const uint64_t device_bytes = recording_.geometry.device_bytes;
    for (const uint64_t sequence : {0, 1}) {
      for (const uint64_t offset : superblock_pair_offsets(sequence, device_bytes)) {
        if (write.begin_bytes % device_bytes == offset) return true;
      }
    }
    return false;
  }

  Recording& recording_;
  std::vector<std::byte> visible_;  // with what has completed
  MemoryQueue queue_;
  uint64_t device_count_ = 0;
  std::set<uint64_t> in_flight_;  // writes
  KillPoint kill_point_;
  uint64_t superblock_count_ = 0;  // copies that completed
  bool killed_ = false;
};

/// One run of the daemon: it flushes, reads and begins, as VolumeSet::open does.
class RecordedDaemon {
 public:
  /// `taken`: as of Runner.
  RecordedDaemon(Recording& recording,
                 std::vector<std::byte> image,
                 const std::vector<ExtentRecord>& taken)
      : recording_(recording),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        queue_(recording, std::move(image), wake_.get()),
        runner_(queue_, wake_.get(), opened(recording, queue_.visible()), taken) {
    MEMD_CHECK(runner_.loaded().is_ok());
  }
  ~RecordedDaemon() {
    for (const JobStatistics& job : runner_.store().reports().statistics().jobs) {
      recording_.early_adopted += job.counters.early_tiles_adopted;
      for (const uint64_t count : job.counters.early_tiles_discarded)
        recording_.early_discarded += count;
    }
  }
  RecordedDaemon(const RecordedDaemon&) = delete;
  RecordedDaemon& operator=(const RecordedDaemon&) = delete;

  RecordingQueue& queue() { return queue_; }
  Runner& runner() { return runner_; }

 private:
  static VolumeSet opened(Recording& recording, std::span<const std::byte> image) {
    auto set = volumes_of(image, recording.geometry, [&recording](uint16_t device) {
      const uint64_t index = recording.sync_devices.size();
      recording.sync_devices.push_back(device);
      recording.events.push_back({EventKind::sync_submitted, index});
      recording.events.push_back({EventKind::sync_completed, index});
    });
    MEMD_CHECK(set.is_ok());
    return std::move(set).value();
  }

  Recording& recording_;
  const OwnedFd wake_;
  RecordingQueue queue_;
  Runner runner_;
};

/// A workload that runs, and what may be found of it at each moment.
class Recorder {
 public:
  Recorder(Recording& recording, const RecordOptions& options)
      : recording_(recording),
        options_(options),
        workload_(recording.seed,
                  {.beside = true,
                   .early = options.early,
                   .snapshots = options.snapshots,
                   .host = options.host,
                   .loads = options.loads}),
        random_(recording.seed * 31 + 7) {
    start(recording.formatted);
  }

  void run(uint64_t operation_count) {
    for (uint64_t operation = 1; operation <= operation_count; ++operation) {
      if (!run_one(operation)) return;
      if (taken_.empty() && workload_.operation_count() > 0) {
        taken_ = daemon_->runner().leave_free(
            options_.snapshots || options_.loads ? kFreeBytesWithSnapshots : kFreeBytes);
      }
    }
    daemon_.reset();
  }

 private:
  void start(std::vector<std::byte> image) {
    daemon_ = std::make_unique<RecordedDaemon>(recording_, std::move(image), taken_);
  }
  uint64_t add_state(const SetState& state) {
    recording_.states.push_back(state);
    return uint64_t{recording_.states.size() - 1};
  }
  void accept(uint64_t operation, std::vector<uint64_t> states) {
    recording_.events.push_back({EventKind::acceptance, recording_.acceptances.size()});
    recording_.acceptances.push_back({.operation = operation, .states = std::move(states)});
  }

  bool run_one(uint64_t operation) {
    const uint64_t before = recording_.acceptances.back().states.front();
    const auto halves = workload_.next_halves();
    Workload after = workload_;
    after.skip();
    const uint64_t after_state = add_state(after.expected());
    Workload::Watch watch;
    bool half_done = false;
    if (halves) {
      const uint64_t stepped = add_state(halves->stepped);
      const uint64_t synced = add_state(halves->synced);
      const auto acknowledge = [this, &half_done, operation, after_state](uint64_t half) {
        if (!std::exchange(half_done, true)) accept(operation, {half, after_state});
      };
      watch.stepped = [acknowledge, stepped] { acknowledge(stepped); };
      watch.synced = [acknowledge, synced] { acknowledge(synced); };
      accept(operation, {before, stepped, synced, after_state});
    } else if (const auto between = workload_.next_between()) {
      const uint64_t written = add_state(*between);
      watch.written = [this, operation, written, after_state] {
        accept(operation, {written, after_state});
      };
      accept(operation, {before, written, after_state});
    } else {
      accept(operation, {before, after_state});
    }
    const bool restarts = options_.restarts && !halves && random_() % 2 == 0;
    if (restarts) daemon_->queue().kill_at(random_kill_point());
    const uint64_t event_first = recording_.events.size();
    Workload running = workload_;
    const Status status = running.run(daemon_->runner(), watch);
    if (!status.is_ok()) {
      recording_.fault = concat("operation ", operation, ": ", status.message());
      return false;
    }
    if (!daemon_->queue().is_killed()) {
      event_count_ = recording_.events.size() - event_first;
      accept(operation, {after_state});
    }
    if (restarts) return restart(operation, before, after_state);
    workload_.skip();
    recording_.older_snapshot_count += workload_.leaves_older_snapshot() ? 1 : 0;
    return true;
  }

  /// Half of them where it hurts: a superblock is in the drive's cache and not yet flushed.
  KillPoint random_kill_point() {
    if (random_() % 2 == 0) return {.event_count = 0, .superblock_count = 1 + random_() % 2};
    return {.event_count = 1 + random_() % event_count_, .superblock_count = 0};
  }

  bool restart(uint64_t operation, uint64_t before, uint64_t after_state) {
    daemon_->queue().kill(random_);
    const std::vector<std::byte> image = daemon_->queue().visible();
    daemon_.reset();
    ++recording_.restart_count;
    start(image);
    const Recovered found = recover(image, recording_.geometry);
    const uint64_t got = digest(found.state);
    const bool is_after = got == digest(recording_.states[after_state]);
    if (!found.status.is_ok() || (!is_after && got != digest(recording_.states[before]))) {
      recording_.fault = concat("operation ", operation, ": a restart found neither state");
      return false;
    }
    const bool was_acknowledged = recording_.acceptances.back().states.size() == 1;
    recording_.found_after_count += is_after && !was_acknowledged;
    if (is_after) workload_.skip();
    accept(operation, {is_after ? after_state : before});
    return true;
  }

  Recording& recording_;
  const RecordOptions options_;
  Workload workload_;
  std::mt19937_64 random_;
  std::vector<ExtentRecord> taken_;  // so that little is free
  uint64_t event_count_ = 16;        // of the last operation that was not cut off
  std::unique_ptr<RecordedDaemon> daemon_;
};

}  // namespace

std::vector<std::byte> Recording::image() const {
  std::set<uint64_t> dropped;
  for (const Event& event : events) {
    if (event.kind == EventKind::write_dropped) dropped.insert(event.index);
  }
  std::vector<std::byte> image = formatted;
  for (size_t i = 0; i < writes.size(); ++i) {
    if (dropped.contains(i)) continue;
    const RecordedWrite& write = writes[i];
    std::memcpy(image.data() + write.begin_bytes, write.bytes.data(), write.bytes.size());
  }
  return image;
}

Recording record(uint64_t seed, uint64_t operation_count, const RecordOptions& options) {
  Recording recording;
  recording.seed = seed;
  recording.has_host_tier = options.host;
  recording.has_loads = options.loads;
  recording.geometry.device_count = static_cast<uint16_t>(1 + seed % 2);
  recording.geometry.device_bytes = kDeviceBytes;
  recording.geometry.data_bytes = kDataBytes / recording.geometry.device_count;
  recording.formatted = format_image(recording.geometry);
  recording.states.emplace_back();
  recording.acceptances.push_back({.operation = 0, .states = {0}});
  Recorder(recording, options).run(operation_count);
  return recording;
}

}  // namespace memd::powercut
