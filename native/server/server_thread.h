// The one thread that owns the store: what others ask of it, its turns, its sleep and its end.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/memory_reserve.h"
#include "base/owned_fd.h"
#include "base/status.h"
#include "base/turn_circle.h"
#include "server/engine.h"
#include "server/turn_clock.h"

namespace memd {

/// How long a caller waits for what is answered at the next turn; a server thread that takes longer
/// is killed by the watchdog.
inline constexpr double kAnswerS = 60;

/// An answer that ServerThread::wait() waits for.
template <typename T>
struct Asked {
  const char* what;
  std::future<Result<T>> answer;  // invalid: nobody will answer
};

/// Runs an engine in turns: commands of other threads, and what devices, workers and the store have
/// to do. TurnBudget and TurnCircle bound each turn. Sleeps when a turn finds nothing. ask() and
/// post() may be called from any thread and run their argument on the server thread; store() and
/// watch() may be called there alone.
class ServerThread {
 public:
  /// `engine` is started; the thread begins with start().
  explicit ServerThread(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}
  Status start();
  bool is_running() const { return thread_.joinable(); }

  /// False once the thread has stopped: `command` never runs then.
  bool post(std::function<void()> command);
  /// Runs `start` on the server thread and waits for what it hands to its argument. After the
  /// timeout the request goes on; the error says what was in flight.
  template <typename T>
  Result<T> ask(double timeout_s,
                const char* what,
                std::function<void(std::function<void(Result<T>)>)> start);
  /// The two halves of ask(). What was begun goes on if nobody waits for it.
  template <typename T>
  Asked<T> begin_ask(const char* what, std::function<void(std::function<void(Result<T>)>)> start);
  template <typename T>
  Result<T> wait(Asked<T>& asked, double timeout_s);
  /// As ask(), for what takes memory of its own or keeps some: refused before it begins where the
  /// daemon has none to spare.
  template <typename T>
  Result<T> ask_for_more(double timeout_s,
                         const char* what,
                         std::function<void(std::function<void(Result<T>)>)> start);
  template <typename T>
  Asked<T> begin_ask_for_more(const char* what,
                              std::function<void(std::function<void(Result<T>)>)> start);
  /// As ask(), for what changes nothing: if memory runs out for the answer, that is the answer.
  template <typename T>
  Result<T> ask_reading(const char* what,
                        std::function<void(std::function<void(Result<T>)>)> start);
  uint64_t heartbeat() const { return heartbeat_.load(std::memory_order_relaxed); }

  ShardStore& store() { return engine_->store(); }
  const TurnStatistics& turns() const { return turn_clock_.statistics(); }
  /// Its doorbell wakes the thread.
  Status watch(const Session& session);
  /// Streams that use the jobs' memory: the end waits for them.
  void begin_service_lease() { ++service_lease_count_; }
  /// Any thread; the bytes are not touched afterwards.
  void end_service_lease(uint64_t job_id, const LeaseGrant& grant, bool discard);

  /// Ends the thread, finishes what is in flight, and closes files and memory. If a device does not
  /// answer until `deadline`, the error says what was in flight, and the engine is abandoned.
  Status stop(std::chrono::steady_clock::time_point deadline);

 private:
  void run();
  bool run_commands();
  bool advance_engine();
  /// Returns once a session asks for something, or after a while.
  void look_for_requests() const;
  void sleep();
  /// Work in flight, for an error; never empty.
  std::string describe_in_flight();
  Status drain(std::chrono::steady_clock::time_point deadline);

  using TurnPart = bool (ServerThread::*)();
  static constexpr std::array<TurnPart, 2> kParts{&ServerThread::run_commands,
                                                  &ServerThread::advance_engine};

  TurnCircle circle_;
  std::unique_ptr<Engine> engine_;  // null once it has stopped
  std::deque<std::function<void()>> taken_commands_;
  OwnedFd epoll_;
  TurnClock turn_clock_;

  std::mutex mutex_;
  std::vector<std::function<void()>> commands_;
  bool stopped_ = false;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> abandoned_{false};  // nobody answers any more
  std::atomic<uint64_t> heartbeat_{0};
  std::atomic<uint64_t> service_lease_count_{0};
  std::thread thread_;
};

template <typename T>
Result<T> ServerThread::ask(double timeout_s,
                            const char* what,
                            std::function<void(std::function<void(Result<T>)>)> start) {
  Asked<T> asked = begin_ask<T>(what, std::move(start));
  return wait(asked, timeout_s);
}

template <typename T>
Asked<T> ServerThread::begin_ask(const char* what,
                                 std::function<void(std::function<void(Result<T>)>)> start) {
  const auto promise = std::make_shared<std::promise<Result<T>>>();
  Asked<T> asked{.what = what, .answer = promise->get_future()};
  const bool accepted = post([start = std::move(start), promise] {
    start([promise](Result<T> result) { promise->set_value(std::move(result)); });
  });
  if (!accepted) asked.answer = {};
  return asked;
}

template <typename T>
Result<T> ServerThread::wait(Asked<T>& asked, double timeout_s) {
  const char* const what = asked.what;
  std::future<Result<T>>& answer = asked.answer;
  if (!answer.valid()) return error(StatusCode::unavailable, "the daemon is stopping");
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
Result<T> ServerThread::ask_for_more(double timeout_s,
                                     const char* what,
                                     std::function<void(std::function<void(Result<T>)>)> start) {
  Asked<T> asked = begin_ask_for_more<T>(what, std::move(start));
  return wait(asked, timeout_s);
}

template <typename T>
Asked<T> ServerThread::begin_ask_for_more(
    const char* what, std::function<void(std::function<void(Result<T>)>)> start) {
  return begin_ask<T>(what, [what, start = std::move(start)](const auto& reply) {
    has_reserve() ? start(reply) : reply(no_memory_for(what));
  });
}

template <typename T>
Result<T> ServerThread::ask_reading(const char* what,
                                    std::function<void(std::function<void(Result<T>)>)> start) {
  return ask<T>(kAnswerS, what, [what, start = std::move(start)](const auto& reply) {
    try {
      const WithoutReserve can_be_told;
      start(reply);
    } catch (const std::bad_alloc&) {
      reply(error(StatusCode::capacity, "the daemon has no memory for the answer: ", what));
    }
  });
}

}  // namespace memd
