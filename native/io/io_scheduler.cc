#include "io/io_scheduler.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/units.h"

namespace memd {
namespace {

/// By IoPriority. Of a path that all of them want demand gets 84 %, prefetch 11 %, state and
/// writeback 2.6 % each, scrub 0.2 %; without demand and prefetch, state and writeback half each.
/// Demand is not all: what keeps it waiting may itself wait for state or writeback, of this job or
/// another.
constexpr std::array<uint64_t, kIoPriorityCount> kStrides = {1, 8, 32, 32, 512};

uint64_t next_chunk_bytes(const Transfer& transfer, uint64_t chunk_bytes) {
  const uint64_t rest_bytes = transfer.request.data.size() - transfer.started_bytes;
  // A sync is a turn as well.
  return std::max(std::min(rest_bytes, chunk_bytes), kBlockBytes);
}

}  // namespace

uint16_t IoScheduler::add_path(const IoPathLimits& limits) {
  MEMD_CHECK_LT(paths_.size(), size_t{UINT16_MAX});
  MEMD_CHECK_GT(limits.depth, 0U);
  paths_.push_back({.limits = limits, .classes = {}, .in_flight_count = 0, .now = 0});
  return static_cast<uint16_t>(paths_.size() - 1);
}

void IoScheduler::add(TransferPointer transfer) {
  Path& path = paths_.at(transfer->request.device);
  add_to(path, std::move(transfer));
}

void IoScheduler::add_to(Path& path, TransferPointer transfer) {
  Class& own = path.classes.at(static_cast<size_t>(transfer->request.priority));
  // A class that wanted nothing for a while has saved nothing up.
  if (own.waiting.empty()) own.turn = std::max(own.turn, path.now);
  own.waiting.push_back(std::move(transfer));
}

size_t IoScheduler::raise(std::span<const std::byte> memory) {
  const auto is_in_memory = [memory](std::span<const std::byte> data) {
    // Of different objects pointers have an order only as numbers.
    const auto first = reinterpret_cast<uintptr_t>(memory.data());
    const auto data_first = reinterpret_cast<uintptr_t>(data.data());
    return data_first >= first && data_first + data.size() <= first + memory.size();
  };
  size_t count = 0;
  for (Path& path : paths_) {
    auto& prefetches = path.classes[static_cast<size_t>(IoPriority::prefetch)].waiting;
    const auto raised =
        std::stable_partition(prefetches.begin(), prefetches.end(), [&](const auto& transfer) {
          return !is_in_memory(transfer->request.data);
        });
    for (auto it = raised; it != prefetches.end(); ++it, ++count) {
      (*it)->request.priority = IoPriority::demand;
      add_to(path, std::move(*it));
    }
    prefetches.erase(raised, prefetches.end());
  }
  return count;
}

IoScheduler::TransferPointer IoScheduler::next(
    const std::function<bool(const TransferPointer&)>& refuse) {
  for (size_t i = 1; i <= paths_.size(); ++i) {
    const size_t index = (last_path_ + i) % paths_.size();
    if (paths_[index].in_flight_count >= paths_[index].limits.depth) continue;
    TransferPointer found = next_of(paths_[index], refuse);
    if (found == nullptr) continue;
    last_path_ = index;
    return found;
  }
  return nullptr;
}

IoScheduler::TransferPointer IoScheduler::next_of(
    Path& path, const std::function<bool(const TransferPointer&)>& refuse) {
  std::optional<size_t> first;
  uint64_t first_due = 0;
  for (size_t priority = 0; priority < kIoPriorityCount; ++priority) {
    Class& own = path.classes[priority];
    while (!own.waiting.empty() && refuse(own.waiting.front())) own.waiting.pop_front();
    if (own.waiting.empty()) continue;
    // Others are due when their chunk would end, demand when it begins: so a demanded read that
    // comes now is before all of them.
    uint64_t due = own.turn;
    if (static_cast<IoPriority>(priority) != IoPriority::demand) {
      due += kStrides[priority] * next_chunk_bytes(*own.waiting.front(), path.limits.chunk_bytes);
    }
    if (first && due >= first_due) continue;
    first = priority;
    first_due = due;
  }
  if (!first) return nullptr;
  path.now = std::max(path.now, first_due);
  return path.classes[*first].waiting.front();
}

void IoScheduler::started(const TransferPointer& transfer, uint64_t bytes) {
  Path& path = paths_.at(transfer->request.device);
  const auto priority = static_cast<size_t>(transfer->request.priority);
  Class& own = path.classes.at(priority);
  MEMD_CHECK(!own.waiting.empty() && own.waiting.front() == transfer);
  MEMD_CHECK_LT(path.in_flight_count, path.limits.depth);
  own.turn += kStrides[priority] * std::max(bytes, kBlockBytes);
  if (transfer->is_all_started()) own.waiting.pop_front();
  ++path.in_flight_count;
}

void IoScheduler::finished(uint16_t path) {
  MEMD_CHECK_GT(paths_.at(path).in_flight_count, 0U);
  --paths_[path].in_flight_count;
}

void IoScheduler::for_each_waiting(const std::function<void(const TransferPointer&)>& look) const {
  for (const Path& path : paths_) {
    for (const Class& own : path.classes) {
      std::for_each(own.waiting.begin(), own.waiting.end(), look);
    }
  }
}

}  // namespace memd
