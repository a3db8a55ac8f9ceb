#include "io/io_scheduler.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace memd {
namespace {

/// By IoPriority. If all classes want a job's turns, demand gets 84 %, prefetch 11 %, state and
/// writeback 2.6 % each; without demand and prefetch, state and writeback half each. Demand is not
/// all: what keeps it waiting may itself wait for state or writeback.
constexpr std::array<uint64_t, 4> kStrides = {1, 8, 32, 32};

/// Long chunks leave room for so many of them at least: with less in flight, the device would wait
/// for the next one.
constexpr uint64_t kLongChunksInFlight = 8;

/// A sync is a turn as well.
uint64_t cost_bytes(uint64_t bytes) { return std::max(bytes, kBlockBytes); }

uint64_t next_chunk_bytes(const Transfer& transfer, uint64_t chunk_bytes) {
  const uint64_t rest_bytes = transfer.request.data.size() - transfer.started_bytes;
  return cost_bytes(std::min(rest_bytes, chunk_bytes));
}

bool is_scrub(const IoRequest& request) { return request.priority == IoPriority::scrub; }

}  // namespace

uint16_t IoScheduler::add_path(const IoPathLimits& limits) {
  MEMD_CHECK_LT(paths_.size(), size_t{UINT16_MAX});
  MEMD_CHECK_GT(limits.depth, 0U);
  paths_.emplace_back(limits);
  for (const auto& [job, weight] : weights_) paths_.back().turns.set_weight(job, weight);
  return static_cast<uint16_t>(paths_.size() - 1);
}

void IoScheduler::set_limits(uint16_t path, const IoPathLimits& limits) {
  paths_.at(path).limits = limits;
  paths_[path].turns.set_quantum(limits.chunk_bytes);
}

void IoScheduler::set_weight(JobId job, JobWeight weight) {
  weights_.erase(job);
  if (weight != JobWeight()) weights_.emplace(job, weight);
  for (Path& path : paths_) path.turns.set_weight(job, weight);
}

bool IoScheduler::Line::is_waiting() const {
  return std::any_of(
      classes.begin(), classes.end(), [](const Class& each) { return !each.waiting.empty(); });
}

void IoScheduler::add(TransferPointer transfer) {
  Path& path = paths_.at(transfer->request.device);
  if (is_scrub(transfer->request)) {
    path.scrubs.push_back(std::move(transfer));
    return;
  }
  path.scrub_in_flight_max = 1;
  path.scrub_alone_count = 0;
  const JobId job = transfer->request.job;
  add_to(path.lines[job], std::move(transfer));
  path.turns.want(job);
}

void IoScheduler::add_to(Line& line, TransferPointer transfer) {
  Class& own = line.classes.at(static_cast<size_t>(transfer->request.priority));
  // A class that wanted nothing for a while has saved nothing up.
  if (own.waiting.empty()) own.turn = std::max(own.turn, line.now);
  own.waiting.push_back(std::move(transfer));
}

size_t IoScheduler::raise(JobId job, std::span<const std::byte> memory) {
  const auto is_in_memory = [memory](std::span<const std::byte> data) {
    // Pointers to different objects have an order only as numbers.
    const auto first = reinterpret_cast<uintptr_t>(memory.data());
    const auto data_first = reinterpret_cast<uintptr_t>(data.data());
    return data_first >= first && data_first + data.size() <= first + memory.size();
  };
  size_t count = 0;
  for (Path& path : paths_) {
    const auto line = path.lines.find(job);
    if (line == path.lines.end()) continue;
    auto& prefetches = line->second.classes[static_cast<size_t>(IoPriority::prefetch)].waiting;
    const auto raised =
        std::stable_partition(prefetches.begin(), prefetches.end(), [&](const auto& transfer) {
          return !is_in_memory(transfer->request.data);
        });
    for (auto it = raised; it != prefetches.end(); ++it, ++count) {
      (*it)->request.priority = IoPriority::demand;
      add_to(line->second, std::move(*it));
    }
    prefetches.erase(raised, prefetches.end());
  }
  return count;
}

IoScheduler::TransferPointer IoScheduler::next(const Refuse& refuse) {
  for (size_t i = 1; i <= paths_.size(); ++i) {
    const size_t index = (last_path_ + i) % paths_.size();
    if (!paths_[index].has_room()) continue;
    TransferPointer found = next_of(paths_[index], refuse);
    if (found == nullptr) continue;
    last_path_ = index;
    return found;
  }
  return nullptr;
}

bool IoScheduler::Path::has_room() const {
  return in_flight_count < limits.depth &&
         in_flight_bytes + limits.chunk_bytes <= limits.in_flight_bytes_max();
}

uint64_t IoScheduler::chunk_bytes(const Transfer& transfer, bool may_be_long) const {
  const IoRequest& request = transfer.request;
  const Path& path = paths_.at(request.device);
  if (!may_be_long || is_scrub(request) || !path.turns.is_alone(request.job))
    return path.limits.chunk_bytes;
  const uint64_t all_bytes = path.limits.in_flight_bytes_max();
  const uint64_t long_bytes = std::min({kChunkBytesMax,
                                        align_down(all_bytes / kLongChunksInFlight, kBlockBytes),
                                        all_bytes - path.in_flight_bytes});
  return std::max(path.limits.chunk_bytes, long_bytes);
}

