#include "server/server.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <future>
#include <new>
#include <optional>
#include <string_view>

#include "base/check.h"
#include "base/threads.h"

namespace memd {
namespace {

// A turn that finds nothing is repeated this long before the thread sleeps: a futex or eventfd
// wake-up costs some 50 µs.
constexpr uint64_t kSpinNs = 20'000;

// Longest sleep: the watchdog wants a heartbeat, and a lost doorbell must not stop a job.
constexpr int kSleepMs = 100;

constexpr size_t kSegmentsInPacket = 64;

constexpr uint64_t kWakeId = 0;  // sessions count from 1

// What is answered at the next turn; a server thread that takes longer is killed by the watchdog.
constexpr double kAnswerS = 60;
// What waits for everything that a job has in flight.
constexpr double kDrainS = 600;
// Beside the store's own deadline, which says more.
constexpr double kGraceS = 10;
// A read of the start. Above the 30 s after which the kernel gives an NVMe command up, below the
// TimeoutStartSec= of memd.service.
constexpr uint64_t kStartReadNs = 60'000'000'000;
// Some 2 GiB: enough for what is streamed through a large pool, and no start is noticeably longer.
constexpr double kGatherSecondsMax = 3;
// How many of the oldest an error names.
constexpr size_t kNamedCount = 3;

Result<OwnedFd> duplicate(int fd) {
  OwnedFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.is_open()) return device_error(errno, "duplicating a descriptor");
  return copy;
}

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

Result<std::shared_ptr<Server>> Server::start(const ServerOptions& options, KeptDescriptors kept) {
  std::shared_ptr<Server> server(new Server());
  if (Status status = server->prepare(options, std::move(kept)); !status.is_ok()) return status;
  Server* const raw = server.get();
  auto thread = start_thread([raw] { raw->run(); });
  if (!thread.is_ok()) return thread.status();
  server->thread_ = std::move(thread).value();
  pthread_setname_np(server->thread_.native_handle(), "memd-server");
  return server;
}

Status Server::prepare(const ServerOptions& options, KeptDescriptors kept) {
  keeper_ = options.keeper;
  wake_ = OwnedFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  if (!wake_.is_open() || !epoll_.is_open()) return device_error(errno, "eventfd or epoll");
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kWakeId;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    return device_error(errno, "epoll_ctl");
  }

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
  auto queue = options.make_queue(
      {.engine = options.io_engine, .depth = std::min(depth, 4096u), .wake_fd = wake_.get()});
  if (!queue.is_ok()) return queue.status();
  io_ = std::move(queue.value().queue);
  report_.io_engine = std::string(io_->name());
  report_.io_engine_reason = queue.value().reason;

  extents_ = std::make_unique<ExtentStore>(*io_, std::move(volumes).value(), clock_);
  for (uint16_t device = 0; device < limits.value().size(); ++device) {
    io_->set_limits(device, limits.value()[device]);
  }
  const uint32_t cores = std::max(1u, std::thread::hardware_concurrency());
  workers_ = std::make_unique<UpdateWorkers>(
      options.update_thread_count == 0 ? cores : options.update_thread_count, wake_.get());
  if (!workers_->status().is_ok()) return workers_->status();
  store_ = std::make_unique<ShardStore>(ShardStoreParts{.pool = *pool_,
                                                        .io = *io_,
                                                        .extents = *extents_,
                                                        .workers = *workers_,
                                                        .clock = clock_,
                                                        .jobs_expected = options.jobs_expected,
                                                        .keeper = keeper_.get()});
  const Status loaded = store_->load([this] { return turn_of_start(); }, &kept);
  if (!loaded.is_ok()) {
    // A device may still write to what was read into: destructors would wait for it.
    if (io_->statistics().in_flight_count > 0) abandon();
    return loaded;
  }
  report_.load_notes = store_->load_notes();
  // What nobody took is of a version that we don't know, or damaged: it would be kept for ever.
  for (const KeptDescriptor& left : kept) {
    if (left.fd.is_open() && keeper_ != nullptr) keeper_->forget(left.name);
  }
  if (Status settled = pool_->settle(); !settled.is_ok()) return settled;
  report_.pool = pool_->report();
  report_.job_count = static_cast<uint32_t>(store_->jobs().size());
  return Status::ok();
}

