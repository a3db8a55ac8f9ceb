#include "store/step/step_shards.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/failpoint.h"

namespace memd {
namespace {

bool is_still(const Entry& entry) {
  return entry.task_count() == 0 && entry.residency() != Residency::filling &&
         entry.residency() != Residency::draining;
}

}  // namespace

std::vector<SummedGradients> summed_gradients(const StepParts& parts, const StepRequest& request) {
  std::map<uint64_t, SummedGradients> sums;  // by what the shards say
  for (const StepGroup& group : request.groups) {
    for (const uint32_t shard_id : group.shard_ids) {
      const Contributors& contributors = parts.job.shards[shard_id].contributors;
      if (contributors.only() == request.session_id) continue;
      SummedGradients& sum = sums[contributors.word()];
      if (sum.shard_ids.empty()) sum.session_ids = parts.group.sessions_of(contributors);
      sum.shard_ids.push_back(shard_id);
    }
  }
  std::vector<SummedGradients> all;
  all.reserve(sums.size());
  for (auto& [word, sum] : sums) all.push_back(std::move(sum));
  return all;
}

void StepShards::seal() {
  const StateParts& job = parts_.job;
  size_t shard_count = 0;
  for (const StepGroup& group : request_.groups) shard_count += group.shard_ids.size();
  group_of_.reserve(shard_count);
  for (size_t group = 0; group < request_.groups.size(); ++group) {
    for (const uint32_t shard_id : request_.groups[group].shard_ids) {
      group_of_[shard_id] = group;
      buckets_.insert(job.shards[shard_id].bucket);
      job.shards[shard_id].contributors = Contributors::sealed();
      parts_.journal.note_shard(shard_id);
    }
  }
  for (const SummedGradients& sum : request_.summed) {
    for (const uint32_t shard_id : sum.shard_ids) summed_[shard_id] = &sum;
  }
  for (const uint32_t index : buckets_) {
    job.admission.begin_updates(job.shards.bucket(index));
    Entry& value = *job.shards.bucket(index).value;
    value.accept_step();
    job.table.withdraw(value);
    job.waits.wake(value);
    job.waits.wake(*job.shards.bucket(index).gradient);
  }
}

std::vector<uint32_t> StepShards::buckets_without_maxima() const {
  std::set<uint32_t> found;
  for (const auto& [shard_id, group] : group_of_) {
    const uint32_t bucket = parts_.job.shards[shard_id].bucket;
    if (request_.groups[group].settings.amsgrad && !parts_.job.shards.bucket(bucket).keeps_maxima)
      found.insert(bucket);
  }
  return {found.begin(), found.end()};
}

const AdamSettings* StepShards::settings_of(uint32_t shard_id) const {
  const auto group = group_of_.find(shard_id);
  return group == group_of_.end() ? nullptr : &request_.groups[group->second].settings;
}

std::optional<WaitsFor> StepShards::before(const LeaseRequest& request,
                                           const Entry& entry,
                                           bool is_undoing) const {
  if (is_past_ || !buckets_.contains(entry.owner())) return std::nullopt;
  const bool is_own =
      !request.for_service && parts_.group.are_together(request_.session_id, request.session_id);
  if (is_own && !group_of_.contains(request.shard_id) && !entry.is_in_step()) return std::nullopt;
  // A step that an earlier daemon has begun is as good as begun.
  const bool has_begun = !held_.empty() || is_redo_;
  if (!is_own && !has_begun) return std::nullopt;
  const bool can_be_read = is_own && has_begun && entry.is_uncommitted() && !is_undoing;
  if (can_be_read && request.mode == LeaseMode::read) return std::nullopt;
  return is_own && request.mode == LeaseMode::read ? WaitsFor::update : WaitsFor::step;
}

// ---- Holding ------------------------------------------------------------------------------------

bool StepShards::are_settled() const {
  const Shards& shards = parts_.job.shards;
  for (const uint32_t id : parts_.job.residencies.busy_ids()) {
    const Entry* const entry = shards.entry(id);
    if (entry == nullptr || space_use_of(*entry) == SpaceUse::gradient) continue;
    // A parameter that this step does not touch may well be fetched meanwhile.
    const bool fetched_only =
        entry->kind() == EntryKind::parameter && !buckets_.contains(entry->owner());
    if (fetched_only ? entry->residency() == Residency::draining : !is_still(*entry)) return false;
  }
  return std::all_of(buckets_.begin(), buckets_.end(), [&](uint32_t index) {
    return is_still(*shards.bucket(index).gradient);
  });
}

void StepShards::hold(const StagedBuffers& staged) {
  const StateParts& job = parts_.job;
  for (const uint32_t index : buckets_) {
    held_.push_back(job.shards.bucket(index).value);
    held_.push_back(job.shards.bucket(index).gradient);
  }
  staged.for_each_entry([this](Entry* entry) { held_.push_back(entry); });
  for (Entry* const entry : held_) {
    parts_.job.residencies.begin_task(*entry);
    entry->begin_step();
  }
}

void StepShards::release() {
  MEMD_FAILPOINT("step.letting_go");
  for (Entry* const entry : held_) {
    if (!entry->is_uncommitted()) parts_.job.residencies.end_task(*entry);
    entry->end_step();
    parts_.job.waits.wake(*entry);
  }
  held_.clear();
  parts_.group.end_step();
  end_ahead();
  is_past_ = true;
}

// ---- The update ---------------------------------------------------------------------------------

// Published where there is room, or something goes for it that is used later; a fetch brings it up
// otherwise.
void StepShards::make_slot(Entry& value) const {
  const StateParts& job = parts_.job;
  if (value.slot() != nullptr) return;
  const uint64_t distance = parts_.plans.distance(request_.session_id, value.id());
  const auto make = [&] { return job.slots.make(value.bytes(), job.shards.shard_count(value)); };
  auto slot = make();
  while (slot == nullptr && (job.memory->grow_arena() ||
                             (distance != kNeverUsed &&
                              parts_.room.evict_at_once_for(
                                  {.bytes = value.bytes(), .distance_min = distance + 1})))) {
    slot = make();
  }
  if (slot == nullptr) return;
  value.place(std::move(slot));
  job.residencies.move(value, Residency::absent, Residency::filling);
}

void StepShards::publish_bucket(const Bucket& bucket) const {
  const StateParts& job = parts_.job;
  Entry& value = *bucket.value;
  for (const uint32_t shard_id : bucket.shards)
    job.shards[shard_id].is_uncommitted = group_of_.contains(shard_id);
  value.show_uncommitted();
  if (value.residency() == Residency::filling)
    job.residencies.move(value, Residency::filling, Residency::clean);
  job.residencies.end_task(value);
  job.waits.wake(value);
  // If it is not resident, it may be brought up now.
  if (!value.is_resident()) job.policy.look_again_at(value.id());
  job.policy.want_look_ahead();
  MEMD_FAILPOINT("step.bucket_published");
}

void StepShards::drop_gradient(const Bucket& bucket) {
  const StateParts& job = parts_.job;
  Entry& gradient = *bucket.gradient;
  // Others may add to the gradient of a shard that the step leaves.
  const bool is_whole = std::all_of(
      bucket.shards.begin(), bucket.shards.end(), [this](uint32_t id) { return contains(id); });
  if (!is_whole || std::erase(held_, &gradient) == 0) return;
  without_gradient_.insert(bucket.value->owner());
  job.residencies.end_task(gradient);
  gradient.end_step();
  parts_.gate.drop_gradient_bytes(gradient);
}

// ---- The commit ---------------------------------------------------------------------------------

void StepShards::end_ahead() const {
  for (const auto& [shard_id, group] : group_of_)
    parts_.job.shards[shard_id].is_uncommitted = false;
}

void StepShards::note_slots() const {
  for (const uint32_t index : buckets_) {
    const Entry& value = *parts_.job.shards.bucket(index).value;
    if (value.is_resident()) parts_.job.slots.note(value);
  }
}

void StepShards::publish_values() const {
  const StateParts& job = parts_.job;
  for (const uint32_t index : buckets_) {
    Entry& value = *job.shards.bucket(index).value;
    value.end_accepted_step();
    job.table.withdraw(value);
    job.table.publish(value);
    job.waits.wake(value);
  }
}

// ---- Undoing ------------------------------------------------------------------------------------

void StepShards::withdraw_uncommitted() const {
  parts_.group.end_step();
  parts_.job.table.withdraw_uncommitted();
}

bool StepShards::are_uncommitted_still() const {
  return std::none_of(held_.begin(), held_.end(), [](const Entry* entry) {
    return entry->is_uncommitted() && entry->task_count() != 0;
  });
}

void StepShards::drop_new_values() const {
  const StateParts& job = parts_.job;
  for (const uint32_t index : buckets_) {
    Entry& value = *job.shards.bucket(index).value;
    if (value.bytes() == 0) continue;
    if (value.residency() == Residency::filling)
      job.residencies.move(value, Residency::filling, Residency::absent);
    if (value.is_resident()) job.residencies.move(value, value.residency(), Residency::absent);
    if (value.slot() != nullptr) job.slots.retire(value.take_slot());
  }
}

void StepShards::unseal(uint32_t shard_id) const {
  Shard& shard = parts_.job.shards[shard_id];
  const auto found = summed_.find(shard_id);
  shard.contributors = found == summed_.end() ? Contributors::one(request_.session_id)
                                              : parts_.group.of(found->second->session_ids);
  const uint64_t only = shard.contributors.only();
  if (found == summed_.end() || only == 0 || parts_.session(only) != nullptr) return;
  for (const uint64_t other : found->second->session_ids)
    parts_.group.tell(other, void_gradient(parts_.job.job_name, shard.name(), only));
}

bool StepShards::is_gradient_over(const Shard& shard) const {
  if (!contains(parts_.job.shards.id_of(shard))) return false;
  if (without_gradient_.contains(shard.bucket)) return true;
  return shard.contributors.only() != 0 && parts_.session(shard.contributors.only()) == nullptr;
}

void StepShards::unseal() const {
  for (const auto& [shard_id, group] : group_of_) {
    unseal(shard_id);
    parts_.job.waits.wake(*parts_.job.shards.find_entry(shard_id, Part::gradient));
    parts_.journal.note_shard(shard_id);
  }
}

}  // namespace memd
