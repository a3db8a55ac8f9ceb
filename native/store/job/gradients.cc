#include "store/job/gradients.h"

#include <algorithm>
#include <utility>

namespace memd {

Status Gradients::expect_step(uint64_t session_id, const std::vector<StepGroup>& groups) {
  const auto job = parts_.job_of(session_id);
  if (!job.is_ok()) return job.status();
  return job.value()->state().early().expect(session_id, groups);
}

void Gradients::is_final(uint64_t session_id, uint32_t shard_id) {
  const auto job = parts_.job_of(session_id);
  if (!job.is_ok()) return;
  job.value()->state().early().gradient_is_final(session_id, shard_id);
}

void Gradients::unused(uint64_t session_id, uint32_t shard_id) {
  const auto found = parts_.job_of(session_id);
  if (!found.is_ok()) return;
  Job& job = *found.value();
  const Entry* const gradient = job.shards().find_entry(shard_id, Part::gradient);
  if (gradient == nullptr) return;
  for (LeaseWaiter& waiter : job.cache().waiters().take(*gradient, [&](const LeaseWaiter& each) {
         const LeaseRequest& request = each.request();
         return request.session_id == session_id && request.shard_id == shard_id &&
                request.is_expected && !request.for_service;
       })) {
    waiter.refuse(error(StatusCode::deadline, "nobody waits for it any more"));
  }
  drop_in_bucket(job, job.shards()[shard_id].bucket, [&](const Shard& shard) {
    return &shard == &job.shards()[shard_id] && shard.contributors.only() == session_id &&
           shard.is_gradient_unsure;
  });
}

Status Gradients::drop(uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
  const auto found = parts_.job_of(session_id);
  if (!found.is_ok()) return found.status();
  Job& job = *found.value();
  if (shard_ids.empty()) {
    drop(job, session_id);
    return Status::ok();
  }
  const Shards& shards = job.shards();
  const std::set<uint32_t> chosen(shard_ids.begin(), shard_ids.end());
  if (const auto rank = job.cache().group().ranks().rank_of(session_id))
    drop_rank_sums(job, *rank, [&](uint32_t shard_id) { return chosen.contains(shard_id); });
  std::set<uint32_t> buckets;
  for (const uint32_t shard_id : chosen) {
    if (shard_id >= shards.size()) {
      return error(StatusCode::not_found, "job ", job.name(), " has no shard ", shard_id);
    }
    if (shards[shard_id].kind == ShardKind::parameter) buckets.insert(shards[shard_id].bucket);
  }
  for (const uint32_t index : buckets) {
    drop_of_session(job, index, session_id, [&](const Shard& shard) {
      return chosen.contains(shards.id_of(shard));
    });
  }
  return Status::ok();
}

// ---- Of ranks -----------------------------------------------------------------------------------

Result<Job*> Gradients::job_of_rank(uint64_t session_id) const {
  const auto found = parts_.job_of(session_id);
  if (!found.is_ok()) return found.status();
  Job& job = *found.value();
  const Ranks& ranks = job.cache().group().ranks();
  if (!ranks.rank_of(session_id)) {
    return error(
        StatusCode::invalid_argument, "session ", session_id, " is no rank of job ", job.name());
  }
  if (Status whole = ranks.check_whole(job.name()); !whole.is_ok()) return whole;
  return &job;
}

Status Gradients::end_of_rank(uint64_t session_id) {
  const auto found = job_of_rank(session_id);
  if (!found.is_ok()) return found.status();
  JobCache& cache = found.value()->cache();
  Ranks& ranks = cache.group().ranks();
  const uint32_t rank = *ranks.rank_of(session_id);
  ranks.end_gradients(rank);
  // They are in the sums of all ranks; a hint that said so may have found no place in the ring.
  drop_rank_sums(*found.value(), rank, [](uint32_t) { return true; });
  cache.waits().wake_all();
  return Status::ok();
}

Result<std::vector<uint32_t>> Gradients::made_by_other_ranks(uint64_t session_id) {
  const auto found = job_of_rank(session_id);
  if (!found.is_ok()) return found.status();
  Job& job = *found.value();
  JobCache& cache = job.cache();
  const TrainingGroup& group = cache.group();
  std::vector<uint32_t> made;
  for (const uint32_t index : cache.gradient_buckets().list()) {
    for (const uint32_t shard_id : job.shards().bucket(index).shards) {
      const Contributors& contributors = job.shards()[shard_id].contributors;
      if (group.are_all_with(contributors, session_id) && !group.has(contributors, session_id))
        made.push_back(shard_id);
    }
  }
  return made;
}

Status Gradients::drop_of_ranks(uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
  const auto found = job_of_rank(session_id);
  if (!found.is_ok()) return found.status();
  Job& job = *found.value();
  TrainingGroup& group = job.cache().group();
  const std::set<uint32_t> chosen(shard_ids.begin(), shard_ids.end());
  const auto buckets = job.cache().gradient_buckets().list();
  for (const uint32_t index : buckets) {
    drop_in_bucket(job, index, [&](const Shard& shard) {
      return chosen.contains(job.shards().id_of(shard)) &&
             group.are_all_with(shard.contributors, session_id);
    });
  }
  for (uint32_t rank = 0; rank < group.ranks().world_size(); ++rank)
    drop_rank_sums(job, rank, [&](uint32_t shard_id) { return chosen.contains(shard_id); });
  group.ranks().begin_gradients();
  return Status::ok();
}

void Gradients::end_rank_sum(uint64_t session_id, uint32_t shard_id) {
  const auto found = job_of_rank(session_id);
  if (!found.is_ok()) return;
  const uint32_t rank = *found.value()->cache().group().ranks().rank_of(session_id);
  drop_rank_sums(*found.value(), rank, [&](uint32_t each) { return each == shard_id; });
}

void Gradients::drop_rank_sums(Job& job,
                               uint32_t rank,
                               const std::function<bool(uint32_t)>& chosen) {
  RankSums& sums = job.shards().rank_sums();
  for (const uint32_t shard_id : sums.shards_of(rank)) {
    if (!chosen(shard_id)) continue;
    const uint32_t index = job.shards()[shard_id].bucket;
    sums.end(rank, index, shard_id);
    if (!sums.is_empty(rank, index)) continue;
    drop_bytes(
        job, *sums.find(rank, index), [&sums, rank, index] { return sums.is_empty(rank, index); });
  }
}

void Gradients::drop(Job& job, uint64_t session_id) {
  if (const auto rank = job.cache().group().ranks().rank_of(session_id))
    drop_rank_sums(job, *rank, [](uint32_t) { return true; });
  for (const uint32_t index : job.cache().gradient_buckets().list())
    drop_of_session(job, index, session_id, [](const Shard&) { return true; });
  scratch_.remove_ended(job, session_id);
}

void Gradients::drop(Job& job, const std::set<uint32_t>& buckets, const Chosen& chosen) {
  for (const uint32_t index : buckets) drop_in_bucket(job, index, chosen);
}

void Gradients::drop_of_session(Job& job,
                                uint32_t index,
                                uint64_t session_id,
                                const Chosen& chosen) {
  TrainingGroup& group = job.cache().group();
  const auto is_dropped = [&](const Shard& shard) {
    return group.has(shard.contributors, session_id) && chosen(shard);
  };
  // They are told before it is gone: the next daemon might find it neither there nor void.
  for (const uint32_t shard_id : job.shards().bucket(index).shards) {
    const Shard& shard = job.shards()[shard_id];
    if (shard.contributors.seats() == 0 || !is_dropped(shard)) continue;
    for (const uint64_t other : group.sessions_of(shard.contributors)) {
      if (other != session_id)
        group.tell(other, void_gradient(job.name(), shard.name(), session_id));
    }
  }
  drop_in_bucket(job, index, is_dropped);
}

void Gradients::drop_in_bucket(Job& job, uint32_t index, const Chosen& chosen) {
  ++looked_at_count_;
  Bucket& bucket = job.shards().bucket(index);
  bool any = false;
  bool all = true;
  for (const uint32_t shard_id : bucket.shards) {
    Shard& shard = job.shards()[shard_id];
    if (!shard.contributors.empty() && chosen(shard)) {
      job.state().early().forget_gradient(shard_id);
      shard.contributors = {};
      job.cache().waits().wake(*bucket.gradient);
      job.journal().note_shard(shard_id);
      any = true;
    }
    all = all && shard.contributors.empty();
  }
  if (all) job.cache().gradient_buckets().remove(index);
  if (!any || !all) return;
  drop_bytes(job, *bucket.gradient, [&job, index] {
    const ShardIds& held = job.shards().bucket(index).shards;
    return std::none_of(held.begin(), held.end(), [&job](uint32_t id) {
      return !job.shards()[id].contributors.empty();
    });
  });
}

void Gradients::drop_bytes(Job& job, Entry& entry, std::function<bool()> is_unused) {
  const auto settled = [&entry] {
    return entry.task_count() == 0 && entry.residency() != Residency::filling &&
           entry.residency() != Residency::draining;
  };
  if (settled()) return job.drop_gradient(entry, parts_.extents);
  job.conditions().add(settled, [this, &job, &entry, is_unused = std::move(is_unused)] {
    if (is_unused()) job.drop_gradient(entry, parts_.extents);
  });
}

}  // namespace memd
