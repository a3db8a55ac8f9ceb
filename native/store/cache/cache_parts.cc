#include "store/cache/cache_parts.h"

#include <algorithm>

#include "base/check.h"

namespace memd {

void CacheParts::lose(const Entry& entry, size_t replica, const Status& why) const {
  if (entry.kind() == EntryKind::gradient) return;
  for (const uint32_t shard_id : shards.shards_in(entry, replica))
    lost.add(shard_id, std::string(shards[shard_id].name()), why);
}

bool CacheParts::is_lost(const Entry& entry) const {
  if (lost.count() == 0 || entry.kind() == EntryKind::gradient) return false;
  if (entry.kind() == EntryKind::bytes) return lost.contains(entry.owner());
  const ShardIds& held = shards.bucket(entry.owner()).shards;
  return std::any_of(held.begin(), held.end(), [this](uint32_t id) { return lost.contains(id); });
}

void CacheParts::note_shard(uint32_t shard_id) const {
  ledger.note_shard(shard_id, shards[shard_id].written, shards[shard_id].contributors);
}

const std::shared_ptr<Session>& CacheParts::session(uint64_t session_id) const {
  const auto found = std::find_if(sessions.begin(), sessions.end(), [&](const auto& session) {
    return session->session_id == session_id;
  });
  MEMD_CHECK(found != sessions.end());
  return *found;
}

}  // namespace memd
