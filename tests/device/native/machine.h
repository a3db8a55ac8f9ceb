// Streams that run late: in order within a stream, in any order that events allow between them.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <unordered_map>

#include "access_log.h"
#include "host_thread.h"
#include "sim_clock.h"

namespace sim {

/// A point in a stream.
struct Mark {
  Actor stream;
  VectorClock before;
  Nanoseconds time;
  bool has_passed = false;
};
using MarkPtr = std::shared_ptr<Mark>;

/// A kernel or copy. `run` holds bytes, never a tensor: memory that is freed too early must not
/// live on, and a tensor known to Python could want the GIL when it dies inside the machine's lock.
struct Work {
  std::string name;
  Cost cost;
  std::vector<Span> spans;
  std::function<void()> run;
  bool may_run_now = true;
};

/// All streams of all devices. Tasks run when the dice say so, or when a thread waits for them, on
/// the thread that calls. Any thread may call.
class Machine {
 public:
  /// Taken by every method; those who keep state beside the machine's hold it around several calls.
  std::unique_lock<std::recursive_mutex> lock() { return std::unique_lock(mutex_); }

  /// Finishes everything and starts over with other dice: each stream runs at once, sometimes, or
  /// only when it is waited for.
  void seed(int64_t value);
  void check_races(bool is_on);

  /// One of the device's side streams, in turn: a program that makes many gets them again.
  Actor next_stream(int device);
  void queue(Actor stream, Work work);
  MarkPtr mark(Actor stream);
  void block(Actor stream, const MarkPtr& awaited);

  /// The calling thread waits, and knows then what came before the mark.
  void wait(const MarkPtr& mark);
  /// Whether the mark has passed, as the dice say; while a timeline is recorded, as the clock says.
  bool query(const MarkPtr& mark);
  void finish(Actor stream) { wait(mark(stream)); }
  void finish_device(int device);
  void finish_all();
  /// For the allocator: runs what came before the mark, and orders nothing for the program.
  void reach(const MarkPtr& mark);

  /// The calling thread reads or writes these bytes. Raises if anybody may still use them.
  void host_touches(const Span& span);
  /// A thread that observes a key knows what those knew who published it before, and stands no
  /// earlier than those stood who published their time.
  void publish(int64_t key);
  void publish_time(int64_t key);
  void observe(int64_t key);

  /// Whether no task that is still to run uses these bytes of a region.
  bool is_quiet(const char* begin, const char* end);
  /// They are somebody else's from now on.
  void forget(const char* begin, const char* end);
  /// As `forget`, for uses that came before one of these marks, which have passed.
  void forget_before(const std::vector<MarkPtr>& marks, const char* begin, const char* end);

  SimClock& clock() { return clock_; }

 private:
  struct Task {
    std::function<void()> run;
    MarkPtr awaited, passes;
    int64_t tick = 0;
  };
  struct Knowledge {
    VectorClock clock;
    Nanoseconds time = 0;
  };

  static constexpr Actor kStreamsTogether = Actor{kDevices} * kStreams;

  HostThread& host();
  double roll() { return static_cast<double>(dice_() >> 11) * 0x1p-53; }
  void follow_host(Actor stream);
  void learn(const MarkPtr& mark);
  std::vector<Actor> busy() const;
  Actor any_busy();
  void advance(Actor stream);
  void drift();

  std::recursive_mutex mutex_;
  std::mt19937_64 dice_;
  int64_t seed_count_ = 0;
  bool is_helpful_ = false;  // a wait may run other streams than the one that it is for
  std::array<std::deque<Task>, kStreamsTogether> queues_;
  std::array<VectorClock, kStreamsTogether> known_;  // by all that is queued so far
  std::array<int64_t, kStreamsTogether> ticks_{};    // of all that is queued so far
  std::array<int64_t, kStreamsTogether> done_{};
  std::array<int64_t, kDevices> given_{};
  std::map<Actor, double> pace_;
  std::unordered_map<int64_t, Knowledge> published_;
  AccessLog accesses_;
  SimClock clock_;
};

Machine& machine();

/// The beginning of the device's segment or registered range that holds `address`, which is its own
/// region otherwise. Those who own memory know.
const char* region_of(const char* address);

}  // namespace sim