IoScheduler::TransferPointer IoScheduler::next_of(Path& path, const Refuse& refuse) {
  TransferPointer found = next_of_jobs(path, refuse);
  while (!path.scrubs.empty() && refuse(path.scrubs.front())) path.scrubs.pop_front();
  if (path.scrubs.empty() || path.scrub_in_flight_count >= path.scrub_in_flight_max) return found;
  return found == nullptr || is_turn_of_scrub(path, *found) ? path.scrubs.front() : found;
}

bool IoScheduler::is_turn_of_scrub(Path& path, const Transfer& other) {
  const uint64_t scrub_bytes = next_chunk_bytes(*path.scrubs.front(), path.limits.chunk_bytes);
  if (path.passed_scrub_bytes < kScrubStride * scrub_bytes) return false;
  if (other.request.priority != IoPriority::demand) return true;
  // Once: demand may never end.
  return std::exchange(path.scrub_gave_way, true);
}

bool IoScheduler::has_its_share(const Path& path, JobId job, const Line& line) {
  // Bytes, and not chunks: who moves small ones has as much of the device with more of them.
  return line.in_flight_count > 0 &&
         line.in_flight_bytes >= path.turns.share(job, path.limits.in_flight_bytes_max());
}

IoScheduler::TransferPointer IoScheduler::next_of_jobs(Path& path, const Refuse& refuse) {
  while (const auto job = path.turns.next()) {
    Line& line = path.lines.at(*job);
    if (has_its_share(path, *job, line)) {
      path.turns.hold(*job);
      continue;
    }
    if (TransferPointer found = next_of_line(line, path.limits.chunk_bytes, refuse)) return found;
    path.turns.leave(*job);
    if (line.in_flight_count == 0) path.lines.erase(*job);
  }
  return nullptr;
}

IoScheduler::TransferPointer IoScheduler::next_of_line(Line& line,
                                                       uint64_t chunk_bytes,
                                                       const Refuse& refuse) {
  std::optional<size_t> first;
  uint64_t first_due = 0;
  for (size_t priority = 0; priority < kJobClassCount; ++priority) {
    Class& own = line.classes[priority];
    while (!own.waiting.empty() && refuse(own.waiting.front())) own.waiting.pop_front();
    if (own.waiting.empty()) continue;
    // Others are due when their chunk would end, demand when it begins: so a demanded read that
    // comes now is before all of them.
    uint64_t due = own.turn;
    if (static_cast<IoPriority>(priority) != IoPriority::demand) {
      due += kStrides[priority] * next_chunk_bytes(*own.waiting.front(), chunk_bytes);
    }
    if (first && due >= first_due) continue;
    first = priority;
    first_due = due;
  }
  if (!first) return nullptr;
  line.now = std::max(line.now, first_due);
  return line.classes[*first].waiting.front();
}

void IoScheduler::started(const TransferPointer& transfer, uint64_t bytes) {
  const IoRequest& request = transfer->request;
  Path& path = paths_.at(request.device);
  MEMD_CHECK_LT(path.in_flight_count, path.limits.depth);
  ++path.in_flight_count;
  path.in_flight_bytes += cost_bytes(bytes);
  if (is_scrub(request)) {
    MEMD_CHECK(!path.scrubs.empty() && path.scrubs.front() == transfer);
    if (transfer->is_all_started()) path.scrubs.pop_front();
    path.passed_scrub_bytes = 0;
    path.scrub_gave_way = false;
    ++path.scrub_in_flight_count;
    return;
  }
  const auto priority = static_cast<size_t>(request.priority);
  Line& line = path.lines.at(request.job);
  Class& own = line.classes.at(priority);
  MEMD_CHECK(!own.waiting.empty() && own.waiting.front() == transfer);
  own.turn += kStrides[priority] * cost_bytes(bytes);
  if (transfer->is_all_started()) own.waiting.pop_front();
  ++line.in_flight_count;
  line.in_flight_bytes += cost_bytes(bytes);
  if (!path.scrubs.empty()) path.passed_scrub_bytes += cost_bytes(bytes);
  path.turns.spend(request.job, cost_bytes(bytes));
  if (!line.is_waiting()) path.turns.leave(request.job);
}

void IoScheduler::finished(const IoRequest& request, uint64_t bytes) {
  Path& path = paths_.at(request.device);
  MEMD_CHECK_GT(path.in_flight_count, 0U);
  --path.in_flight_count;
  path.in_flight_bytes -= cost_bytes(bytes);
  if (is_scrub(request)) {
    --path.scrub_in_flight_count;
    if (path.lines.empty() && ++path.scrub_alone_count >= path.scrub_in_flight_max) {
      path.scrub_in_flight_max = std::min(path.scrub_in_flight_max + 1, path.limits.depth);
      path.scrub_alone_count = 0;
    }
    return;
  }
  const auto line = path.lines.find(request.job);
  MEMD_CHECK(line != path.lines.end() && line->second.in_flight_count > 0);
  --line->second.in_flight_count;
  line->second.in_flight_bytes -= cost_bytes(bytes);
  if (line->second.is_waiting()) {
    if (!has_its_share(path, request.job, line->second)) path.turns.resume(request.job);
  } else if (line->second.in_flight_count == 0) {
    path.lines.erase(line);
  }
}

void IoScheduler::for_each_waiting(const std::function<void(const TransferPointer&)>& look) const {
  for (const Path& path : paths_) {
    for (const auto& [job, line] : path.lines) {
      for (const Class& own : line.classes) {
        std::for_each(own.waiting.begin(), own.waiting.end(), look);
      }
    }
    std::for_each(path.scrubs.begin(), path.scrubs.end(), look);
  }
}

}  // namespace memd