Status Server::turn_of_start() {
  pollfd wait{.fd = wake_.get(), .events = POLLIN, .revents = 0};
  poll(&wait, 1, kSleepMs);
  // Emptied before it is asked what is done, so that the next turn sleeps until there is more.
  uint64_t count = 0;
  MEMD_CHECK(read(wake_.get(), &count, sizeof(count)) > 0 || errno == EAGAIN || errno == EINTR);
  io_->reap();
  const auto open = io_->in_flight();
  if (open.empty() || open.front().age_ns < kStartReadNs) return Status::ok();
  return error(StatusCode::deadline,
               "a device does not answer, so that the daemon cannot start; look at it, then start "
               "again: ",
               describe(store_->in_flight(), kNamedCount));
}

void Server::keep_to_one_volume_set(const std::array<uint8_t, 16>& uuid, KeptDescriptors& kept) {
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

Server::~Server() {
  // Who wants an orderly end calls stop() and looks at its status.
  [[maybe_unused]] const Status status = stop(30.0);
}

// ---- The server thread --------------------------------------------------------------------------

void Server::run() {
  uint64_t idle_since_ns = 0;
  while (!stopping_.load(std::memory_order_acquire)) {
    heartbeat_.fetch_add(1, std::memory_order_relaxed);
    bool progress = run_commands();
    progress |= io_->reap() > 0;
    progress |= workers_->reap() > 0;
    progress |= store_->advance();
    if (progress) {
      idle_since_ns = 0;
      continue;
    }
    const uint64_t now_ns = clock_.now_ns();
    if (idle_since_ns == 0) idle_since_ns = now_ns;
    if (now_ns - idle_since_ns < kSpinNs) continue;
    sleep();
    idle_since_ns = 0;
  }
}

bool Server::run_commands() {
  std::vector<std::function<void()>> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (auto& command : commands) command();
  return !commands.empty();
}

void Server::sleep() {
  const bool wants_releases = store_->wants_releases();
  bool awake = false;
  for (const auto& [session_id, session] : store_->sessions()) {
    session->ring.want_release(wants_releases);
    awake |= session->ring.prepare_to_sleep();
  }
  // A pin that was given back before its client could see that we sleep is seen by this turn.
  if (!awake && wants_releases) awake = store_->advance();
  if (!awake) {
    int timeout_ms = kSleepMs;
    if (const uint64_t deadline_ns = store_->next_deadline_ns(); deadline_ns != 0) {
      const uint64_t now_ns = clock_.now_ns();
      const uint64_t left_ms = deadline_ns > now_ns ? (deadline_ns - now_ns) / 1'000'000 + 1 : 0;
      timeout_ms = static_cast<int>(std::min<uint64_t>(left_ms, kSleepMs));
    }
    std::array<epoll_event, 16> events;
    // Edges only: whoever rang is found by looking at every ring, and the doorbell of a session
    // that is gone, which its client may still hold and ring, wakes us once a ring and no more.
    epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  }
  for (const auto& [session_id, session] : store_->sessions()) session->ring.wake();
}

bool Server::post(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    commands_.push_back(std::move(command));
  }
  const uint64_t one = 1;
  MEMD_CHECK_EQ(write(wake_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  return true;
}

template <typename T>
Result<T> Server::ask(double timeout_s,
                      const char* what,
                      std::function<void(std::function<void(Result<T>)>)> start) {
  const auto promise = std::make_shared<std::promise<Result<T>>>();
  auto answer = promise->get_future();
  const bool accepted = post([start = std::move(start), promise] {
    start([promise](Result<T> result) { promise->set_value(std::move(result)); });
  });
  if (!accepted) return error(StatusCode::unavailable, "the daemon is stopping");
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  // In slices: a daemon that was stopped by force answers nobody.
  constexpr auto kSlice = std::chrono::milliseconds(200);
  while (answer.wait_until(std::min<std::chrono::steady_clock::time_point>(
             std::chrono::time_point_cast<std::chrono::steady_clock::duration>(deadline),
             std::chrono::steady_clock::now() + kSlice)) != std::future_status::ready) {
    if (abandoned_.load(std::memory_order_acquire)) {
      return error(StatusCode::unavailable, what, " was given up: the daemon is stopping");
    }
    if (std::chrono::steady_clock::now() < deadline) continue;
    return error(StatusCode::deadline,
                 what,
                 " is not done yet; it goes on: waited ",
                 timeout_s,
                 " s; in flight: ",
                 describe_in_flight());
  }
  try {
    return answer.get();
  } catch (const std::future_error&) {
    // The daemon ended before it was this request's turn.
    return error(StatusCode::unavailable, what, " was given up: the daemon is stopping");
  }
}

template <typename T>
Result<T> Server::ask_reading(const char* what,
                              std::function<void(std::function<void(Result<T>)>)> start) {
  return ask<T>(kAnswerS, what, [what, start = std::move(start)](const auto& reply) {
    try {
      start(reply);
    } catch (const std::bad_alloc&) {
      reply(error(StatusCode::capacity, "the daemon has no memory for the answer: ", what));
    }
  });
}

std::string Server::describe_in_flight() {
  // Not ask(): it would come back here.
  const auto promise = std::make_shared<std::promise<std::string>>();
  auto answer = promise->get_future();
  const bool accepted =
      post([this, promise] { promise->set_value(describe(store_->in_flight(), kNamedCount)); });
  if (!accepted) return "nothing is told while the daemon stops";
  if (answer.wait_for(std::chrono::seconds(1)) != std::future_status::ready) {
    return "the server thread does not answer";
  }
  try {
    return answer.get();
  } catch (const std::future_error&) {
    return "nothing is told while the daemon stops";
  }
}

// ---- The face -----------------------------------------------------------------------------------

namespace {

/// For what has no value but a status.
struct Nothing {};

Result<Nothing> nothing(const Status& status) {
  if (!status.is_ok()) return status;
  return Nothing{};
}

Status status_of(const Result<Nothing>& result) {
  return result.is_ok() ? Status::ok() : result.status();
}

template <typename T>
Result<T> value_or(const Status& status, T value) {
  if (!status.is_ok()) return status;
  return value;
}

}  // namespace

Result<JobInfo> Server::open_job(const OpenJobRequest& request) {
  if (request.fresh) {
    // Its memory has to be back in the pool before the new job is admitted.
    const auto held = find_job(request.name);
    if (!held.is_ok() && held.status().code() != StatusCode::not_found) return held.status();
    if (held.is_ok()) {
      if (Status status = drop_job(held.value().job_id, false); !status.is_ok()) return status;
    }
  }
  // A stopped job that no catalogue named goes without being asked to.
  refill_pool();
  auto job = ask<JobInfo>(kAnswerS, "opening a job", [this, request](const auto& reply) {
    reply(store_->open_job(request));
  });
  if (!job.is_ok() || !job.value().created || !outlives_process()) return job;
  // Memory that outlives this process belongs to a job that the disk knows, so that the next daemon
  // has one to give it to.
  const uint64_t job_id = job.value().job_id;
  auto committed = ask<StepReport>(kDrainS, "the first commit", [this, job_id](const auto& reply) {
    store_->sync_job(job_id, [reply](const Status& status, const StepReport& report) {
      reply(value_or(status, report));
    });
  });
  if (committed.is_ok()) return job;
  [[maybe_unused]] const Status dropped = drop_job(job_id, false);
  return committed.status();
}

Result<JobInfo> Server::find_job(const std::string& name) {
  return ask_reading<JobInfo>("finding a job",
                              [this, name](const auto& reply) { reply(store_->find_job(name)); });
}

Result<std::vector<JobInfo>> Server::jobs() {
  return ask_reading<std::vector<JobInfo>>("listing jobs",
                                           [this](const auto& reply) { reply(store_->jobs()); });
}

Result<std::vector<ShardInfo>> Server::shards(uint64_t job_id, uint32_t first, size_t count_max) {
  return ask_reading<std::vector<ShardInfo>>("listing shards",
                                             [this, job_id, first, count_max](const auto& reply) {
                                               reply(store_->shards(job_id, first, count_max));
                                             });
}

Result<ShardInfo> Server::find_shard(uint64_t job_id, const std::string& name) {
  return ask_reading<ShardInfo>("finding a shard", [this, job_id, name](const auto& reply) {
    reply(store_->find_shard(job_id, name));
  });
}

Status Server::set_job_weight(uint64_t job_id, JobWeight weight) {
  return status_of(
      ask<Nothing>(kAnswerS, "setting a job's weight", [this, job_id, weight](const auto& reply) {
        reply(nothing(store_->set_job_weight(job_id, weight)));
      }));
}

Status Server::drop_job(uint64_t job_id, bool force) {
  auto result = ask<Nothing>(kDrainS, "dropping a job", [this, job_id, force](const auto& reply) {
    store_->drop_job(job_id, force, [reply](const Status& status) { reply(nothing(status)); });
  });
  refill_pool();
  return status_of(result);
}

void Server::refill_pool() {
  // One segment a turn: touching a fresh one takes tens of milliseconds, and leases go on in
  // between.
  for (bool more = true; more;) {
    auto result = ask<bool>(kAnswerS, "refilling the pool", [this](const auto& reply) {
      auto segments = store_->take_released_segments();
      const bool any = !segments.empty();
      if (any) {
        store_->add_to_pool(std::move(segments.back()));
        segments.pop_back();
      }
      store_->put_back_released(std::move(segments));
      reply(any);
    });
    more = result.is_ok() && result.value();
  }
}

Result<SessionGrant> Server::attach(uint64_t job_id, const SessionOwner& owner, double timeout_s) {
  // A caller that gave up waiting drops the answer, and with it the session: nobody else knows of
  // it.
  struct Answer {
    SessionGrant grant;
    Server* server = nullptr;  // null once a caller has the grant
    Answer() = default;
    Answer(const Answer&) = delete;
    Answer& operator=(const Answer&) = delete;
    ~Answer() {
      if (server != nullptr) server->give_up_session(grant.session_id);
    }
  };
  using Pointer = std::shared_ptr<Answer>;
  auto result = ask<Pointer>(timeout_s, "attaching", [this, job_id, owner](const auto& reply) {
    auto session = store_->attach(job_id, owner);
    if (!session.is_ok()) return reply(session.status());
    const auto job = store_->job_of(session.value()->session_id);
    if (!job.is_ok()) return reply(job.status());
    const uint64_t session_id = session.value()->session_id;
    const auto refuse = [&](const Status& status) {
      [[maybe_unused]] const auto leases = store_->detach(session_id);
      reply(status);
    };
    auto answer = std::make_shared<Answer>();
    SessionGrant* const grant = &answer->grant;
    grant->session_id = session_id;
    grant->segment_bytes = job.value()->memory->arena().segment_bytes();
    grant->arena_reserved_bytes = job.value()->memory->arena().reserved_bytes();
    for (auto [from, into] : {std::pair{session.value()->ring.session_fd(), &grant->session},
                              std::pair{job.value()->table.fd(), &grant->table},
                              std::pair{session.value()->ring.doorbell_fd(), &grant->doorbell}}) {
      auto copy = duplicate(from);
      if (!copy.is_ok()) return refuse(copy.status());
      *into = std::move(copy).value();
    }
    if (Status status = watch(*session.value()); !status.is_ok()) return refuse(status);
    answer->server = this;
    reply(answer);
  });
  if (!result.is_ok()) return result.status();
  result.value()->server = nullptr;
  return std::move(result.value()->grant);
}

void Server::give_up_session(uint64_t session_id) {
  // It may have ended with its job meanwhile.
  post([this, session_id] { [[maybe_unused]] const auto leases = store_->detach(session_id); });
}

Result<std::vector<KeptSession>> Server::kept_sessions() {
  return ask<std::vector<KeptSession>>(
      kAnswerS, "listing kept sessions", [this](const auto& reply) {
        reply(store_->kept_sessions());
      });
}

void Server::redo_steps() {
  post([this] { store_->redo_steps(); });
}

Result<SessionGrant> Server::resume_session(uint64_t session_id, const SessionOwner& owner) {
  using Pointer = std::shared_ptr<SessionGrant>;
  auto result = ask<Pointer>(kAnswerS, "resuming", [this, session_id, owner](const auto& reply) {
    const auto session = store_->resume_session(session_id, owner);
    if (!session.is_ok()) return reply(session.status());
    const auto job = store_->job_of(session_id);
    if (!job.is_ok()) return reply(job.status());
    if (Status status = watch(*session.value()); !status.is_ok()) return reply(status);
    auto grant = std::make_shared<SessionGrant>();
    grant->session_id = session_id;
    grant->segment_bytes = job.value()->memory->arena().segment_bytes();
    grant->arena_reserved_bytes = job.value()->memory->arena().reserved_bytes();
    reply(grant);
  });
  if (!result.is_ok()) return result.status();
  return std::move(*result.value());
}

Result<uint64_t> Server::closing_step(uint64_t job_id) {
  return ask<uint64_t>(kAnswerS, "finding the closing step", [this, job_id](const auto& reply) {
    reply(store_->closing_step(job_id));
  });
}

Status Server::watch(const Session& session) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = session.session_id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, session.ring.doorbell_fd(), &event) != 0 &&
      errno != EEXIST) {  // resumed twice
    return device_error(errno, "watching a session's doorbell");
  }
  return Status::ok();
}

