#include "store/step/step_checks.h"

#include <set>
#include <string>
#include <vector>

#include "base/failpoint.h"

namespace memd {
namespace {

Status check_parameter(const StepParts& parts,
                       const StepRequest& request,
                       const AdamSettings& settings,
                       uint32_t shard_id) {
  const StateParts& job = parts.job;
  const Entry* const gradient = job.shards.find_entry(shard_id, Part::gradient);
  if (gradient == nullptr) {
    return error(
        StatusCode::not_found, "job ", job.job_name, " has no parameter with shard id ", shard_id);
  }
  const Shard& shard = job.shards[shard_id];
  // Only where it is refused: a step has as many as the model.
  const auto who = [&] { return concat("shard ", job.job_name, "/", shard.name()); };
  if (!parts.group.are_all_with(shard.contributors, request.session_id)) {
    return error(StatusCode::invalid_argument,
                 who(),
                 " has no gradient from this session; run backward first");
  }
  if (!shard.written) {
    return error(StatusCode::invalid_argument, who(), " was never written; write its first value");
  }
  if (gradient->slot() != nullptr &&
      job.slots.pins(*gradient->slot(), shard.index_in_bucket).has_writers()) {
    return error(StatusCode::invalid_argument, who(), ": its gradient is still leased for writing");
  }
  // In tier host, a parameter that was declared without optimizer state has no memory for it yet.
  Bucket& bucket = job.shards.bucket(shard.bucket);
  if (bucket.is_host() && !bucket.is_updated) {
    if (Status room = job.admission.make_room_for_state(bucket, false); !room.is_ok()) return room;
    job.admission.begin_updates(bucket);
  }
  if (settings.amsgrad && !shard.keeps_maximum) {
    return error(StatusCode::invalid_argument,
                 who(),
                 " is to be updated with amsgrad, and its optimizer state has no max_exp_avg_sq; "
                 "load a state that has it, reset the state, or leave amsgrad off");
  }
  return Status::ok();
}

Status check_pair(const Shards& shards,
                  const std::string& job_name,
                  uint32_t staged,
                  uint32_t buffer) {
  const ShardSpec from = shards[staged].spec();
  const ShardSpec to = shards[buffer].spec();
  if (from.kind == ShardKind::buffer && to.kind == ShardKind::buffer && from.dtype == to.dtype &&
      from.shape == to.shape) {
    return Status::ok();
  }
  return error(StatusCode::invalid_argument,
               "buffers ",
               from.name,
               " and ",
               to.name,
               " of job ",
               job_name,
               " differ in kind, shape or dtype");
}

}  // namespace

Status check_step(const StepParts& parts, const StepRequest& request) {
  std::vector<bool> seen(parts.job.shards.size());
  for (const StepGroup& group : request.groups) {
    for (const uint32_t shard_id : group.shard_ids) {
      const Entry* const gradient = parts.job.shards.find_entry(shard_id, Part::gradient);
      if (gradient != nullptr && seen[shard_id]) {
        return error(StatusCode::invalid_argument,
                     "shard ",
                     parts.job.job_name,
                     "/",
                     parts.job.shards[shard_id].name(),
                     " is in two groups of one step");
      }
      Status status = check_parameter(parts, request, group.settings, shard_id);
      if (!status.is_ok()) return status;
      seen[shard_id] = true;
    }
  }
  return check_staged(parts.job.shards, parts.job.job_name, request);
}

Status check_not_loading(const StepParts& parts) {
  if (!parts.progress.is_loading()) return Status::ok();
  return error(StatusCode::in_use,
               "job ",
               parts.job.job_name,
               ": a checkpoint is being loaded into it, and a step would be of half of that; close "
               "the step when the load is done");
}

Status check_staged(const Shards& shards, const std::string& job_name, const StepRequest& request) {
  std::set<uint32_t> seen;
  for (const auto& [staged, buffer] : request.staged_buffers) {
    const bool known = staged < shards.size() && buffer < shards.size() && staged != buffer &&
                       !shards[staged].deleted && !shards[buffer].deleted;
    if (!known)
      return error(
          StatusCode::not_found, "job ", job_name, " has no buffers ", staged, ", ", buffer);
    if (!seen.insert(staged).second || !seen.insert(buffer).second) {
      return error(StatusCode::invalid_argument,
                   "buffers ",
                   shards[staged].name(),
                   " and ",
                   shards[buffer].name(),
                   " of job ",
                   job_name,
                   ": one of them is named twice in a step");
    }
    if (Status status = check_pair(shards, job_name, staged, buffer); !status.is_ok())
      return status;
  }
  return Status::ok();
}

bool is_same_step(const StepRequest& earlier, const StepRequest& request) {
  const auto shards_of = [](const StepRequest& step) {
    std::set<uint32_t> shard_ids;
    for (const StepGroup& group : step.groups)
      shard_ids.insert(group.shard_ids.begin(), group.shard_ids.end());
    return shard_ids;
  };
  return shards_of(earlier) == shards_of(request) &&
         std::set(earlier.staged_buffers.begin(), earlier.staged_buffers.end()) ==
             std::set(request.staged_buffers.begin(), request.staged_buffers.end());
}

// The step's gradients are gone: any that are there came after it, and "ok" would lose them.
Status check_repeated(const StepParts& parts, const StepRequest& request) {
  const StateParts& job = parts.job;
  const auto refusal = [&](const Shard& shard, const char* what) {
    return error(StatusCode::fenced,
                 "this session has closed step ",
                 request.step,
                 " of job ",
                 job.job_name,
                 " already, and ",
                 what,
                 " of shard ",
                 shard.name(),
                 " came after it; the job stands at step ",
                 job.progress.committed_step(),
                 ": connect anew and resume from there");
  };
  for (const StepGroup& group : request.groups) {
    for (const uint32_t shard_id : group.shard_ids) {
      if (shard_id >= job.shards.size()) continue;
      const Shard& shard = job.shards[shard_id];
      if (parts.group.has(shard.contributors, request.session_id))
        return refusal(shard, "a gradient");
    }
  }
  for (const auto& [staged_id, buffer_id] : request.staged_buffers) {
    if (staged_id >= job.shards.size() || job.shards[staged_id].deleted) continue;
    const Shard& staged = job.shards[staged_id];
    job.residencies.settle_pending(*staged.value);
    if (staged.written) return refusal(staged, "the bytes");
  }
  return Status::ok();
}

Status check_start(const StepParts& parts, const StepRequest& request) {
  const StateParts& job = parts.job;
  if (!job.progress.stopped().is_ok()) return job.progress.stopped();
  if (Status status = job.extents.check_writable(); !status.is_ok()) return status;
  if (Status status = job.lost.check(job.job_name); !status.is_ok()) return status;
  const uint64_t step_next = job.progress.committed_step() + 1;
  if (request.step == 0 || request.step == step_next) return Status::ok();
  return error(StatusCode::fenced,
               "this session closes step ",
               request.step,
               " of job ",
               job.job_name,
               ", whose next step is ",
               step_next,
               ": another session has trained it meanwhile; connect anew and resume from there");
}

// Bytes that a writer still holds are half-written: no commit may contain them.
Status check_writers(const StepParts& parts) {
  const StateParts& job = parts.job;
  const Entry* const written = job.slots.written_parameter();
  if (written == nullptr) return Status::ok();
  return error(StatusCode::invalid_argument,
               "shard ",
               job.shards.describe(*written),
               " is still leased for writing; let go of the tensor first");
}

}  // namespace memd
