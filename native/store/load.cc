// ShardStore at start: jobs from disk, and from the memory that outlived the daemon before; and
// what it writes for the next one.
#include <map>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "base/units.h"
#include "store/recovery/adoption.h"
#include "store/recovery/remembered_job.h"
#include "store/shard_store.h"
#include "store/step/step_checks.h"

namespace memd {

Status ShardStore::load(const std::function<Status()>& turn, KeptDescriptors* kept_descriptors) {
  end_turns();  // of another store that this thread has had
  const auto records = commits_.load(turn);
  if (!records.is_ok()) return records.status();
  // First what is on disk: where memory claims the same bytes, memory is wrong.
  for (const JobRecord& record : records.value()) {
    if (Status reserved = reserve_extents(record); !reserved.is_ok()) return reserved;
  }
  Inheritance kept(kept_descriptors);
  bool some_claims_unknown = false;
  sessions_.begin_ids(kept.session_id_max());
  Ledgers ledgers = take_ledgers(kept, some_claims_unknown);
  std::vector<ToRedo> to_redo;
  for (const JobRecord& record : records.value()) {
    if (Status loaded = load_job(record, ledgers, kept, to_redo); !loaded.is_ok()) return loaded;
  }
  // The rest belongs to jobs that the disk does not know, or that start from disk.
  for (const auto& [job_id, ledger] : ledgers) {
    destroy_claimed(*ledger);
    kept.take_table(job_id);
    kept.take_tiles(job_id);
    keepsakes_.forget_ledger(job_id);
    keepsakes_.forget_table(job_id);
    keepsakes_.forget_tiles(job_id);
  }
  if (some_claims_unknown) destroy_unclaimed();
  for (const ToRedo& each : to_redo) {
    MEMD_FAILPOINT("adoption.before_redo");
    each.job->steps().redo(each.step.request, each.step.place);
  }
  return Status::ok();
}

Status ShardStore::reserve_extents(const JobRecord& record) {
  MEMD_FAILPOINT("load.before_job");
  // Another job's by now, maybe; memory knows which are still its own.
  if (record.undurable_since != 0) return Status::ok();
  for (const ExtentRecord& extent : all_extents(record)) {
    if (Status reserved = extents_.reserve(extent); !reserved.is_ok()) return reserved;
  }
  MEMD_FAILPOINT("load.extents_reserved");
  return Status::ok();
}

ShardStore::Ledgers ShardStore::take_ledgers(Inheritance& kept, bool& some_claims_unknown) {
  Ledgers ledgers;
  while (auto left = kept.take_ledger()) {
    auto ledger = Ledger::adopt(std::move(left->fd), left->job_id);
    const Status readable = ledger.is_ok() ? ledger.value()->check_claims() : ledger.status();
    if (readable.is_ok()) {
      ledgers[left->job_id] = std::move(ledger).value();
      continue;
    }
    load_notes_.push_back(concat(
        "job ", left->job_id, " starts from disk, its memory is lost: ", readable.message()));
    some_claims_unknown = true;
    keepsakes_.forget_ledger(left->job_id);
  }
  return ledgers;
}

Status ShardStore::load_job(const JobRecord& record,
                            Ledgers& ledgers,
                            Inheritance& kept,
                            std::vector<ToRedo>& to_redo) {
  std::unique_ptr<Job> job;
  std::vector<ClosedStep> steps;
  if (const auto found = ledgers.find(record.job_id); found != ledgers.end()) {
    RememberedJob remembered(record, commits_.catalogue_tag(record.job_id), *found->second);
    auto adopted = adopt(remembered, found->second, kept);
    if (adopted.is_ok()) {
      job = std::move(adopted).value();
      steps = remembered.contents().steps;
      ledgers.erase(found);
    } else {
      load_notes_.push_back(concat("job ",
                                   record.name,
                                   " starts from disk, at step ",
                                   record.step,
                                   "; its memory is lost: ",
                                   adopted.status().message()));
      // Those that were taken already are nobody's any more.
      for (const SessionRecord& session : remembered.contents().sessions)
        keepsakes_.forget_session(session.session_id);
    }
  }
  if (job == nullptr) {
    auto restored = Job::restore(record);
    if (!restored.is_ok()) return restored.status();
    job = std::move(restored).value();
  }
  connect(*job);
  Job& known = jobs_.put(std::move(job));
  apply_weight(record.job_id, known.admission().weight());
  for (ClosedStep& step : steps) to_redo.push_back({.job = &known, .step = std::move(step)});
  return Status::ok();
}

Result<std::unique_ptr<Job>> ShardStore::adopt(RememberedJob& remembered,
                                               std::unique_ptr<Ledger>& ledger,
                                               Inheritance& kept) {
  if (Status read = remembered.read(pool_.segment_bytes(), kept, keepsakes_); !read.is_ok())
    return read;
  auto restored = Job::restore(remembered.record(), remembered.shard_ids());
  if (!restored.is_ok()) return restored.status();
  Job& job = *restored.value();
  Adoption adoption({.pool = pool_,
                     .io = io_,
                     .extents = extents_,
                     .keepsakes = keepsakes_,
                     .sessions = sessions_},
                    remembered,
                    {.shards = job.shards(),
                     .progress = job.progress(),
                     .durable = job.durable(),
                     .journal = job.journal(),
                     .table = job.cache().table(),
                     .slots = job.cache().slots(),
                     .residencies = job.cache().residencies(),
                     .space = job.space(),
                     .tiles = job.tiles(),
                     .kept = job.kept(),
                     .sessions = job.cache().sessions(),
                     .durability = job.admission().durability(),
                     .check_staged = [this, &job](const StepRequest& request) {
                       return check_staged(job.shards(), job.name(), request);
                     }});
  if (Status taken = adoption.run(ledger, kept); !taken.is_ok()) return taken;
  for (const auto& session : job.cache().sessions()) job.cache().plans().begin(*session);
  return restored;
}

void ShardStore::destroy_claimed(const Ledger& ledger) {
  const auto claims = ledger.claims();
  MEMD_CHECK(claims.is_ok());  // checked when it was adopted
  for (const SegmentClaim& claim : claims.value()) {
    if (auto segment = pool_.take_kept(claim.id)) add_to_pool(std::move(*segment));
  }
}

void ShardStore::destroy_unclaimed() {
  for (const uint64_t id : pool_.kept_ids()) add_to_pool(std::move(*pool_.take_kept(id)));
}

}  // namespace memd