Result<std::vector<OwnedFd>> Server::segment_fds(uint64_t session_id, uint64_t first) {
  using Pointer = std::shared_ptr<std::vector<OwnedFd>>;
  auto result = ask<Pointer>(kAnswerS, "segments", [this, session_id, first](const auto& reply) {
    const auto job = store_->job_of(session_id);
    if (!job.is_ok()) return reply(job.status());
    auto fds = std::make_shared<std::vector<OwnedFd>>();
    const Arena& arena = job.value()->memory->arena();
    for (uint64_t i = first; i < arena.segment_count() && fds->size() < kSegmentsInPacket; ++i) {
      auto copy = duplicate(arena.segment(i).fd());
      if (!copy.is_ok()) return reply(copy.status());
      fds->push_back(std::move(copy).value());
    }
    reply(fds);
  });
  if (!result.is_ok()) return result.status();
  return std::move(*result.value());
}

Result<uint32_t> Server::detach(uint64_t session_id) {
  return ask<uint32_t>(kAnswerS, "detaching", [this, session_id](const auto& reply) {
    reply(store_->detach(session_id));
  });
}

Result<std::pair<std::vector<ShardInfo>, bool>> Server::declare(
    uint64_t session_id, const std::vector<ShardSpec>& specs) {
  return ask<std::pair<std::vector<ShardInfo>, bool>>(
      kAnswerS, "declaring shards", [this, session_id, specs](const auto& reply) {
        reply(store_->declare(session_id, specs));
      });
}

