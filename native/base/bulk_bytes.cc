#include "base/bulk_bytes.h"

#ifdef MEMD_COUNT_BYTES

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <optional>
#include <utility>

#include "base/check.h"

namespace memd {
namespace {

constexpr size_t kPlaceCount = std::size(kOwedPlaces);

/// Bytes that one thread has moved.
struct Turn {
  bool is_counted = false;    // the thread has a store
  uint64_t moved_bytes = 0;   // in this turn
  uint32_t worker_depth = 0;  // of WorkerBytes that live
  uint32_t owed_depth = 0;    // of Owed that live; the outermost is whose bytes they are
  OwedPlace owed{};
  uint64_t owed_bytes = 0;
};
thread_local Turn turn;

std::array<std::atomic<uint64_t>, kPlaceCount> owed_max;
std::atomic<uint64_t> moved_elsewhere{0};

}  // namespace

void count_moved(uint64_t bytes) {
  if (!turn.is_counted || turn.worker_depth > 0) {
    moved_elsewhere.fetch_add(bytes, std::memory_order_relaxed);
    return;
  }
  if (turn.owed_depth > 0) {
    turn.owed_bytes += bytes;
    return;
  }
  turn.moved_bytes += bytes;
  if (turn.moved_bytes <= kTurnBytesMax) return;
  internal::CheckedValues said;
  said.stream() << "(the server thread has moved " << turn.moved_bytes
                << " bytes in a turn, the last " << bytes << " at once; workers have to do it)";
  internal::check_failed(__FILE__, __LINE__, "turn.moved_bytes <= kTurnBytesMax", said.view());
}

void end_turn() {
  turn.is_counted = true;
  turn.moved_bytes = 0;
}

void end_turns() { turn.is_counted = false; }

uint64_t moved_elsewhere_bytes() { return moved_elsewhere; }

uint64_t owed_bytes_max(OwedPlace place) { return owed_max[static_cast<size_t>(place)]; }

Owed::Owed(OwedPlace place) {
  if (turn.owed_depth++ > 0) return;
  turn.owed = place;
  turn.owed_bytes = 0;
}

Owed::~Owed() {
  if (--turn.owed_depth > 0) return;
  std::atomic<uint64_t>& most = owed_max[static_cast<size_t>(turn.owed)];
  uint64_t before = most.load();
  while (before < turn.owed_bytes && !most.compare_exchange_weak(before, turn.owed_bytes)) {
  }
}

WorkerBytes::WorkerBytes() { ++turn.worker_depth; }
WorkerBytes::~WorkerBytes() { --turn.worker_depth; }

}  // namespace memd

#endif
