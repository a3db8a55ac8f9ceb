#include "store/job_load.h"

#include <set>
#include <utility>

#include "base/bulk_bytes.h"
#include "base/check.h"
#include "base/failpoint.h"
#include "store/recovery/adoption.h"
#include "store/step/step_checks.h"

namespace memd {

Status JobLoad::run(const std::function<Status()>& turn) {
  end_turns();  // of another store that this thread has had
  const auto records = store_.commits.load(turn);
  if (!records.is_ok()) return records.status();
  if (Status taken = take_snapshots(); !taken.is_ok()) return taken;
  // First what is on disk: where memory claims the same bytes, memory is wrong.
  for (const JobRecord& record : records.value()) {
    if (Status reserved = reserve_extents(record); !reserved.is_ok()) return reserved;
  }
  store_.sessions.begin_ids(kept_.session_id_max());
  take_ledgers();
  for (const JobRecord& record : records.value()) {
    if (Status loaded = load(record); !loaded.is_ok()) return loaded;
  }
  forget_rest();
  for (const ToRedo& each : to_redo_) {
    MEMD_FAILPOINT("adoption.before_redo");
    each.job->steps().redo(each.step.request, each.step.place);
  }
  return Status::ok();
}

void JobLoad::forget_rest() {
  // The rest belongs to jobs that the disk does not know, or that start from disk.
  for (const auto& [job_id, ledger] : ledgers_) {
    parts_.memory.destroy_claimed(ledger);
    kept_.take_table(job_id);
    kept_.take_tiles(job_id);
    store_.keepsakes.forget_ledger(job_id);
    store_.keepsakes.forget_table(job_id);
    store_.keepsakes.forget_tiles(job_id);
  }
  if (some_claims_unknown_) parts_.memory.destroy_unclaimed();
}

Status JobLoad::take_snapshots() {
  for (LoadedSnapshot& loaded : store_.commits.take_loaded_snapshots()) {
    const RootEntry& job = loaded.entry.job;
    Snapshot snapshot;
    snapshot.entry = loaded.entry;
    snapshot.record = loaded.record;
    std::vector<ExtentRecord> extents;
    if (loaded.record == nullptr) {
      snapshot.is_catalogue_lost = true;
      parts_.notes.push_back(concat("snapshot ",
                                    loaded.entry.name,
                                    " of job ",
                                    job.job_id,
                                    " is lost: ",
                                    loaded.damage.message()));
    } else {
      extents = all_extents(*loaded.record);
      for (const ExtentRecord& extent : extents) {
        const Status pinned = store_.extents.reserve(extent, ExtentHolder::snapshot);
        if (!pinned.is_ok()) return pinned;
      }
    }
    extents.insert(extents.end(), job.catalogue.begin(), job.catalogue.end());
    snapshot.extents = std::make_shared<const std::vector<ExtentRecord>>(std::move(extents));
    snapshot.space = space_of(snapshot);
    parts_.snapshots.add(std::move(snapshot));
    MEMD_FAILPOINT("load.snapshot_pinned");
  }
  return Status::ok();
}

Status JobLoad::reserve_extents(const JobRecord& record) {
  MEMD_FAILPOINT("load.before_job");
  // Another job's by now, maybe; memory knows which are still its own.
  if (record.undurable_since != 0) return Status::ok();
  for (const ExtentRecord& extent : all_extents(record)) {
    if (Status reserved = store_.extents.reserve(extent); !reserved.is_ok()) return reserved;
  }
  MEMD_FAILPOINT("load.extents_reserved");
  return Status::ok();
}

void JobLoad::take_ledgers() {
  while (auto left = kept_.take_ledger()) {
    auto ledger = JobLedger::adopt(std::move(left->fd), left->job_id);
    if (ledger.is_ok()) {
      ledgers_[left->job_id] = std::move(ledger).value();
      continue;
    }
    parts_.notes.push_back(concat("job ",
                                  left->job_id,
                                  " starts from disk, its memory is lost: ",
                                  ledger.status().message()));
    some_claims_unknown_ = true;
    store_.keepsakes.forget_ledger(left->job_id);
  }
}

Status JobLoad::load(const JobRecord& record) {
  std::unique_ptr<Job> job;
  std::vector<ClosedStep> steps;
  if (const auto found = ledgers_.find(record.job_id); found != ledgers_.end()) {
    RememberedJob remembered(record, store_.commits.catalogue_tag(record.job_id), found->second);
    auto adopted = adopt(remembered);
    if (adopted.is_ok()) {
      job = std::move(adopted).value();
      steps = remembered.contents().steps;
      ledgers_.erase(found);
    } else {
      parts_.notes.push_back(concat("job ",
                                    record.name,
                                    " starts from disk, at step ",
                                    record.step,
                                    "; its memory is lost: ",
                                    adopted.status().message()));
      // Those that were taken already are nobody's any more.
      for (const SessionRecord& session : remembered.contents().sessions)
        store_.keepsakes.forget_session(session.session_id);
    }
  }
  if (job == nullptr) {
    auto restored = Job::restore(record);
    if (!restored.is_ok()) return restored.status();
    job = std::move(restored).value();
  }
  parts_.operations.connect(*job);
  Job& known = store_.jobs.put(std::move(job));
  for (const Snapshot* const each : parts_.snapshots.of_job(record.job_id))
    known.admission().add_snapshots(each->space);
  const Snapshot* const before_load = parts_.snapshots.of_load(record.job_id);
  if (before_load != nullptr) go_on_loading(known, *before_load);
  parts_.admissions.apply_weight(record.job_id, known.admission().weight());
  for (ClosedStep& step : steps) to_redo_.push_back({.job = &known, .step = std::move(step)});
  return Status::ok();
}

void JobLoad::go_on_loading(Job& job, const Snapshot& before) {
  job.progress().set_loading(true);
  const std::set<ExtentRecord> kept(before.extents->begin(), before.extents->end());
  SnapshotSpace shared;
  for (const ExtentRecord& extent : job.extents())
    shared.load_shared_bytes += kept.contains(extent) ? extent.length_bytes : 0;
  job.admission().add_snapshots(shared);
}

Result<std::unique_ptr<Job>> JobLoad::adopt(RememberedJob& remembered) {
  if (Status read = remembered.read(store_.pool.segment_bytes(), kept_, store_.keepsakes);
      !read.is_ok())
    return read;
  auto restored = Job::restore(remembered.record(), remembered.shard_ids());
  if (!restored.is_ok()) return restored.status();
  Job& job = *restored.value();
  Adoption adoption({.pool = store_.pool,
                     .io = store_.io,
                     .extents = store_.extents,
                     .keepsakes = store_.keepsakes,
                     .sessions = store_.sessions},
                    remembered,
                    {.shards = job.shards(),
                     .progress = job.progress(),
                     .durable = job.durable(),
                     .ledger = job.kept().ledger(),
                     .journal = job.journal(),
                     .table = job.cache().table(),
                     .slots = job.cache().slots(),
                     .residencies = job.cache().residencies(),
                     .space = job.space(),
                     .tiles = job.tiles(),
                     .host_tiles = job.kept().host_tiles(),
                     .kept = job.kept(),
                     .sessions = job.cache().sessions(),
                     .group = job.cache().group(),
                     .gradient_buckets = job.cache().gradient_buckets(),
                     .durability = job.admission().durability(),
                     .check_staged = [&job](const StepRequest& request) {
                       return check_staged(job.shards(), job.name(), request);
                     }});
  if (Status taken = adoption.run(kept_); !taken.is_ok()) return taken;
  for (const auto& session : job.cache().sessions()) job.cache().plans().begin(*session);
  return restored;
}

}  // namespace memd
