// Ids of deleted shards, until another shard may have them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace memd {

/// A client keeps the id of each name that it has met, and learns of another session's deletion
/// when it asks for the id. An id that others may know therefore rests until the last of them has
/// ended: nobody gets another shard's bytes under the old name. Owned by Shards, on its thread.
class FreeIds {
 public:
  /// Nobody knows it.
  void add(uint32_t id) { free_.push_back(id); }
  /// These sessions may.
  void rest(uint32_t id, std::set<uint64_t> sessions) {
    if (sessions.empty()) return add(id);
    resting_.emplace(id, std::move(sessions));
  }
  /// At an adoption: the sessions of the daemon before may know each of them.
  void rest_all(const std::set<uint64_t>& sessions) {
    for (const uint32_t id : std::exchange(free_, {})) rest(id, sessions);
  }
  void end_session(uint64_t session_id) {
    for (auto at = resting_.begin(); at != resting_.end();) {
      auto& [id, known_to] = *at;
      known_to.erase(session_id);
      if (known_to.empty()) add(id);
      at = known_to.empty() ? resting_.erase(at) : std::next(at);
    }
  }
  std::optional<uint32_t> take() {
    if (free_.empty()) return std::nullopt;
    const uint32_t id = free_.back();
    free_.pop_back();
    return id;
  }

  size_t resting_count() const { return resting_.size(); }

 private:
  std::vector<uint32_t> free_;  // the last goes first
  std::map<uint32_t, std::set<uint64_t>> resting_;
};

}  // namespace memd
