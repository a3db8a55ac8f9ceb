#include "store/job/scratch.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "store/cache/scratch_names.h"

namespace memd {
namespace {

/// nullptr: there is no such blob any more.
Entry* find_entry(Job& job, const std::string& name) {
  const auto shard_id = job.shards().find(name);
  return shard_id ? job.shards()[*shard_id].value : nullptr;
}

bool stands_still(const Entry& entry) {
  return entry.task_count() == 0 && entry.residency() != Residency::filling &&
         entry.residency() != Residency::draining;
}

bool is_attached(Job& job, uint64_t session_id) {
  const auto& sessions = job.cache().sessions();
  return std::any_of(sessions.begin(), sessions.end(), [session_id](const auto& session) {
    return session->session_id == session_id;
  });
}

}  // namespace

void Scratch::end(uint64_t session_id, uint32_t shard_id) {
  const auto found = parts_.job_of(session_id);
  if (!found.is_ok()) return;
  Job& job = *found.value();
  // The client's word.
  if (shard_id >= job.shards().size() || job.shards()[shard_id].deleted) return;
  Shard& shard = job.shards()[shard_id];
  if (!is_scratch(*shard.value) || scratch_session(shard.name()) != session_id) return;
  Entry& entry = *shard.value;
  job.cache().residencies().settle_pending(entry);
  if (entry.pending() != nullptr) return;
  // From here on nobody reads it; what is written later makes it true again. The ledger comes
  // first: the next daemon finds no bytes of a shard that was never written.
  shard.written = false;
  job.journal().note_shard(shard_id);
  const std::string name(shard.name());
  if (stands_still(entry)) return drop(job, name);
  job.conditions().add(
      [&job, name] {
        const Entry* const waiting = find_entry(job, name);
        return waiting == nullptr || stands_still(*waiting);
      },
      [this, &job, name] { drop(job, name); });
}

void Scratch::drop(Job& job, const std::string& name) const {
  const auto shard_id = job.shards().find(name);
  if (!shard_id) return;
  const Shard& shard = job.shards()[*shard_id];
  if (shard.written || shard.value->pending() != nullptr) return;
  job.drop_gradient(*shard.value, parts_.extents);
  job.cache().waits().wake(*shard.value);
}

void Scratch::remove_ended(Job& job, uint64_t session_id) {
  std::vector<std::string> names;
  for (const Shard& shard : job.shards()) {
    if (shard.deleted || !is_scratch(*shard.value)) continue;
    const auto owner = scratch_session(shard.name());
    if (!owner || !is_attached(job, *owner)) names.emplace_back(shard.name());
  }
  for (const std::string& name : names) remove(job, name, session_id);
}

void Scratch::remove(Job& job, const std::string& name, uint64_t session_id) const {
  const auto is_free = [&job, name] {
    const Entry* const entry = find_entry(job, name);
    return entry == nullptr ||
           (stands_still(*entry) && !job.cache().residencies().is_awaited(*entry));
  };
  const auto remove_now = [this, &job, name, session_id] {
    const auto shard_id = job.shards().find(name);
    if (!shard_id) return;
    job.cache().waiters().fail(
        *job.shards()[*shard_id].value,
        error(StatusCode::not_found, "shard ", job.name(), "/", name, " ended with its session"));
    job.remove(*shard_id, session_id, parts_.extents);
  };
  if (is_free()) return remove_now();
  job.conditions().add(is_free, remove_now);
}

}  // namespace memd