Result<StepReport> Server::step(const StepRequest& request, double timeout_s) {
  return ask<StepReport>(timeout_s, "the step", [this, request](const auto& reply) {
    store_->step(request, [reply](const Status& status, const StepReport& report) {
      reply(value_or(status, report));
    });
  });
}

Status Server::expect_step(uint64_t session_id, const std::vector<StepGroup>& groups) {
  return status_of(ask<Nothing>(
      kAnswerS, "saying what a step will do", [this, session_id, groups](const auto& reply) {
        reply(nothing(store_->expect_step(session_id, groups)));
      }));
}

Result<StepReport> Server::sync(uint64_t session_id, double timeout_s) {
  return ask<StepReport>(timeout_s, "the sync", [this, session_id](const auto& reply) {
    store_->sync(session_id, [reply](const Status& status, const StepReport& report) {
      reply(value_or(status, report));
    });
  });
}

Status Server::drop_gradients(uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
  return status_of(ask<Nothing>(
      kAnswerS, "dropping gradients", [this, session_id, shard_ids](const auto& reply) {
        reply(nothing(store_->drop_gradients(session_id, shard_ids)));
      }));
}

Result<bool> Server::delete_shard(uint64_t session_id, const std::string& name) {
  return ask<bool>(kDrainS, "deleting a shard", [this, session_id, name](const auto& reply) {
    store_->delete_shard(session_id, name, reply);
  });
}

