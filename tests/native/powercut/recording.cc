#include "powercut/recording.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <memory>
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
// little more.
constexpr uint64_t kFreeBytes = 144_KiB;

/// Devices in memory that complete in a random order, and a list of what they were told.
class RecordingQueue final : public IoQueue {
 public:
  RecordingQueue(Recording& recording, int wake_fd)
      : recording_(recording),
        queue_({.depth = 32, .wake_fd = wake_fd, .automatic = true, .order_seed = recording.seed}) {
  }

  std::string_view name() const override { return queue_.name(); }
  uint16_t add_device(OwnedFd, std::string path) override {
    const uint64_t device_bytes = recording_.geometry.device_bytes;
    auto disk = std::make_shared<MemoryDisk>(device_bytes);
    const auto formatted =
        std::span(recording_.formatted).subspan(device_count_++ * device_bytes, device_bytes);
    std::copy(formatted.begin(), formatted.end(), disk->bytes().begin());
    return queue_.add_disk(std::move(disk), std::move(path));
  }
  void add_memory(std::span<std::byte> memory) override { queue_.add_memory(memory); }
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

 private:
  void watch_write(IoRequest& request) {
    const uint64_t index = recording_.writes.size();
    recording_.writes.push_back(
        {.begin_bytes = request.device * recording_.geometry.device_bytes + request.offset_bytes,
         .bytes = {request.data.begin(), request.data.end()}});
    recording_.events.push_back({EventKind::write_submitted, index});
    request.complete = [this, index, data = request.data, complete = std::move(request.complete)](
                           const Status& status) {
      MEMD_CHECK(status.is_ok());
      if (!std::equal(data.begin(), data.end(), recording_.writes[index].bytes.begin())) {
        recording_.fault = concat("the bytes of write ", index, " changed while it was in flight");
      }
      recording_.events.push_back({EventKind::write_completed, index});
      complete(status);
    };
  }
  void watch_sync(IoRequest& request) {
    const uint64_t index = recording_.sync_devices.size();
    recording_.sync_devices.push_back(request.device);
    recording_.events.push_back({EventKind::sync_submitted, index});
    request.complete = [this, index, complete = std::move(request.complete)](const Status& status) {
      MEMD_CHECK(status.is_ok());
      recording_.events.push_back({EventKind::sync_completed, index});
      complete(status);
    };
  }

  Recording& recording_;
  MemoryQueue queue_;
  uint64_t device_count_ = 0;
};

}  // namespace

std::vector<std::byte> Recording::image() const {
  std::vector<std::byte> image = formatted;
  for (const RecordedWrite& write : writes) {
    std::memcpy(image.data() + write.begin_bytes, write.bytes.data(), write.bytes.size());
  }
  return image;
}

Recording record(uint64_t seed, uint64_t operation_count, bool early) {
  Recording recording;
  recording.seed = seed;
  recording.geometry.device_count = static_cast<uint16_t>(1 + seed % 2);
  recording.geometry.device_bytes = kDeviceBytes;
  recording.geometry.data_bytes = kDataBytes / recording.geometry.device_count;
  recording.formatted = format_image(recording.geometry);
  recording.states.emplace_back();
  recording.acceptances.push_back({.operation = 0, .states = {0}});

  const OwnedFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  RecordingQueue queue(recording, wake.get());
  auto set = volumes_of(recording.formatted, recording.geometry);
  MEMD_CHECK(set.is_ok());
  Runner runner(queue, wake.get(), std::move(set).value());
  MEMD_CHECK(runner.loaded().is_ok());
  Workload workload(seed, {.beside = true, .early = early});
  const auto add_state = [&](const SetState& state) {
    recording.states.push_back(state);
    return uint64_t{recording.states.size() - 1};
  };
  const auto accept = [&](uint64_t operation, std::vector<uint64_t> states) {
    recording.events.push_back({EventKind::acceptance, recording.acceptances.size()});
    recording.acceptances.push_back({.operation = operation, .states = std::move(states)});
  };
  for (uint64_t operation = 1; operation <= operation_count; ++operation) {
    const uint64_t before = recording.acceptances.back().states.front();
    const auto halves = workload.next_halves();
    Workload ahead = workload;
    ahead.skip();
    const uint64_t after = add_state(ahead.expected());
    Workload::Watch watch;
    bool half_done = false;
    if (halves) {
      const uint64_t stepped = add_state(halves->stepped);
      const uint64_t synced = add_state(halves->synced);
      const auto acknowledge = [&accept, &half_done, operation, after](uint64_t half) {
        if (!std::exchange(half_done, true)) accept(operation, {half, after});
      };
      watch.stepped = [acknowledge, stepped] { acknowledge(stepped); };
      watch.synced = [acknowledge, synced] { acknowledge(synced); };
      accept(operation, {before, stepped, synced, after});
    } else {
      accept(operation, {before, after});
    }
    const Status status = workload.run(runner, watch);
    if (!status.is_ok()) {
      recording.fault = concat("operation ", operation, ": ", status.message());
      break;
    }
    accept(operation, {after});
    if (operation == 1) runner.leave_free(kFreeBytes);
  }
  for (const JobStatistics& job : runner.store().statistics().jobs) {
    recording.early_adopted += job.counters.early_tiles_adopted;
    for (const uint64_t count : job.counters.early_tiles_discarded)
      recording.early_discarded += count;
  }
  return recording;
}

}  // namespace memd::powercut
