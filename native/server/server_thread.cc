#include "server/server_thread.h"

#include <malloc.h>
#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>

#include "base/pause_cpu.h"
#include "base/threads.h"

namespace memd {
namespace {

// A turn that finds nothing is repeated this long before the thread sleeps: a futex or eventfd
// wake-up costs some 50 µs.
constexpr uint64_t kSpinNs = 20'000;

// Longest sleep: the watchdog wants a heartbeat, and a lost doorbell must not stop a job.
constexpr int kSleepMs = 100;

// Looks at the rings between two turns that find nothing: some 0.7 µs, which a completed transfer
// may wait. A turn takes as long, and a request that comes in its middle waits for its end.
constexpr int kRequestLooks = 16;

constexpr uint64_t kWakeId = 0;  // sessions count from 1

}  // namespace

Status ServerThread::start() {
  epoll_ = OwnedFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.is_open()) return device_error(errno, "epoll");
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kWakeId;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, engine_->wake_fd(), &event) != 0) {
    return device_error(errno, "epoll_ctl");
  }
#ifdef M_MXFAST
  // One call of malloc joins all chunks of the fast bins: 1 ms after 20,000 blobs. Without them
  // each chunk is joined as it is freed. AddressSanitizer has none, and refuses.
  (void)mallopt(M_MXFAST, 0);
#endif
  // If there is no reserve, requests are refused one by one.
  [[maybe_unused]] const bool is_whole = has_reserve();
  auto thread = start_thread([this] { run(); });
  if (!thread.is_ok()) return thread.status();
  thread_ = std::move(thread).value();
  pthread_setname_np(thread_.native_handle(), "memd-server");
  return Status::ok();
}

void ServerThread::run() {
  uint64_t idle_since_ns = 0;
  uint64_t now_ns = turn_clock_.begin();
  while (!stopping_.load(std::memory_order_acquire)) {
    heartbeat_.fetch_add(1, std::memory_order_relaxed);
    engine_->turn().begin(now_ns);
    const bool progress = circle_.run(
        kParts.size(), engine_->turn(), [this](size_t part) { return (this->*kParts[part])(); });
    if (progress) {
      now_ns = turn_clock_.end();
      idle_since_ns = 0;
      continue;
    }
    look_for_requests();
    now_ns = turn_clock_.begin();
    if (idle_since_ns == 0) idle_since_ns = now_ns;
    if (now_ns - idle_since_ns < kSpinNs) continue;
    sleep();
    idle_since_ns = 0;
    now_ns = turn_clock_.begin();
  }
}

void ServerThread::look_for_requests() const {
  const auto& sessions = engine_->store().sessions();
  for (int look = 0; look < kRequestLooks; ++look) {
    for (const auto& [session_id, session] : sessions) {
      if (session->ring.has_request()) return;
    }
    pause_cpu();
  }
}

bool ServerThread::run_commands() {
  {
    const std::lock_guard lock(mutex_);
    std::move(commands_.begin(), commands_.end(), std::back_inserter(taken_commands_));
    commands_.clear();
  }
  bool progress = false;
  while (!taken_commands_.empty()) {
    const auto command = std::move(taken_commands_.front());
    taken_commands_.pop_front();
    command();
    progress = true;
    if (!taken_commands_.empty() && engine_->turn().is_spent()) break;
  }
  if (progress) turn_clock_.phases().end(TurnPhase::commands);
  return progress;
}

bool ServerThread::advance_engine() { return engine_->advance(turn_clock_.phases()); }

void ServerThread::sleep() {
  ShardStore& store = engine_->store();
  const bool wants_releases = store.wants_releases();
  bool awake = false;
  for (const auto& [session_id, session] : store.sessions()) {
    session->ring.want_release(wants_releases);
    awake |= session->ring.prepare_to_sleep();
  }
  // A pin that was given back before its client could see that we sleep is seen by this turn.
  if (!awake && wants_releases) {
    store.look_for_releases();
    engine_->turn().begin();
    awake = store.advance(turn_clock_.phases());
  }
  if (!awake) {
    int timeout_ms = kSleepMs;
    if (const uint64_t deadline_ns = store.next_deadline_ns(); deadline_ns != 0) {
      const uint64_t now_ns = engine_->clock().now_ns();
      const uint64_t left_ms = deadline_ns > now_ns ? (deadline_ns - now_ns) / 1'000'000 + 1 : 0;
      timeout_ms = static_cast<int>(std::min<uint64_t>(left_ms, kSleepMs));
    }
    std::array<epoll_event, 16> events;
    // Edges only: whoever rang is found by looking at every ring, and the doorbell of a session
    // that is gone, which its client may still hold and ring, wakes us once a ring and no more.
    epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  }
  for (const auto& [session_id, session] : store.sessions()) session->ring.wake();
}

bool ServerThread::post(std::function<void()> command) {
  {
    const std::lock_guard lock(mutex_);
    if (stopped_) return false;
    commands_.push_back(std::move(command));
  }
  engine_->wake();
  return true;
}

std::string ServerThread::describe_in_flight() {
  // Not ask(): it would come back here.
  const auto promise = std::make_shared<std::promise<std::string>>();
  auto answer = promise->get_future();
  const bool accepted =
      post([this, promise] { promise->set_value(engine_->describe_in_flight()); });
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

Status ServerThread::watch(const Session& session) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = session.session_id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, session.ring.doorbell_fd(), &event) != 0 &&
      errno != EEXIST) {  // resumed twice
    return device_error(errno, "watching a session's doorbell");
  }
  return Status::ok();
}

void ServerThread::end_service_lease(uint64_t job_id, const LeaseGrant& grant, bool discard) {
  post([this, job_id, grant, discard] { store().release_service_lease(job_id, grant, discard); });
  --service_lease_count_;
}

Status ServerThread::stop(std::chrono::steady_clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  stopping_.store(true, std::memory_order_release);
  engine_->wake();
  thread_.join();
  engine_->turn().lift();
  // Commands that came in between find nobody: their callers get an answer all the same.
  run_commands();
  store().give_up_waiting();
  if (Status drained = drain(deadline); !drained.is_ok()) {
    abandoned_.store(true, std::memory_order_release);
    Engine::abandon(std::move(engine_));
    return drained;
  }
  // Files are closed and memory goes back now, whoever still holds this object.
  engine_.reset();
  return Status::ok();
}

Status ServerThread::drain(std::chrono::steady_clock::time_point deadline) {
  // The kernel and the workers still use the jobs' memory, and their completions the store; so do
  // streams whose calls were ended, for a moment.
  while (!engine_->is_idle() || service_lease_count_ > 0) {
    if (engine_->advance(turn_clock_.phases())) continue;
    if (std::chrono::steady_clock::now() >= deadline) {
      if (const uint64_t count = service_lease_count_; count > 0) {
        return error(StatusCode::deadline,
                     "the daemon stops before every stream let go of its shard; every job is on "
                     "disk as of its last commit: ",
                     count,
                     " leases; in flight: ",
                     engine_->describe_in_flight());
      }
      return error(
          StatusCode::deadline,
          "the daemon stops without what a device does not finish; every job is on disk as "
          "of its last commit: ",
          engine_->describe_in_flight());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Status::ok();
}

}  // namespace memd
