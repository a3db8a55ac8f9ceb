#include "store/step/operations.h"

#include <utility>

#include "base/check.h"

namespace memd {

void Operations::enqueue(const char* kind, uint64_t now_ns, Start start) {
  const Open open{.kind = kind, .since_ns = now_ns, .phase = ""};
  if (is_running_) {
    waiting_.push_back({.open = open, .start = std::move(start)});
    return;
  }
  is_running_ = true;
  running_ = open;
  start(Status::ok());
}

void Operations::end() {
  MEMD_CHECK(is_running_);
  if (waiting_.empty()) {
    is_running_ = false;
    return;
  }
  running_ = waiting_.front().open;
  const Start start = std::move(waiting_.front().start);
  waiting_.pop_front();
  start(Status::ok());
}

std::vector<Operations::Open> Operations::open() const {
  std::vector<Open> all;
  if (is_running_) all.push_back(running_);
  for (const Waiting& each : waiting_) all.push_back(each.open);
  return all;
}

std::vector<Operations::Start> Operations::take_waiting() {
  std::vector<Start> starts;
  for (Waiting& each : waiting_) starts.push_back(std::move(each.start));
  waiting_.clear();
  return starts;
}

}  // namespace memd