Result<std::unique_ptr<ServiceLease>> Server::lease(
    uint64_t session_id, uint32_t shard_id, Part part, LeaseMode mode, double timeout_s) {
  using Granted = std::shared_ptr<std::unique_ptr<ServiceLease>>;
  const LeaseRequest request{.session_id = session_id,
                             .shard_id = shard_id,
                             .part = part,
                             .mode = mode,
                             .timeout_ns = timeout_ns_of(timeout_s),
                             .for_service = true,
                             .prefetch = false};
  // The store answers at the deadline itself, and says on what it waited.
  auto result = ask<Granted>(timeout_s + kGraceS, "a lease", [this, request](const auto& reply) {
    store_->lease(request, [this, request, reply](const Status& status, const LeaseGrant& grant) {
      if (!status.is_ok()) return reply(status);
      const auto job = store_->job_of(request.session_id);
      MEMD_CHECK(job.is_ok());
      // From here on somebody owns the grant: a caller that gave up waiting drops it.
      reply(std::make_shared<std::unique_ptr<ServiceLease>>(
          std::make_unique<ServiceLease>(*this, job.value()->job_id, grant)));
    });
  });
  if (!result.is_ok()) return result.status();
  std::unique_ptr<ServiceLease> lease = std::move(*result.value());
  lease->keep(shared_from_this());
  return lease;
}

