#include "ring/read_leases.h"

#include <algorithm>

namespace memd {

bool ReadLeases::begin(uint64_t offset_bytes, LeasedBytes* lease) {
  lease->data = views_->begin(offset_bytes, lease->length_bytes);
  lease->is_view = lease->data != nullptr;
  return lease->is_view;
}

bool ReadLeases::end(const LeasedBytes& lease) {
  if (!lease.is_taken && views_->end_unless_written(lease.data, lease.length_bytes)) return true;
  if (!lease.is_taken) {
    const std::lock_guard lock(mutex_);
    if (watched_.contains(lease.shard_id)) {
      written_.push_back(lease);
      written_count_.store(written_.size(), std::memory_order_release);
      return false;
    }
  }
  views_->end(lease.data, lease.length_bytes);
  return true;
}

void ReadLeases::watch(uint32_t shard_id) {
  const std::lock_guard lock(mutex_);
  ++watched_[shard_id];
}

std::vector<LeasedBytes> ReadLeases::unwatch(uint32_t shard_id) {
  if (forks_.is_in_child()) return {};
  const std::lock_guard lock(mutex_);
  const auto watched = watched_.find(shard_id);
  if (watched == watched_.end() || --watched->second > 0) return {};
  watched_.erase(watched);
  std::vector<LeasedBytes> left;
  std::erase_if(written_, [&](const LeasedBytes& lease) {
    if (lease.shard_id != shard_id) return false;
    left.push_back(lease);
    return true;
  });
  written_count_.store(written_.size(), std::memory_order_release);
  return left;
}

std::optional<LeasedBytes> ReadLeases::take_written(uint32_t shard_id) {
  if (!has_written()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(written_, shard_id, &LeasedBytes::shard_id);
  if (found == written_.end()) return std::nullopt;
  const LeasedBytes taken = *found;
  written_.erase(found);
  written_count_.store(written_.size(), std::memory_order_release);
  return taken;
}

void ReadLeases::note_shown(std::byte* data, uint64_t length_bytes) {
  if (!forks_.is_in_child()) views_->note_shown(data, length_bytes);
}

bool ReadLeases::is_written(std::byte* data, uint64_t length_bytes) {
  return !forks_.is_in_child() && views_->is_written(data, length_bytes);
}

}  // namespace memd
