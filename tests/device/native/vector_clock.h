// A vector clock: which work of each actor is over, as far as this actor knows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

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
    for (auto [actor, tick] : other.ticks_) ticks_[actor] = std::max(ticks_[actor], tick);
  }
  /// The number of the actor's next event, which is known from now on.
  int64_t next(Actor actor) { return ++ticks_[actor]; }
  bool knows(Actor actor, int64_t tick) const {
    auto found = ticks_.find(actor);
    return found != ticks_.end() && found->second >= tick;
  }

 private:
  std::map<Actor, int64_t> ticks_;
};

}  // namespace sim
