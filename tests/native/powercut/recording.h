// What a workload did to its devices, event by event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "powercut/state.h"

namespace memd::powercut {

/// All are counted that a walk over a recording finds, and as many are described.
inline constexpr size_t kViolationsShown = 3;

struct RecordedWrite {
  uint64_t begin_bytes = 0;  // in the image of all devices
  std::vector<std::byte> bytes;
};

enum class EventKind : uint8_t {
  write_submitted,
  write_completed,
  sync_submitted,
  sync_completed,
  write_dropped,  // its daemon was killed, and it never reached the drive's cache
  acceptance,     // an operation was started or acknowledged, or a daemon has started
};

struct Event {
  EventKind kind = EventKind::write_submitted;
  uint64_t index = 0;  // of the write, the sync or the acceptance
};

/// What a daemon may find from here on.
struct Acceptance {
  uint64_t operation = 0;        // counted from 1; 0: none was started
  std::vector<uint64_t> states;  // the one that is acknowledged first
};

struct Recording {
  uint64_t seed = 0;
  Geometry geometry;
  std::vector<std::byte> formatted;  // the image before the first event
  std::vector<RecordedWrite> writes;
  std::vector<uint16_t> sync_devices;
  std::vector<Event> events;
  /// The first acceptance holds before the first event.
  std::vector<Acceptance> acceptances;
  /// All that ever were, and of commits that run at once those with one and not the other.
  std::vector<SetState> states;
  uint64_t early_adopted = 0;    // tiles, by steps
  uint64_t early_discarded = 0;  // tiles
  bool has_host_tier = false;
  bool has_loads = false;
  uint64_t restart_count = 0;
  uint64_t found_after_count = 0;  // restarts that found the operation that nobody acknowledged
  /// Operations after which a power cut leaves of a job with tier host another snapshot than the
  /// newest of an earlier step.
  uint64_t older_snapshot_count = 0;
  /// What went wrong while it ran; empty as a rule.
  std::string fault;

  /// What the last operation left.
  const SetState& last_state() const { return states[acceptances.back().states.front()]; }
  /// The image after the last event.
  std::vector<std::byte> image() const;
};

struct RecordOptions {
  /// Updates that begin before their step is closed.
  bool early = false;
  /// Now and then, in the midst of an operation, the daemon is killed and started again while the
  /// drives' caches stay: it finds what they hold, and says so. From then on no power cut may take
  /// it away.
  bool restarts = false;
  /// Made and dropped between steps.
  bool snapshots = false;
  /// With parameters of tier host beside others.
  bool host = false;
  /// Now and then a checkpoint is loaded; some break off before.
  bool loads = false;
};

/// `operation_count` operations of the workload `seed` on devices in memory that are almost full,
/// so that what is freed is used again at once. Odd seeds have two devices.
Recording record(uint64_t seed, uint64_t operation_count, const RecordOptions& options = {});

}  // namespace memd::powercut
