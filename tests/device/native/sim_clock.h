// The simulated time. It is independent of the order in which tasks really run.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "vector_clock.h"

namespace sim {

using Nanoseconds = int64_t;

/// A device has one of each kind, which does one thing at a time. `host` stands for the wait of a
/// thread.
enum class Engine : uint8_t { compute, copy_in, copy_out, host };

struct Cost {
  Engine engine = Engine::compute;
  Nanoseconds duration = 0;  // 0: takes no engine and no time
  int64_t bytes = 0;
};

struct TimelineEntry {
  std::string name;
  Actor actor;
  Cost cost;
  Nanoseconds begin;
};

/// When one engine is busy.
class BusyTimes {
 public:
  /// Takes the first gap of `duration` at `earliest` or later, and returns its beginning.
  Nanoseconds take(Nanoseconds earliest, Nanoseconds duration);

 private:
  std::map<Nanoseconds, Nanoseconds> ends_;  // by beginning; neighbours are one
};

/// When each stream is through with all that was queued. A task begins when its stream has come so
/// far, its thread has queued it, and its engine has a gap. The caller serialises.
class SimClock {
 public:
  static Cost kernel(int64_t bytes, int64_t flop);
  Cost copy(Engine engine, int64_t bytes) const;
  void set_copy_speed(int64_t bytes_per_second) { copy_bytes_per_second_ = bytes_per_second; }

  Nanoseconds time_of(Actor stream) const;
  /// Nothing queued on `stream` from now on begins before `time`.
  void hold(Actor stream, Nanoseconds time);
  void run(Actor stream, const std::string& name, const Cost& cost);
  /// A host thread that stands at `now` waits until `time`; where it stands then.
  Nanoseconds wait(Actor host, Nanoseconds now, Nanoseconds time);

  /// Begins a new timeline, or stops recording.
  void record(bool is_on);
  bool is_recording() const { return is_recording_; }
  const std::vector<TimelineEntry>& timeline() const { return timeline_; }

 private:
  void note(const std::string& name, Actor actor, const Cost& cost, Nanoseconds begin);

  int64_t copy_bytes_per_second_ = 50'000'000'000;
  std::map<Actor, Nanoseconds> times_;
  std::array<std::array<BusyTimes, 3>, kDevices> engines_;
  bool is_recording_ = false;
  std::vector<TimelineEntry> timeline_;
};

}  // namespace sim
