// Shards of a bucket that a dead writer left torn, until they are whole again.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "store/cache/entry.h"

namespace memd {

/// The unit is an entry, which is draining meanwhile. Owned by its Job; the server thread calls
/// everything; nothing blocks.
class Mends {
 public:
  /// Shards, by their pin counters.
  struct Torn {
    std::set<uint32_t> on_disk;  // what the disk has of them is read again
    std::set<uint32_t> nowhere;  // zeroed
  };

  bool contains(const Entry& entry) const { return all_.contains(&entry); }
  /// True where the entry had none: the caller begins.
  bool add(const Entry& entry, const Torn& torn, Done done) {
    const auto [at, is_new] = all_.try_emplace(&entry);
    Mend& mend = at->second;
    mend.torn.on_disk.insert(torn.on_disk.begin(), torn.on_disk.end());
    mend.torn.nowhere.insert(torn.nowhere.begin(), torn.nowhere.end());
    mend.done.push_back(std::move(done));
    return is_new;
  }
  /// Those that nobody mends yet.
  Torn take_torn(const Entry& entry) { return std::exchange(all_.at(&entry).torn, {}); }
  bool has_torn(const Entry& entry) const {
    const Torn& torn = all_.at(&entry).torn;
    return !torn.on_disk.empty() || !torn.nowhere.empty();
  }
  /// It is over: who waits for it.
  std::vector<Done> take(const Entry& entry) {
    return std::move(all_.extract(&entry).mapped().done);
  }

 private:
  struct Mend {
    Torn torn;
    std::vector<Done> done;
  };
  std::unordered_map<const Entry*, Mend> all_;
};

}  // namespace memd
