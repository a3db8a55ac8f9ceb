#include "ring/stalls.h"

#include <algorithm>
#include <cstring>

namespace memd {

void Stalls::add(const std::string& group, const StallsByReason& ns) {
  const size_t kept_for_other = group_ns_.contains(kStallGroupOther) ? 0 : 1;
  const bool fits = group_ns_.contains(group) || group == kStallGroupOther ||
                    group_ns_.size() + kept_for_other < kJobStallGroupsMax;
  StallsByReason& sum = group_ns_[fits ? group : std::string(kStallGroupOther)];
  for (size_t reason = 0; reason < kStallReasonCount; ++reason) sum[reason] += ns[reason];
}

void Stalls::add(const Stalls& other) {
  step_wall_ns_ += other.step_wall_ns_;
  for (size_t phase = 0; phase < kStallPhaseCount; ++phase) {
    for (size_t reason = 0; reason < kStallReasonCount; ++reason)
      phase_ns_[phase][reason] += other.phase_ns_[phase][reason];
  }
  for (const auto& [group, ns] : other.group_ns_) add(group, ns);
}

Stalls read_stalls(const StallCounters& counters,
                   const char (&group_names)[kStallGroupCount][kStallGroupNameBytes],
                   uint32_t group_count) {
  const auto sample = [](const std::atomic<uint64_t>(&words)[kStallReasonCount]) {
    StallsByReason ns{};
    for (size_t reason = 0; reason < kStallReasonCount; ++reason)
      ns[reason] = words[reason].load(std::memory_order_relaxed);
    return ns;
  };
  Stalls::ByPhase phases{};
  for (size_t phase = 0; phase < kStallPhaseCount; ++phase)
    phases[phase] = sample(counters.phase_ns[phase]);
  Stalls stalls(counters.step_wall_ns.load(std::memory_order_relaxed), phases);
  stalls.add(kStallGroupOther, sample(counters.group_ns[0]));
  for (uint32_t group = 1; group < std::min(group_count, kStallGroupCount); ++group) {
    char text[kStallGroupNameBytes];
    std::memcpy(text, group_names[group], sizeof(text));
    std::string name(text, strnlen(text, sizeof(text)));
    std::replace_if(name.begin(), name.end(), [](char c) { return c <= ' ' || c > '~'; }, '?');
    stalls.add(name.empty() ? kStallGroupOther : name, sample(counters.group_ns[group]));
  }
  return stalls;
}

}  // namespace memd
