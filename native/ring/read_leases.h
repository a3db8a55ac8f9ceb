// A trainer's leases, and those for reading that it wrote.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ring/fork_watch.h"
#include "ring/read_views.h"

namespace memd {

/// A leased shard's place. Give it back with ClientSession::release(), once, from any thread.
struct LeasedBytes {
  std::byte* data = nullptr;
  uint64_t length_bytes = 0;
  uint64_t generation = 0;
  uint32_t pin_index = 0;
  uint32_t pin = 0;  // kReaderPin or kWriterPin
  uint32_t shard_id = 0;
  bool is_view = false;   // for reading a value: a write to it stays in this process
  bool is_taken = false;  // after take_written(): what was written goes with it
};

/// Leases for reading a value, which are views of the arena. One that was written lives on after
/// its end, if somebody watches its shard. Any thread may call. In a forked child there are none.
class ReadLeases {
 public:
  ReadLeases(std::unique_ptr<ReadViews> views, const ForkWatch& forks)
      : views_(std::move(views)), forks_(forks) {}

  /// Whether a write to them stays in this process: see ReadViews::map_segment().
  bool are_private() const { return views_->is_private(); }
  Status map_segment(uint64_t offset_bytes, uint64_t length_bytes, const OwnedFd& segment) {
    return views_->map_segment(offset_bytes, length_bytes, segment);
  }

  /// See ReadViews::place().
  std::optional<uint64_t> place(const std::byte* data, uint64_t length_bytes) {
    if (forks_.is_in_child()) return std::nullopt;
    return views_->place(data, length_bytes);
  }

  /// The pin is held: gives it its place. False, and it is no view, without memory for that.
  bool begin(uint64_t offset_bytes, LeasedBytes* lease);
  /// Returns false, and the pin stays, if it lives on until take_written().
  bool end(const LeasedBytes& lease);

  /// From now on take_written() has leases of this shard, until unwatch() was called as often.
  /// Writes to others end with the lease.
  void watch(uint32_t shard_id);
  /// Returns what nobody will take any more. The caller releases each.
  std::vector<LeasedBytes> unwatch(uint32_t shard_id);
  /// Whether take_written() has any, of whatever shard.
  bool has_written() const {
    return written_count_.load(std::memory_order_acquire) != 0 && !forks_.is_in_child();
  }
  /// One of the shard that has ended and was written. The caller releases it again: with `is_taken`
  /// for good, without it until the next call.
  std::optional<LeasedBytes> take_written(uint32_t shard_id);
  /// A living one, at `data`, was shown another value by memd: from now on that is no write.
  void note_shown(std::byte* data, uint64_t length_bytes);
  /// Whether a living one, at `data`, was written.
  bool is_written(std::byte* data, uint64_t length_bytes);

 private:
  std::unique_ptr<ReadViews> views_;
  const ForkWatch& forks_;
  std::mutex mutex_;
  std::unordered_map<uint32_t, uint32_t> watched_;  // shards, and by how many
  std::vector<LeasedBytes> written_;
  std::atomic<size_t> written_count_{0};
};

}  // namespace memd
