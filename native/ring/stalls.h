// Reasons for which a client's threads stood still: in which phase of a step, for parameters of
// which modules and why. The client counts it, since nobody else sees all of a wait, in words that
// the daemon reads and adds up. Nothing is counted, and no clock is read, where nobody waits.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace memd {

/// A lease's reason to wait in the daemon. The numbers travel in completions: append, never
/// renumber.
enum class LeaseWait : uint8_t {
  disk = 0,      // its bytes are on their way from the disk or to it
  update = 1,    // the update of its own shard
  step = 2,      // a step that has not come yet, or a commit
  gradient = 3,  // the step that has the gradient in its slot
  room = 4,      // room in the arena
  writer = 5,    // whoever writes it
};
inline constexpr size_t kLeaseWaitCount = 6;
inline constexpr std::array<const char*, kLeaseWaitCount> kLeaseWaitNames{
    "disk", "update", "step", "gradient", "room", "writer"};

/// The reasons of LeaseWait, by its numbers, and the way there and back: a free place in the ring,
/// and what of a wait the daemon does not account for.
inline constexpr size_t kStallRing = kLeaseWaitCount;
inline constexpr size_t kStallReasonCount = kLeaseWaitCount + 1;
using StallsByReason = std::array<uint64_t, kStallReasonCount>;  // nanoseconds
constexpr const char* stall_reason_name(size_t reason) {
  return reason == kStallRing ? "ring" : kLeaseWaitNames[reason];
}

enum class StallPhase : uint8_t { forward = 0, backward = 1, step = 2, other = 3 };
inline constexpr size_t kStallPhaseCount = 4;
inline constexpr std::array<const char*, kStallPhaseCount> kStallPhaseNames{
    "forward", "backward", "step", "other"};

/// Groups of one session; group 0 is for everything that has none of its own.
inline constexpr uint32_t kStallGroupCount = 24;
inline constexpr uint32_t kStallGroupNameBytes = 56;
inline constexpr const char* kStallGroupOther = "other";
/// Groups of one job, whose sessions may name different ones; more of them count as "other".
inline constexpr size_t kJobStallGroupsMax = 32;

/// The owner of the wait.
struct StallPlace {
  StallPhase phase = StallPhase::other;
  uint32_t group = 0;  // as ClientStalls::group() says
};

struct StallCounters {
  std::atomic<uint64_t> step_wall_ns;
  std::atomic<uint64_t> phase_ns[kStallPhaseCount][kStallReasonCount];
  std::atomic<uint64_t> group_ns[kStallGroupCount][kStallReasonCount];
};

inline void count_stall(StallCounters& counters, StallPlace place, size_t reason, uint64_t ns) {
  const size_t phase = static_cast<size_t>(place.phase) % kStallPhaseCount;
  const size_t group = place.group % kStallGroupCount;
  counters.phase_ns[phase][reason].fetch_add(ns, std::memory_order_relaxed);
  counters.group_ns[group][reason].fetch_add(ns, std::memory_order_relaxed);
}

/// In the session's header: written by the client alone.
struct StallBoard {
  StallCounters counters;
  char group_names[kStallGroupCount][kStallGroupNameBytes];
  std::atomic<uint32_t> group_count;  // names that are there, the first of which is not looked at
};

/// A sum of such words, of at most kJobStallGroupsMax groups.
class Stalls {
 public:
  using ByPhase = std::array<StallsByReason, kStallPhaseCount>;

  Stalls() = default;
  Stalls(uint64_t step_wall_ns, const ByPhase& phase_ns)
      : step_wall_ns_(step_wall_ns), phase_ns_(phase_ns) {}

  void add(const Stalls& other);
  void add(const std::string& group, const StallsByReason& ns);

  uint64_t step_wall_ns() const { return step_wall_ns_; }
  const ByPhase& phase_ns() const { return phase_ns_; }
  const std::map<std::string, StallsByReason>& group_ns() const { return group_ns_; }

 private:
  uint64_t step_wall_ns_ = 0;
  ByPhase phase_ns_{};
  std::map<std::string, StallsByReason> group_ns_;
};

/// Reads what a client has written, which may be anything: names become printable ASCII.
Stalls read_stalls(const StallCounters& counters,
                   const char (&group_names)[kStallGroupCount][kStallGroupNameBytes],
                   uint32_t group_count);

}  // namespace memd
