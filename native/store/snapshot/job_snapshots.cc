#include "store/snapshot/job_snapshots.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"
#include "base/free_on_worker.h"
#include "store/format/block_bytes.h"
#include "store/snapshot/job_replacement.h"

namespace memd {
namespace {

// Each some 100 ns.
constexpr size_t kPinsATurn = 64;

SnapshotInfo info_of(const Snapshot& snapshot) {
  return {.job_id = snapshot.entry.job.job_id,
          .name = snapshot.entry.name,
          .step = snapshot.entry.step,
          .created_s = snapshot.entry.created_s,
          .bytes = snapshot.space.bytes,
          .extent_count = snapshot.extents->size(),
          .is_lost = snapshot.is_catalogue_lost,
          .lost_shards = {snapshot.lost_shards.begin(), snapshot.lost_shards.end()}};
}

}  // namespace

struct JobSnapshots::Creation {
  Job& job;
  const SnapshotRequest request;
  const Made made;
  Snapshot snapshot{};
  std::vector<BlockBytes> blocks{};  // of its catalogue
  Status decoded{};
  size_t pinned_count = 0;
};

struct JobSnapshots::Restoring {
  Job& job;
  const Made made;
  uint64_t snapshot_id = 0;
  std::unique_ptr<Job> fresh{};  // the job of then, which nobody else knows yet
  Status built{};
};

// ---- Making one ---------------------------------------------------------------------------------

std::optional<Result<SnapshotInfo>> JobSnapshots::answer_early(
    const Job& job, const SnapshotRequest& request) const {
  if (job.ending() != nullptr) {
    return error(StatusCode::unavailable, "job ", job.name(), " ", job.ending());
  }
  if (!job.progress().stopped().is_ok()) return job.progress().stopped();
  if (request.name.empty() || request.name.size() > kSnapshotNameBytesMax) {
    return error(StatusCode::invalid_argument,
                 "a snapshot's name has 1 to ",
                 kSnapshotNameBytesMax,
                 " bytes; this one has ",
                 request.name.size());
  }
  const auto ended = ended_early_.find(request.session_id);
  if (ended != ended_early_.end() && ended->second == request.name) {
    return error(StatusCode::invalid_argument,
                 "the session has ended ",
                 request.name,
                 " already, and nothing is loaded; begin another load");
  }
  if (const Snapshot* const held = snapshots_.find(job.job_id(), request.name)) {
    if (held->entry.number == request.number && request.number != 0) return info_of(*held);
    return error(StatusCode::already_exists,
                 "job ",
                 job.name(),
                 " has a snapshot ",
                 request.name,
                 " already, of step ",
                 held->entry.step,
                 "; choose another name, or drop that one (memd snapshot drop)");
  }
  if (snapshots_.of_job(job.job_id()).size() >= kSnapshotsOfJobMax) {
    return error(StatusCode::capacity,
                 "job ",
                 job.name(),
                 " has as many snapshots as a job may have; drop some (memd snapshot list): ",
                 kSnapshotsOfJobMax);
  }
  return std::nullopt;
}

Status JobSnapshots::check_load(const Job& job, const SnapshotRequest& request) const {
  const bool is_load = request.session_id != 0;
  if (is_load != is_load_name(request.name)) {
    return error(StatusCode::invalid_argument,
                 is_load ? "a load's snapshot is named load/, date and time in UTC, and 12 "
                           "hexadecimal digits: "
                         : "names of this form are those of snapshots that sessions make before "
                           "they load a checkpoint; choose another one than ",
                 request.name);
  }
  if (job.progress().is_loading()) {
    return error(StatusCode::in_use,
                 "job ",
                 job.name(),
                 ": a checkpoint is being loaded into it, and a snapshot would be of half of that; "
                 "try again when the load is done");
  }
  return is_load ? check_alone(job, request.session_id) : Status::ok();
}

Status JobSnapshots::check_alone(const Job& job, uint64_t session_id) {
  const Ranks& ranks = job.cache().group().ranks();
  bool is_attached = false;
  size_t others_count = 0;
  for (const auto& session : job.cache().sessions()) {
    const bool is_own = session->session_id == session_id;
    is_attached |= is_own;
    // Other ranks wait for the one that loads.
    const bool is_rank = ranks.rank_of(session_id) && ranks.rank_of(session->session_id);
    others_count += is_own || is_rank ? 0 : 1;
  }
  if (!is_attached) return error(StatusCode::fenced, "the session has ended: ", session_id);
  if (others_count == 0) return Status::ok();
  return error(StatusCode::in_use,
               "job ",
               job.name(),
               " has other sessions, which would see a load half-way; close them first: ",
               others_count);
}

void JobSnapshots::create(const SnapshotRequest& request, Made made) {
  Job* const job = parts_.jobs.find(request.job_id);
  if (job == nullptr) {
    return made(error(StatusCode::not_found, "there is no job with id ", request.job_id));
  }
  if (const auto early = answer_early(*job, request)) return made(*early);
  if (Status load = check_load(*job, request); !load.is_ok()) return made(load);
  // A snapshot writes tier host, which otherwise needs no room on disk.
  if (job->shards().declared().has_host_tier()) {
    if (Status room = job->admission().check_next_snapshot(); !room.is_ok()) return made(room);
  }
  // A step that is closed from here on would come behind the snapshot, and be gone with the load.
  if (request.session_id != 0) job->progress().set_loading(true, request.session_id);
  // Next to each other in the job's line: no step begins between them.
  const auto synced = std::make_shared<Status>();
  job->steps().sync_all_tiers(
      [synced](const Status& status, const StepReport&) { *synced = status; });
  auto creation = std::make_shared<Creation>(
      Creation{.job = *job, .request = request, .made = std::move(made)});
  operations_.enqueue(*job, "snapshot", [this, creation, synced](const Status& turn) {
    if (!turn.is_ok()) return creation->made(turn);
    synced->is_ok() ? begin(creation) : finish(creation, *synced);
  });
}

void JobSnapshots::begin(const CreationPointer& creation) {
  Job& job = creation->job;
  if (const auto early = answer_early(job, creation->request)) return finish(creation, *early);
  job.operations().set_phase("reads the catalogue");
  MEMD_FAILPOINT("snapshot.synced");
  const RootEntry* const entry = parts_.commits.root_entry(job.job_id());
  MEMD_CHECK(entry != nullptr);
  MEMD_CHECK_EQ(job.durable().catalogue().undurable_since(), uint64_t{0});
  MEMD_CHECK_EQ(job.durable().catalogue().step(), job.progress().committed_step());
  creation->snapshot.entry = {.job = *entry,
                              .name = creation->request.name,
                              .step = job.progress().committed_step(),
                              .created_s = creation->request.created_s,
                              .number = creation->request.number};
  read_catalogue(creation);
}

// The snapshot names what a restart would read: the bytes on disk, and not memory's idea of them.
void JobSnapshots::read_catalogue(const CreationPointer& creation) {
  const std::vector<ExtentRecord>& extents = creation->snapshot.entry.job.catalogue;
  std::vector<BlockBytes>& blocks = creation->blocks;
  if (blocks.size() == extents.size()) return decode(creation);
  const ExtentRecord& extent = extents[blocks.size()];
  blocks.emplace_back(uint64_t{extent.length_bytes});
  parts_.extents.read(extent,
                      blocks.back().span(),
                      {.job = JobId{creation->job.job_id()}},
                      concat("the catalogue of job ", creation->job.name()),
                      [this, creation](const Status& status) {
                        status.is_ok() ? read_catalogue(creation) : finish(creation, status);
                      });
}

void JobSnapshots::decode(const CreationPointer& creation) {
  const RootEntry& entry = creation->snapshot.entry.job;
  // Copied once, hashed and decoded.
  parts_.workers.submit(
      {.job = JobId{entry.job_id}, .bytes = 4 * entry.catalogue_bytes, .kind = WorkKind::bytes},
      [creation] {
        Snapshot& snapshot = creation->snapshot;
        std::vector<std::byte> bytes;
        for (const BlockBytes& block : creation->blocks)
          bytes.insert(bytes.end(), block.span().begin(), block.span().end());
        creation->blocks.clear();
        bytes.resize(std::min<uint64_t>(bytes.size(), snapshot.entry.job.catalogue_bytes));
        auto record = decode_job(bytes);
        creation->decoded = record.status();
        if (!record.is_ok()) return;
        std::vector<ExtentRecord> extents = all_extents(record.value());
        const std::vector<ExtentRecord>& own = snapshot.entry.job.catalogue;
        extents.insert(extents.end(), own.begin(), own.end());
        snapshot.extents = std::make_shared<const std::vector<ExtentRecord>>(std::move(extents));
        snapshot.record = std::make_shared<const JobRecord>(std::move(record).value());
        snapshot.space = space_of(snapshot);
      },
      [this, creation] { decoded(creation); });
}

void JobSnapshots::decoded(const CreationPointer& creation) {
  if (!creation->decoded.is_ok()) return finish(creation, creation->decoded);
  Job& job = creation->job;
  SnapshotSpace more = creation->snapshot.space;
  // The job uses all of it but its catalogue, until its next commit.
  if (more.load_bytes != 0) {
    more.load_shared_bytes = more.load_bytes;
    for (const ExtentRecord& extent : creation->snapshot.entry.job.catalogue)
      more.load_shared_bytes -= extent.length_bytes;
  }
  if (Status room = job.admission().check_snapshots(more); !room.is_ok()) {
    return finish(creation, room);
  }
  // From here on nobody else gets the room.
  job.admission().add_snapshots(more);
  job.operations().set_phase("pins extents");
  pin(creation);
}

void JobSnapshots::pin(const CreationPointer& creation) {
  const std::vector<ExtentRecord>& extents = *creation->snapshot.extents;
  const size_t end = std::min(creation->pinned_count + kPinsATurn, extents.size());
  for (; creation->pinned_count < end; ++creation->pinned_count)
    parts_.extents.pin_held(extents[creation->pinned_count]);
  if (end == extents.size()) return commit(creation);
  creation->job.conditions().go_on([this, creation] { pin(creation); });
}

void JobSnapshots::commit(const CreationPointer& creation) {
  MEMD_FAILPOINT("snapshot.pinned");
  creation->job.operations().set_phase("commits");
  parts_.commits.add_snapshot(creation->snapshot.entry, [this, creation](const Status& status) {
    if (!status.is_ok()) return unpin(creation, status);
    MEMD_FAILPOINT("snapshot.committed");
    finish(creation, info_of(snapshots_.add(std::move(creation->snapshot))));
  });
}

// If a write failed, the root on disk may list it: then nothing is written until a restart, which
// finds that out.
void JobSnapshots::unpin(const CreationPointer& creation, const Status& why) {
  const std::vector<ExtentRecord>& extents = *creation->snapshot.extents;
  for (size_t i = 0; i < kPinsATurn && creation->pinned_count > 0; ++i)
    parts_.extents.release(extents[--creation->pinned_count], ExtentHolder::snapshot);
  if (creation->pinned_count > 0) {
    return creation->job.conditions().go_on([this, creation, why] { unpin(creation, why); });
  }
  creation->job.admission().remove_snapshots(creation->snapshot.space);
  finish(creation, why);
}

void JobSnapshots::finish(const CreationPointer& creation, const Result<SnapshotInfo>& answer) {
  const uint64_t job_id = creation->job.job_id();
  if (creation->request.session_id != 0 && !answer.is_ok())
    creation->job.progress().set_loading(false);
  if (creation->snapshot.record != nullptr) end(std::move(creation->snapshot));
  creation->made(answer);
  operations_.end(job_id);
}

// ---- Going back to one --------------------------------------------------------------------------

Status JobSnapshots::check_unused(const Job& job) const {
  const size_t count = job.cache().sessions().size();
  if (count == 0) return check_not_streamed(job);
  return error(StatusCode::in_use,
               "job ",
               job.name(),
               " is in use; end its trainers first, before it goes back to a snapshot: sessions "
               "attached ",
               count);
}

void JobSnapshots::restore(uint64_t job_id, const std::string& name, Made made) {
  Job* const job = parts_.jobs.find(job_id);
  if (job == nullptr) {
    return made(error(StatusCode::not_found, "there is no job with id ", job_id));
  }
  if (job->ending() != nullptr) {
    return made(error(StatusCode::unavailable, "job ", job->name(), " ", job->ending()));
  }
  if (Status unused = check_unused(*job); !unused.is_ok()) return made(unused);
  if (snapshots_.find(job_id, name) == nullptr) return made(no_such(*job, name));
  job->set_ending("is being restored");
  // Once that is on disk, the job needs its memory no more to be what it is.
  const auto synced = std::make_shared<Status>();
  job->steps().sync_all_tiers(
      [synced](const Status& status, const StepReport&) { *synced = status; });
  operations_.enqueue(
      *job, "restore", [this, job, name, synced, made = std::move(made)](const Status& turn) {
        if (!turn.is_ok()) return made(turn);
        job->set_ending("is being restored");  // an operation before this one may have given up
        job->conditions().add(
            [job] { return !job->cache().activities().any(); },
            [this, job, name, synced, made] { begin_restore(*job, name, *synced, made); });
      });
}

void JobSnapshots::take_back(uint64_t job_id, Made made) {
  Job* const job = parts_.jobs.find(job_id);
  MEMD_CHECK(job != nullptr && job->cache().sessions().empty());
  constexpr const char* kEnding = "goes back to what it was before a load that broke off";
  job->set_ending(kEnding);
  operations_.enqueue(*job, "restore", [this, job, made = std::move(made)](const Status& turn) {
    if (!turn.is_ok()) return made(turn);
    const Snapshot* const load = snapshots_.of_load(job->job_id());
    if (load == nullptr) {
      job->set_ending(nullptr);
      made(error(StatusCode::not_found, "job ", job->name(), " has nothing to go back to"));
      return operations_.end(job->job_id());
    }
    job->set_ending(kEnding);  // an operation before this one may have given up
    // Tensors that are still sent or received lie in its memory.
    job->conditions().add(
        [job] { return !job->cache().activities().any() && check_not_streamed(*job).is_ok(); },
        [this, job, name = std::string(load->entry.name), made] {
          begin_restore(*job, name, Status::ok(), made);
        });
  });
}

void JobSnapshots::begin_restore(Job& job,
                                 const std::string& name,
                                 const Status& synced,
                                 const Made& made) {
  const auto restoring = std::make_shared<Restoring>(Restoring{.job = job, .made = made});
  const Snapshot* const snapshot = snapshots_.find(job.job_id(), name);
  if (snapshot == nullptr) return refuse(restoring, no_such(job, name));
  // Its memory alone may have its last steps, so it is kept while a commit may still be made. A job
  // that was stopped or has lost shards makes none, and this is its way on.
  const bool is_at_end =
      !job.progress().stopped().is_ok() || synced.code() == StatusCode::integrity;
  if (!synced.is_ok() && !is_at_end) return refuse(restoring, synced);
  // A load's has what its job had: lost shards, too, which stop nobody from reading the others.
  const bool is_whole =
      is_load_name(name) || (!snapshot->is_catalogue_lost && snapshot->lost_shards.empty());
  if (snapshot->record == nullptr || !is_whole) {
    return refuse(restoring,
                  error(StatusCode::integrity,
                        "snapshot ",
                        name,
                        " of job ",
                        job.name(),
                        " is not whole any more (memd snapshot list); choose another one"));
  }
  restoring->snapshot_id = snapshot->id;
  job.operations().set_phase("builds the job of then");
  parts_.workers.submit(
      {.job = JobId{job.job_id()}, .bytes = snapshot->space.memory_bytes, .kind = WorkKind::bytes},
      [restoring, record = snapshot->record] {
        auto fresh = Job::restore(*record);
        restoring->built = fresh.status();
        if (fresh.is_ok()) restoring->fresh = std::move(fresh).value();
      },
      [this, restoring] { built(restoring); });
}

void JobSnapshots::built(const RestoringPointer& restoring) {
  Job& job = restoring->job;
  if (!restoring->built.is_ok()) return refuse(restoring, restoring->built);
  Job& fresh = *restoring->fresh;
  fresh.admission().take_terms(job.admission());
  // The load goes, and the snapshot with it: that needs no room.
  const bool is_taken_back = is_load_name(snapshots_.find(restoring->snapshot_id)->entry.name);
  if (Status room = fresh.admission().check_snapshots(job.space().snapshots());
      !room.is_ok() && !is_taken_back) {
    return refuse(restoring, room);
  }
  if (Status room = check_memory(*restoring); !room.is_ok()) return refuse(restoring, room);
  if (Status writable = parts_.extents.check_writable(); !writable.is_ok()) {
    return refuse(restoring, writable);
  }
  job.operations().set_phase("commits");
  // Else the next daemon would take the memory of now for that of then.
  job.kept().ledger().give_up();
  MEMD_FAILPOINT("snapshot.before_restore");
  const std::string& name = snapshots_.find(restoring->snapshot_id)->entry.name;
  parts_.commits.commit_gone_back(
      job.job_id(), name, fresh.durable(), [this, restoring](const Status& status, double) {
        committed(restoring, status);
      });
}

// Once the restore is committed, it can't be refused. A job without memory is checked when it gets
// some. Segments of the arena stay in the arena.
Status JobSnapshots::check_memory(const Restoring& restoring) const {
  const Job& job = restoring.job;
  const JobMemory* const memory = job.memory();
  if (memory == nullptr) return Status::ok();
  const HostNeeded needed =
      Admission::host_needed(restoring.fresh->shards().declared(), memory->segment_bytes());
  if (needed.fits(*memory)) return Status::ok();
  return error(StatusCode::capacity,
               "job ",
               job.name(),
               " cannot go back to that snapshot: its other shards keep the memory that the "
               "snapshot's tier host needs; export the snapshot instead (memd snapshot export): ",
               needed.text(),
               "; host_bytes ",
               memory->bytes(),
               ", free for tier host ",
               memory->host_bytes_max());
}

void JobSnapshots::committed(const RestoringPointer& restoring, const Status& status) {
  Job& job = restoring->job;
  if (status.is_ok()) {
    MEMD_FAILPOINT("snapshot.restored");
    const Snapshot* const kept = snapshots_.find(restoring->snapshot_id);
    MEMD_CHECK(kept != nullptr);
    list_last(job, *kept);
    return go_back(restoring, std::move(restoring->fresh), info_of(*kept));
  }
  // The job is what the disk says, with a ledger again.
  auto again = Job::restore(job.durable().record());
  if (!job.progress().stopped().is_ok() || !again.is_ok()) return refuse(restoring, status);
  end(std::move(restoring->fresh));
  go_back(restoring, std::move(again).value(), status);
}

void JobSnapshots::list_last(Job& job, const Snapshot& kept) {
  for (const Snapshot* const each : snapshots_.list_last(kept.id)) {
    const SnapshotSpace moved{
        .count = 0, .bytes = 0, .memory_bytes = 0, .steps = each->space.steps};
    job.admission().remove_snapshots(moved);
    job.admission().add_snapshots(moved);
  }
}

void JobSnapshots::go_back(const RestoringPointer& restoring,
                           std::unique_ptr<Job> fresh,
                           const Result<SnapshotInfo>& answer) {
  const uint64_t job_id = restoring->job.job_id();
  JobReplacement(parts_, operations_)
      .go_back(restoring->job, std::move(fresh), [this, job_id, made = restoring->made, answer] {
        answer.is_ok() ? restored(job_id, answer.value(), made) : made(answer);
      });
}

void JobSnapshots::restored(uint64_t job_id, const SnapshotInfo& info, const Made& made) {
  Job& job = *parts_.jobs.find(job_id);
  if (!job.progress().is_loading()) return made(info);
  const Snapshot* const load = snapshots_.of_load(job_id);
  MEMD_CHECK(load != nullptr);
  const Done dropped = [made, info](const Status& status) {
    status.is_ok() ? made(info) : made(status);
  };
  const auto drop_load = [this, &job, id = load->id, name = load->entry.name, dropped] {
    // Its reader has ended with its session, and the daemon hears of that a moment later.
    const auto is_unread = [this, &job, id] {
      const Snapshot* const unread = snapshots_.find(id);
      return unread == nullptr || readings_.check_unread(*unread, job.name()).is_ok();
    };
    job.conditions().add(is_unread,
                         [this, &job, name, dropped] { begin_drop(job, name, dropped); });
  };
  operations_.enqueue(job, "snapshot drop", [drop_load, dropped](const Status& turn) {
    turn.is_ok() ? drop_load() : dropped(turn);
  });
}

void JobSnapshots::refuse(const RestoringPointer& restoring, const Status& why) {
  const uint64_t job_id = restoring->job.job_id();
  restoring->job.set_ending(nullptr);
  if (restoring->fresh != nullptr) end(std::move(restoring->fresh));
  restoring->made(why);
  operations_.end(job_id);
}

// ---- The end of one -----------------------------------------------------------------------------

Status JobSnapshots::no_such(const Job& job, const std::string& name) const {
  const std::string names = snapshots_.names_text(job.job_id());
  return error(StatusCode::not_found,
               "job ",
               job.name(),
               " has no snapshot ",
               name,
               names.empty() ? "; it has none" : concat("; it has ", names));
}

Status JobSnapshots::ends_with_load(const Job& job, const std::string& name) {
  return error(StatusCode::in_use,
               "snapshot ",
               name,
               " is what job ",
               job.name(),
               " goes back to unless the load into it is complete; without it half a load would "
               "count, so it ends with the load");
}

void JobSnapshots::end_load(uint64_t session_id, const std::string& name, Done done) {
  const auto owner = parts_.job_of(session_id);
  if (!owner.is_ok()) return done(owner.status());
  Job* const job = owner.value();
  if (!is_load_name(name)) {
    return done(error(StatusCode::invalid_argument, name, " is the name of no load's snapshot"));
  }
  // Another rank does not know what is still to come.
  const uint64_t loading = job->progress().loading_session();
  if (loading != 0 && loading != session_id) return done(ends_with_load(*job, name));
  // Next to each other in the job's line: all that was loaded is on disk when it counts. The
  // snapshot may still be on its way there.
  const auto synced = std::make_shared<Status>();
  job->steps().sync_all_tiers(
      [synced](const Status& status, const StepReport&) { *synced = status; });
  operations_.enqueue(
      *job,
      "snapshot drop",
      [this, job, session_id, name, synced, done = std::move(done)](const Status& turn) {
        if (!turn.is_ok()) return done(turn);
        note_ended_early(session_id, *job, name);
        if (synced->is_ok()) return begin_drop(*job, name, done);
        done(*synced);
        operations_.end(job->job_id());
      });
}

// The client has given up its request for the snapshot, which may still be on its way. Were it
// granted, each step of the session would be refused until it ends.
void JobSnapshots::note_ended_early(uint64_t session_id, const Job& job, const std::string& name) {
  if (snapshots_.find(job.job_id(), name) != nullptr) return;
  ended_early_[session_id] = name;
  std::erase_if(ended_early_,
                [&](const auto& each) { return !parts_.sessions.contains(each.first); });
}

void JobSnapshots::drop(uint64_t job_id, const std::string& name, Done done) {
  Job* const job = parts_.jobs.find(job_id);
  if (job == nullptr) {
    return done(error(StatusCode::not_found, "there is no job with id ", job_id));
  }
  if (job->ending() != nullptr) {
    return done(error(StatusCode::unavailable, "job ", job->name(), " ", job->ending()));
  }
  if (is_load_name(name) && snapshots_.find(job_id, name) != nullptr)
    return done(ends_with_load(*job, name));
  operations_.enqueue(
      *job, "snapshot drop", [this, job, name, done = std::move(done)](const Status& turn) {
        turn.is_ok() ? begin_drop(*job, name, done) : done(turn);
      });
}

void JobSnapshots::begin_drop(Job& job, const std::string& name, const Done& done) {
  const uint64_t job_id = job.job_id();
  const Snapshot* const snapshot = snapshots_.find(job_id, name);
  if (snapshot == nullptr) {
    done(no_such(job, name));
    return operations_.end(job_id);
  }
  if (Status unread = readings_.check_unread(*snapshot, job.name()); !unread.is_ok()) {
    done(unread);
    return operations_.end(job_id);
  }
  job.operations().set_phase("commits");
  MEMD_FAILPOINT("snapshot.before_drop");
  const uint64_t id = snapshot->id;
  // Its places may hold anything as soon as the commit has released them, before it ends.
  snapshots_.set_ending(id, true);
  parts_.commits.drop_snapshot(
      job_id, name, snapshot->extents, [this, &job, id, done](const Status& status) {
        const uint64_t of_job = job.job_id();
        if (status.is_ok()) {
          MEMD_FAILPOINT("snapshot.dropped");
          if (is_load_name(snapshots_.find(id)->entry.name)) job.progress().set_loading(false);
          job.admission().remove_snapshots(snapshots_.find(id)->space);
          end(snapshots_.take(id));
        } else {
          snapshots_.set_ending(id, false);
        }
        done(status);
        operations_.end(of_job);
      });
}

void JobSnapshots::end(Snapshot snapshot) {
  const JobId job{snapshot.entry.job.job_id};
  const uint64_t bytes = snapshot.space.memory_bytes;
  free_on_worker(parts_.workers, job, bytes, std::move(snapshot));
}

void JobSnapshots::end(std::unique_ptr<Job> fresh) {
  const JobId job{fresh->job_id()};
  const uint64_t bytes = fresh->shards().declared().memory_bytes();
  free_on_worker(parts_.workers, job, bytes, std::move(fresh));
}

Result<std::vector<SnapshotInfo>> JobSnapshots::list(uint64_t job_id) const {
  if (parts_.jobs.find(job_id) == nullptr) {
    return error(StatusCode::not_found, "there is no job with id ", job_id);
  }
  std::vector<SnapshotInfo> infos;
  std::vector<const Snapshot*> all = snapshots_.of_job(job_id);
  std::ranges::stable_sort(all, {}, [](const Snapshot* each) { return each->entry.created_s; });
  for (const Snapshot* const each : all) {
    SnapshotInfo& info = infos.emplace_back(info_of(*each));
    const auto part = readings_.part_read(each->id);
    info.is_exported = part.has_value();
    info.exported_part = part.value_or(0);
  }
  return infos;
}

}  // namespace memd
