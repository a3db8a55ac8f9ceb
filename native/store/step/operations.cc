#include "store/step/operations.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/check.h"

namespace memd {

void Operations::enqueue(const char* kind, uint64_t now_ns, Start start, size_t at_once_max) {
  const Open open{.kind = kind, .since_ns = now_ns, .phase = "", .runs = true};
  waiting_.push_back({.open = open, .at_once_max = at_once_max, .start = std::move(start)});
  if (waiting_.size() == 1) start_next();
}

void Operations::end() {
  MEMD_CHECK(!running_.empty());
  // They are of one kind, and nobody tells them apart.
  running_.pop_front();
  start_next();
}

bool Operations::may_start(const Waiting& next) const {
  if (running_.empty()) return true;
  return std::string_view(next.open.kind) == running_.front().kind &&
         running_.size() < std::min(next.at_once_max, at_once_max_);
}

void Operations::start_next() {
  std::vector<Start> starts;
  while (!waiting_.empty() && may_start(waiting_.front())) {
    Waiting& next = waiting_.front();
    at_once_max_ = running_.empty() ? next.at_once_max : std::min(at_once_max_, next.at_once_max);
    running_.push_back(next.open);
    starts.push_back(std::move(next.start));
    waiting_.pop_front();
  }
  // All of them run by now, so that none but the last can end with the job.
  for (const Start& start : starts) start(Status::ok());
}

std::vector<Operations::Open> Operations::open() const {
  std::vector<Open> all(running_.begin(), running_.end());
  for (const Waiting& each : waiting_) {
    all.push_back(each.open);
    all.back().runs = false;
  }
  return all;
}

std::vector<Operations::Start> Operations::take_waiting() {
  std::vector<Start> starts;
  for (Waiting& each : waiting_) starts.push_back(std::move(each.start));
  waiting_.clear();
  return starts;
}

}  // namespace memd
