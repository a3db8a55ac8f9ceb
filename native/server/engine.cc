#include "server/engine.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"

namespace memd {
namespace {

// A read of the start. Above the 30 s after which the kernel gives an NVMe command up, below the
// TimeoutStartSec= of memd.service.
constexpr uint64_t kStartReadNs = 60'000'000'000;
constexpr int kStartSleepMs = 100;
// Some 2 GiB: enough for what is streamed through a large pool, and no start is noticeably longer.
constexpr double kGatherSecondsMax = 3;
// How many of the oldest an error names.
constexpr size_t kNamedCount = 3;

/// The options name them in the order of the directories; volumes have that of their set.
Result<std::vector<IoPathLimits>> limits_by_volume(const ServerOptions& options,
                                                   const std::vector<Volume>& volumes) {
  std::vector<IoPathLimits> limits(volumes.size());
  if (options.path_limits.empty()) return limits;
  if (options.path_limits.size() != options.directories.size()) {
    return error(StatusCode::invalid_argument,
                 "the limits of each directory's path or none: ",
                 options.path_limits.size(),
                 " for ",
                 options.directories.size());
  }
  for (const IoPathLimits& each : options.path_limits) {
    if (Status usable = check_limits(each); !usable.is_ok()) return usable;
  }
  for (size_t i = 0; i < volumes.size(); ++i) {
    const auto directory =
        std::find(options.directories.begin(), options.directories.end(), volumes[i].directory);
    MEMD_CHECK(directory != options.directories.end());
    limits[i] = options.path_limits[static_cast<size_t>(directory - options.directories.begin())];
  }
  return limits;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::start(const ServerOptions& options, KeptDescriptors kept) {
  std::unique_ptr<Engine> engine(new Engine());
  if (Status status = engine->prepare(options, std::move(kept)); !status.is_ok()) {
    // A device may still write to what was read into: destructors would wait for it.
    if (engine->io_ != nullptr && engine->io_->statistics().in_flight_count > 0) {
      abandon(std::move(engine));
    }
    return status;
  }
  return engine;
}

Status Engine::prepare(const ServerOptions& options, KeptDescriptors kept) {
  keeper_ = options.keeper;
  wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.is_open()) return device_error(errno, "eventfd");

  const PoolOptions pool_options{
      .bytes = options.host_bytes,
      .segment_bytes = 0,
      .huge_pages = options.huge_pages,
      .lock = options.lock_required ? LockMode::required : LockMode::wanted,
      .gather_seconds_max = kGatherSecondsMax};
  // A pool that can't be had must not leave a volume that was made for it. What was kept is memory
  // that is had already.
  if (kept.empty()) {
    if (Status possible = Pool::check(pool_options); !possible.is_ok()) return possible;
  }

  VolumeSetOptions volume_options;
  volume_options.directories = options.directories;
  volume_options.bytes = options.nvme_bytes;
  volume_options.progress = options.progress;
  auto volumes = VolumeSet::open(volume_options);
  if (!volumes.is_ok()) return volumes.status();
  report_.formatted = volumes.value().formatted;
  report_.format_seconds = volumes.value().format_seconds;
  for (const Volume& volume : volumes.value().volumes) {
    report_.volume_paths.push_back(volume.path);
    report_.volume_bytes.push_back(volume.bytes);
  }

  keep_to_one_volume_set(volumes.value().superblock.set_uuid, kept);
  auto pool = Pool::create(pool_options, keeper_.get(), &kept);
  if (!pool.is_ok()) return pool.status();
  pool_ = std::move(pool).value();

  const auto limits = limits_by_volume(options, volumes.value().volumes);
  if (!limits.is_ok()) return limits.status();
  uint32_t depth = 0;
  for (const IoPathLimits& each : limits.value()) depth += each.depth;
  auto queue = options.make_queue({.engine = options.io_engine,
                                   .depth = std::min(depth, 4096u),
                                   .wake_fd = wake_.get(),
                                   .turn = &turn_});
  if (!queue.is_ok()) return queue.status();
  io_ = std::move(queue.value().queue);
  report_.io_engine = std::string(io_->name());
  report_.io_engine_reason = queue.value().reason;

  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  workers_ = std::make_unique<Workers>(
      options.update_thread_count == 0 ? cores : options.update_thread_count, wake_.get(), &turn_);
  if (!workers_->status().is_ok()) return workers_->status();
  extents_ = std::make_unique<ExtentStore>(*io_, *workers_, std::move(volumes).value(), clock_);
  for (uint16_t device = 0; device < limits.value().size(); ++device) {
    io_->set_limits(device, limits.value()[device]);
  }
  store_ = std::make_unique<ShardStore>(ShardStoreParts{.pool = *pool_,
                                                        .io = *io_,
                                                        .extents = *extents_,
                                                        .workers = *workers_,
                                                        .clock = clock_,
                                                        .turn = &turn_,
                                                        .jobs_expected = options.jobs_expected,
                                                        .keeper = keeper_.get()});
  const Status loaded = store_->load([this] { return turn_of_start(); }, &kept);
  if (!loaded.is_ok()) return loaded;
  report_.load_notes = store_->load_notes();
  // The rest is of a version that we don't know, or damaged: it would be kept for ever.
  for (const KeptDescriptor& left : kept) {
    if (left.fd.is_open() && keeper_ != nullptr) keeper_->forget(left.name);
  }
  if (Status settled = pool_->settle(); !settled.is_ok()) return settled;
  report_.pool = pool_->report();
  report_.job_count = static_cast<uint32_t>(store_->reports().jobs().size());
  return Status::ok();
}

Status Engine::turn_of_start() {
  pollfd wait{.fd = wake_.get(), .events = POLLIN, .revents = 0};
  poll(&wait, 1, kStartSleepMs);
  // Emptied before it is asked what is done, so that the next turn sleeps until there is more.
  uint64_t count = 0;
  MEMD_CHECK(read(wake_.get(), &count, sizeof(count)) > 0 || errno == EAGAIN || errno == EINTR);
  io_->reap();
  workers_->reap();
  const auto open = io_->in_flight();
  if (open.empty() || open.front().age_ns < kStartReadNs) return Status::ok();
  return error(StatusCode::deadline,
               "a device does not answer, so that the daemon cannot start; look at it, then start "
               "again: ",
               describe_in_flight());
}

std::string Engine::describe_in_flight() const {
  return describe(store_->reports().in_flight(), kNamedCount);
}

void Engine::keep_to_one_volume_set(const std::array<uint8_t, 16>& uuid, KeptDescriptors& kept) {
  constexpr std::string_view kPrefix = "volumes.";
  constexpr char kDigits[] = "0123456789abcdef";
  std::string name(kPrefix);
  for (const uint8_t byte : uuid) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  const auto of_ours = [&name](const KeptDescriptor& each) { return each.name == name; };
  const bool is_known = std::any_of(kept.begin(), kept.end(), of_ours);
  if (!kept.empty() && !is_known) {
    report_.kept_note = concat("it belongs to other volumes than these: ",
                               kept.size(),
                               " descriptors of an earlier daemon are given up");
    for (const KeptDescriptor& each : kept) {
      // As Segment::mark_given_up(): nobody takes a used segment for a clean one. Doorbells and
      // tables have no contents that could be mistaken.
      if (each.name.starts_with("segment.")) fchmod(each.fd.get(), 0);
      if (keeper_ != nullptr) keeper_->forget(each.name);
    }
    kept.clear();
  }
  std::erase_if(kept, [&](const KeptDescriptor& each) { return each.name.starts_with(kPrefix); });
  // Any descriptor will do: the name is what is kept.
  if (keeper_ != nullptr && !is_known) keeper_->keep(name, wake_.get());
}

bool Engine::advance(TurnPhases& phases) {
  const bool progress =
      circle_.run(kParts.size(), turn_, [&](size_t part) { return (this->*kParts[part])(phases); });
  end_turn();
  return progress || turn_.is_cut();
}

bool Engine::take_completions(TurnPhases& phases) {
  io_->begin_batch();
  if (io_->reap() == 0) return false;
  phases.end(TurnPhase::io);
  return true;
}

bool Engine::take_finished_work(TurnPhases& phases) {
  bool progress = workers_->reap() > 0;
  progress |= store_->grant_filled();
  if (progress) phases.end(TurnPhase::work);
  return progress;
}

bool Engine::advance_store(TurnPhases& phases) { return store_->advance(phases); }

bool Engine::give_to_devices(TurnPhases& phases) {
  if (!io_->end_batch()) return false;
  phases.end(TurnPhase::io);
  return true;
}

bool Engine::is_idle() const { return store_->is_idle() && io_->statistics().in_flight_count == 0; }

void Engine::wake() const {
  const uint64_t one = 1;
  MEMD_CHECK_EQ(write(wake_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
}

void Engine::abandon(std::unique_ptr<Engine> engine) {
  end_turns();
  // Reachable memory is no leak.
  static auto* const kept = new std::vector<std::unique_ptr<Engine>>();
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(engine));
}

}  // namespace memd
