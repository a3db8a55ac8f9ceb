#include "sim_clock.h"

namespace sim {
namespace {

constexpr Nanoseconds kLaunch = 5'000;
constexpr int64_t kMemoryBytesPerNanosecond = 4'000;
constexpr int64_t kFlopPerNanosecond = 400'000;

constexpr int64_t divide_up(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

}  // namespace

Nanoseconds BusyTimes::take(Nanoseconds earliest, Nanoseconds duration) {
  auto begin = earliest;
  auto next = ends_.upper_bound(begin);
  if (next != ends_.begin()) begin = std::max(begin, std::prev(next)->second);
  for (; next != ends_.end() && next->first < begin + duration; ++next) begin = next->second;
  auto end = begin + duration;
  if (next != ends_.end() && next->first == end) {
    end = next->second;
    next = ends_.erase(next);
  }
  if (next != ends_.begin() && std::prev(next)->second == begin)
    std::prev(next)->second = end;
  else
    ends_[begin] = end;
  return begin;
}

Cost SimClock::kernel(int64_t bytes, int64_t flop) {
  auto work =
      std::max(divide_up(bytes, kMemoryBytesPerNanosecond), divide_up(flop, kFlopPerNanosecond));
  return {Engine::compute, kLaunch + work, bytes};
}

Cost SimClock::copy(Engine engine, int64_t bytes) const {
  return {engine, divide_up(bytes * 1'000, copy_bytes_per_second_ / 1'000'000), bytes};
}

Nanoseconds SimClock::time_of(Actor stream) const {
  auto found = times_.find(stream);
  return found == times_.end() ? 0 : found->second;
}

void SimClock::hold(Actor stream, Nanoseconds time) {
  times_[stream] = std::max(time_of(stream), time);
}

void SimClock::run(Actor stream, const std::string& name, const Cost& cost) {
  if (cost.duration == 0) return;
  auto& engine = engines_.at(device_of(stream)).at(static_cast<size_t>(cost.engine));
  auto begin = engine.take(time_of(stream), cost.duration);
  times_[stream] = begin + cost.duration;
  note(name, stream, cost, begin);
}

Nanoseconds SimClock::wait(Actor host, Nanoseconds now, Nanoseconds time) {
  if (time > now) note("wait", host, {Engine::host, time - now, 0}, now);
  return std::max(now, time);
}

void SimClock::record(bool is_on) {
  is_recording_ = is_on;
  if (is_on) timeline_.clear();
}

void SimClock::note(const std::string& name, Actor actor, const Cost& cost, Nanoseconds begin) {
  if (is_recording_) timeline_.push_back({name, actor, cost, begin});
}

}  // namespace sim
