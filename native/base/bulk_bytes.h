// How native/store copies, fills and hashes: one place, so that a test build can count what the
// server thread moves. That thread decides for all jobs; while it moves one job's bytes, the others
// stand still.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/checksum.h"
#include "base/units.h"

namespace memd {

/// Bytes that the server thread may move in one turn: some 10 µs. Test builds abort above it.
inline constexpr uint64_t kTurnBytesMax = 64_KiB;

/// Places that still move more on the server thread than a turn may. One leaves the table when
/// workers do its work; nothing may join (tests/native/bulk_bytes_test.cc prints the table and
/// holds its length).
enum class OwedPlace : uint8_t {
  journal_written,
};
struct OwedRow {
  OwedPlace place;
  const char* name;
  const char* what;
};
inline constexpr OwedRow kOwedPlaces[] = {
    {OwedPlace::journal_written, "journal_written", "a job's layout, and the request of a step"},
};

#ifdef MEMD_COUNT_BYTES

/// Counts bytes that this thread is about to move, and aborts when a turn has moved too many.
void count_moved(uint64_t bytes);
/// The calling thread is the server thread, and begins another turn.
void end_turn();
/// The calling thread has no store any more.
void end_turns();
/// Bytes that threads without a store, workers above all, have moved since the process started.
uint64_t moved_elsewhere_bytes();
/// By place, since the process started: the most of any one use.
uint64_t owed_bytes_max(OwedPlace place);

/// While it lives, what the thread moves counts for this place and not for the turn.
class Owed {
 public:
  explicit Owed(OwedPlace place);
  ~Owed();
  Owed(const Owed&) = delete;
  Owed& operator=(const Owed&) = delete;
};

/// While it lives, the thread does a worker's work: any number of bytes.
class WorkerBytes {
 public:
  WorkerBytes();
  ~WorkerBytes();
  WorkerBytes(const WorkerBytes&) = delete;
  WorkerBytes& operator=(const WorkerBytes&) = delete;
};

#else

inline void count_moved(uint64_t) {}
inline void end_turn() {}
inline void end_turns() {}

struct Owed {
  explicit Owed(OwedPlace) {}
  ~Owed() {}
};
struct WorkerBytes {
  WorkerBytes() {}
  ~WorkerBytes() {}
};

#endif

/// As memcpy(); `bytes` may be 0.
inline void copy_bytes(void* into, const void* from, size_t bytes) {
  if (bytes == 0) return;
  count_moved(bytes);
  std::memcpy(into, from, bytes);
}

/// `bytes` may be 0.
inline void zero_bytes(void* into, size_t bytes) {
  if (bytes == 0) return;
  count_moved(bytes);
  std::memset(into, 0, bytes);
}

/// One field of packed bytes. Not counted: a scan that reads fields moves nothing.
template <typename T>
T field_at(const void* from) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 64);
  T field;
  std::memcpy(&field, from, sizeof(T));
  return field;
}

/// See extent_checksum().
inline uint64_t hash_extent(std::span<const std::byte> bytes, ExtentAddress address) {
  count_moved(bytes.size());
  return extent_checksum(bytes, address);
}

/// See record_checksum().
inline uint64_t hash_record(std::span<const std::byte> bytes) {
  count_moved(bytes.size());
  return record_checksum(bytes);
}

}  // namespace memd
