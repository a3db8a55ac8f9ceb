// A vector clock: which work of each actor is over, as far as this actor knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sim {

/// A line of events in order: stream `id` of a device (0 and up), or a thread of the host (below
/// 0).
using Actor = int64_t;

constexpr int kDevices = 2;
constexpr int kStreams = 33;  // of a device: the default one, and a pool of 32 as CUDA has

constexpr Actor stream_of(int device, int64_t id) { return Actor{device} * kStreams + id; }
constexpr int device_of(Actor stream) { return static_cast<int>(stream / kStreams); }
constexpr int64_t id_of(Actor stream) { return stream % kStreams; }

class VectorClock {
 public:
  void join(const VectorClock& other) {
    auto place = ticks_.begin();
    for (const auto& [actor, tick] : other.ticks_) place = note(place, actor, tick);
  }
  /// The actor's event of this number is known from now on, and those before it.
  void note(Actor actor, int64_t tick) { note(ticks_.begin(), actor, tick); }
  bool knows(Actor actor, int64_t tick) const {
    auto found = std::lower_bound(ticks_.begin(), ticks_.end(), actor, is_before);
    return found != ticks_.end() && found->actor == actor && found->tick >= tick;
  }

 private:
  struct Tick {
    Actor actor;
    int64_t tick;
  };
  using Place = std::vector<Tick>::iterator;

  static bool is_before(const Tick& one, Actor actor) { return one.actor < actor; }

  Place note(Place from, Actor actor, int64_t tick) {
    auto place = std::lower_bound(from, ticks_.end(), actor, is_before);
    if (place == ticks_.end() || place->actor != actor) return ticks_.insert(place, {actor, tick});
    place->tick = std::max(place->tick, tick);
    return place;
  }

  std::vector<Tick> ticks_;  // by actor
};

}  // namespace sim