ServiceLease::ServiceLease(Server& server, uint64_t job_id, const LeaseGrant& grant)
    : server_(&server), job_id_(job_id), grant_(grant) {
  ++server.service_lease_count_;
}

void ServiceLease::release(bool discard) {
  Server* const server = std::exchange(server_, nullptr);
  if (server == nullptr) return;
  server->post([server, job_id = job_id_, grant = grant_, discard] {
    if (server->store_ != nullptr) server->store_->release_service_lease(job_id, grant, discard);
  });
  --server->service_lease_count_;
  kept_.reset();
}

Result<std::pair<std::vector<float>, std::vector<float>>> Server::read_moments(
    const MomentsRequest& request, double timeout_s) {
  using Moments = std::pair<std::vector<float>, std::vector<float>>;
  return ask<Moments>(timeout_s, "reading moments", [this, request](const auto& reply) {
    store_->read_moments(request,
                         [reply](const Status& status, std::vector<float> m, std::vector<float> v) {
                           reply(value_or(status, Moments(std::move(m), std::move(v))));
                         });
  });
}

Status Server::write_moments(const MomentsRequest& request,
                             uint64_t generation,
                             std::vector<float> exp_avg,
                             std::vector<float> exp_avg_sq,
                             double timeout_s) {
  const auto m = std::make_shared<std::vector<float>>(std::move(exp_avg));
  const auto v = std::make_shared<std::vector<float>>(std::move(exp_avg_sq));
  return status_of(ask<Nothing>(
      timeout_s, "writing moments", [this, request, generation, m, v](const auto& reply) {
        store_->write_moments(
            request, generation, std::move(*m), std::move(*v), [reply](const Status& status) {
              reply(nothing(status));
            });
      }));
}

Result<ServerStatistics> Server::statistics() {
  return ask_reading<ServerStatistics>("counting",
                                       [this](const auto& reply) { reply(store_->statistics()); });
}

void Server::set_scrub_rate(uint64_t bytes_per_second) {
  post([this, bytes_per_second] { store_->set_scrub_rate(bytes_per_second); });
}

Result<uint64_t> Server::begin_check(const LiveCheckRequest& request) {
  return ask<uint64_t>(kAnswerS, "beginning a check", [this, request](const auto& reply) {
    reply(store_->live_check().begin(request));
  });
}

Result<LiveCheckProgress> Server::check_progress(uint64_t check_id) {
  return ask<LiveCheckProgress>(
      kAnswerS, "a check's progress", [this, check_id](const auto& reply) {
        reply(store_->live_check().progress(check_id));
      });
}

