#include "server/rank_calls.h"

#include <utility>

namespace memd {

Status RankCalls::join(uint64_t session_id, const RankPlace& place) const {
  const auto joined = thread_.ask_for_more<bool>(
      kAnswerS, "joining ranks", [thread = &thread_, session_id, place](const auto& reply) {
        const auto job = thread->store().job_of(session_id);
        if (!job.is_ok()) return reply(job.status());
        const Status status =
            job.value()->cache().group().join(session_id, job.value()->name(), place);
        status.is_ok() ? reply(true) : reply(status);
      });
  return joined.status();
}

Result<RanksReport> RankCalls::report(uint64_t session_id) const {
  return thread_.ask_reading<RanksReport>(
      "looking at ranks", [thread = &thread_, session_id](const auto& reply) {
        const auto job = thread->store().job_of(session_id);
        if (!job.is_ok()) return reply(job.status());
        const Ranks& ranks = job.value()->cache().group().ranks();
        if (Status whole = ranks.check_whole(job.value()->name()); !whole.is_ok())
          return reply(whole);
        RanksReport report{.start = ranks.start(), .names = {}, .sessions = {}};
        for (uint32_t rank = 0; rank < ranks.world_size(); ++rank) {
          report.names.push_back(ranks.describe(rank));
          report.sessions.push_back(ranks.session_of(rank));
        }
        reply(std::move(report));
      });
}

Status RankCalls::end_gradients(uint64_t session_id) const {
  const auto ended = thread_.ask<bool>(
      kAnswerS, "ending gradients", [thread = &thread_, session_id](const auto& reply) {
        const Status status = thread->store().gradients().end_of_rank(session_id);
        status.is_ok() ? reply(true) : reply(status);
      });
  return ended.status();
}

Result<std::vector<uint32_t>> RankCalls::made_by_others(uint64_t session_id) const {
  return thread_.ask_for_more<std::vector<uint32_t>>(
      kAnswerS, "listing gradients", [thread = &thread_, session_id](const auto& reply) {
        reply(thread->store().gradients().made_by_other_ranks(session_id));
      });
}

Status RankCalls::drop_gradients(uint64_t session_id,
                                 const std::vector<uint32_t>& shard_ids) const {
  const auto dropped = thread_.ask<bool>(
      kAnswerS,
      "dropping gradients",
      [thread = &thread_, session_id, shard_ids](const auto& reply) {
        const Status status = thread->store().gradients().drop_of_ranks(session_id, shard_ids);
        status.is_ok() ? reply(true) : reply(status);
      });
  return dropped.status();
}

}  // namespace memd
