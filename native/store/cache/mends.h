// Shards of a bucket that a dead writer left torn, while their bytes are read from disk again.
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
  struct Mend {
    std::set<uint32_t> torn;  // pin counters of the shards
    std::vector<Done> done;
  };

  bool contains(const Entry& entry) const { return all_.contains(&entry); }
  /// True where the entry had none: the caller begins to read.
  bool add(const Entry& entry, const std::set<uint32_t>& torn, Done done) {
    const auto [at, is_new] = all_.try_emplace(&entry);
    at->second.torn.insert(torn.begin(), torn.end());
    at->second.done.push_back(std::move(done));
    return is_new;
  }
  Mend take(const Entry& entry) { return std::move(all_.extract(&entry).mapped()); }

 private:
  std::unordered_map<const Entry*, Mend> all_;
};

}  // namespace memd