void Server::end_check(uint64_t check_id) {
  post([this, check_id] { store_->live_check().end(check_id); });
}

Result<std::vector<Activity>> Server::in_flight() {
  return ask_reading<std::vector<Activity>>(
      "listing what is in flight", [this](const auto& reply) { reply(store_->in_flight()); });
}

Status Server::stop(double timeout_s) {
  const std::lock_guard only_once(stop_mutex_);
  if (!thread_.joinable()) return Status::ok();
  const auto deadline = std::chrono::time_point_cast<std::chrono::steady_clock::duration>(
      std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s));
  const auto left_s = [&deadline] {
    return std::max(
        0.01, std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count());
  };
  Status status;
  if (!outlives_process()) {
    // Sessions end first, so that their clients hear of it and begin nothing more; steps that were
    // begun go on.
    status = status_of(ask<Nothing>(left_s(), "ending sessions", [this](const auto& reply) {
      store_->detach_all();
      reply(Nothing{});
    }));
  }
  const auto all_jobs = ask<std::vector<JobInfo>>(
      left_s(), "listing the jobs to sync", [this](const auto& reply) { reply(store_->jobs()); });
  if (!all_jobs.is_ok() && status.is_ok()) status = all_jobs.status();
  for (const JobInfo& job : all_jobs.is_ok() ? all_jobs.value() : std::vector<JobInfo>()) {
    // It stays at its last commit, which is durable.
    if (!job.lost_shards.empty()) continue;
    auto synced =
        ask<StepReport>(left_s(), "the last sync", [this, id = job.job_id](const auto& reply) {
          store_->sync_job(id, [reply](const Status& done, const StepReport& report) {
            reply(value_or(done, report));
          });
        });
    if (!synced.is_ok() && status.is_ok()) status = synced.status();
  }
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stopping_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  MEMD_CHECK_EQ(write(wake_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  thread_.join();
  // Commands that came in between find nobody: their callers get an answer all the same.
  run_commands();
  store_->give_up_waiting();
  if (Status drained = drain(deadline); !drained.is_ok()) {
    abandon();
    return drained;
  }
  // Files are closed and memory goes back now, whoever still holds this object.
  store_.reset();
  workers_.reset();
  extents_.reset();
  io_.reset();
  pool_.reset();
  return status;
}

Status Server::drain(std::chrono::steady_clock::time_point deadline) {
  // The kernel and the workers still use the jobs' memory, and their completions the store; so do
  // streams whose calls were ended, for a moment.
  while (!store_->is_idle() || io_->statistics().in_flight_count > 0 || service_lease_count_ > 0) {
    io_->reap();
    workers_->reap();
    if (store_->advance()) continue;
    if (std::chrono::steady_clock::now() >= deadline) {
      if (const uint64_t count = service_lease_count_; count > 0) {
        return error(StatusCode::deadline,
                     "the daemon stops before every stream let go of its shard; every job is on "
                     "disk as of its last commit: ",
                     count,
                     " leases; in flight: ",
                     describe(store_->in_flight(), kNamedCount));
      }
      return error(
          StatusCode::deadline,
          "the daemon stops without what a device does not finish; every job is on disk as "
          "of its last commit: ",
          describe(store_->in_flight(), kNamedCount));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Status::ok();
}

void Server::abandon() {
  abandoned_.store(true, std::memory_order_release);
  // A device may read and write this memory at any time, and its engine's threads wake us. What is
  // reachable is no leak.
  struct Abandoned {
    OwnedFd wake;
    std::unique_ptr<Pool> pool;
    std::unique_ptr<IoQueue> io;
    std::unique_ptr<ExtentStore> extents;
    std::unique_ptr<UpdateWorkers> workers;
    std::unique_ptr<ShardStore> store;
  };
  static auto* const kept = new std::vector<Abandoned>();
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  kept->push_back({.wake = std::move(wake_),
                   .pool = std::move(pool_),
                   .io = std::move(io_),
                   .extents = std::move(extents_),
                   .workers = std::move(workers_),
                   .store = std::move(store_)});
}

}  // namespace memd
