#include "powercut/runner.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/units.h"
#include "released_memory.h"
#include "store/cache/job_memory.h"

namespace memd::powercut {
namespace {

constexpr uint64_t kSegmentBytes = 2_MiB;
constexpr uint64_t kJobSegments = kPrivateFloorBytes / kSegmentBytes + 2;
constexpr uint64_t kJobsMax = 2;
constexpr uint64_t kJobNvmeBytes = 640_KiB;
// Only against hangs.
constexpr auto kPatience = std::chrono::seconds(120);

std::span<const std::byte> bytes_of(const std::vector<float>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

Runner::Runner(IoQueue& io, int wake_fd, VolumeSet set, const std::vector<ExtentRecord>& taken)
    : io_(io), workers_(1, wake_fd), extents_(io, workers_, std::move(set), clock_) {
  auto pool = Pool::create({.bytes = kJobsMax * kJobSegments * kSegmentBytes,
                            .segment_bytes = kSegmentBytes,
                            .huge_pages = false,
                            .lock = LockMode::wanted});
  MEMD_CHECK(pool.is_ok());
  pool_ = std::move(pool).value();
  store_ = std::make_unique<ShardStore>(ShardStoreParts{
      .pool = *pool_, .io = io_, .extents = extents_, .workers = workers_, .clock = clock_});
  loaded_ = store_->load([this] {
    io_.reap();
    workers_.reap();
    return Status::ok();
  });
  for (const ExtentRecord& extent : taken) MEMD_CHECK(extents_.reserve(extent).is_ok());
  for (const JobInfo& job : store_->reports().jobs()) wait_for_return(job.job_id);
}

Runner::~Runner() {
  store_->detach_all();
  store_->give_up_waiting();
  until("the end", [this] { return store_->is_idle(); });
}

void Runner::wait_for_return(uint64_t job_id) {
  bool has_gone_back = false;
  store_->returns_to_snapshots().when_ended(job_id, [&] { has_gone_back = true; });
  until("a job to go back to its snapshot", [&] { return has_gone_back; });
}

std::vector<ExtentRecord> Runner::leave_free(uint64_t bytes) {
  std::vector<ExtentRecord> taken;
  for (const uint32_t piece_bytes : {uint32_t{16_KiB}, uint32_t{4_KiB}}) {
    while (extents_.free_bytes() >= bytes + piece_bytes) {
      const auto extent = extents_.allocate(piece_bytes);
      if (!extent.is_ok()) break;
      taken.push_back(extent.value());
    }
  }
  return taken;
}

void Runner::turn() {
  const bool reaped = io_.reap() > 0;
  bool worked = false;
  while (workers_.open_count() > 0) {
    workers_.reap() > 0 ? void(worked = true) : std::this_thread::yield();
  }
  testing::replace_released(store_->memory());
  if (store_->advance() || reaped || worked) return;
  // A read that failed is tried again after a while, and no time passes here but this.
  const uint64_t due_ns = extents_.next_ns();
  if (due_ns > clock_.now_ns()) clock_.advance(due_ns - clock_.now_ns());
  std::this_thread::yield();
}

void Runner::until(const char* what, const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    turn();
    if (std::chrono::steady_clock::now() < end) continue;
    std::fprintf(stderr, "nothing happened for %s\n", what);
    std::abort();
  }
}

Result<uint64_t> Runner::attach(const std::string& job) {
  const auto info = store_->admissions().open({.name = job,
                                               .uid = 1000,
                                               .host_bytes = kJobSegments * kSegmentBytes,
                                               .nvme_bytes = kJobNvmeBytes,
                                               .fresh = false});
  if (!info.is_ok()) return info.status();
  for (const auto& [session_id, session] : store_->sessions()) {
    if (session->job_id == info.value().job_id) return session_id;
  }
  const auto session = store_->attach(info.value().job_id);
  if (!session.is_ok()) return session.status();
  return session.value()->session_id;
}

Status Runner::declare(uint64_t session, const std::vector<ShardSpec>& specs) {
  return store_->declare(session, specs).status();
}

uint32_t Runner::shard_id(uint64_t session, const std::string& name) {
  const Job& job = *store_->job_of(session).value();
  const auto found = job.shards().find(name);
  MEMD_CHECK(found.has_value());
  return *found;
}

std::pair<Status, LeaseGrant> Runner::lease(uint64_t session,
                                            uint32_t id,
                                            LeaseMode mode,
                                            Part part) {
  std::optional<std::pair<Status, LeaseGrant>> answer;
  store_->lease(
      {.session_id = session,
       .shard_id = id,
       .part = part,
       .mode = mode,
       .timeout_ns = 60'000'000'000,
       .for_service = false,
       .prefetch = false},
      [&](const Status& status, const LeaseGrant& grant) { answer.emplace(status, grant); });
  until("a lease", [&] { return answer.has_value(); });
  return *answer;
}

void Runner::release(uint64_t session, const LeaseGrant& grant) {
  store_->sessions().at(session)->ring.add_pin(grant.slot->pin_first + grant.index, ~grant.pin + 1);
}

Status Runner::write(uint64_t session,
                     const std::string& name,
                     std::span<const std::byte> bytes,
                     Part part) {
  const auto [status, grant] = lease(session, shard_id(session, name), LeaseMode::overwrite, part);
  if (!status.is_ok()) return status;
  MEMD_CHECK_EQ(grant.length_bytes, bytes.size());
  std::memcpy(grant.data, bytes.data(), bytes.size());
  release(session, grant);
  return Status::ok();
}

Status Runner::expect_step(uint64_t session, const std::vector<StepGroup>& groups) {
  return store_->gradients().expect_step(session, groups);
}

void Runner::gradient_is_final(uint64_t session, const std::string& name, uint64_t turns) {
  store_->gradients().is_final(session, shard_id(session, name));
  while (turns-- > 0) turn();
}

Status Runner::step(StepRequest request) {
  std::optional<Status> answer;
  store_->operations().step(std::move(request),
                            [&](const Status& status, const StepReport&) { answer = status; });
  until("a step", [&] { return answer.has_value(); });
  return *answer;
}

Status Runner::sync(uint64_t session) {
  std::optional<Status> answer;
  store_->operations().sync(session,
                            [&](const Status& status, const StepReport&) { answer = status; });
  until("a sync", [&] { return answer.has_value(); });
  return *answer;
}

Status Runner::step_beside_sync(StepRequest request,
                                uint64_t other_session,
                                uint64_t turns,
                                const std::function<void()>& stepped,
                                const std::function<void()>& synced) {
  std::optional<Status> step_answer;
  std::optional<Status> sync_answer;
  store_->operations().step(std::move(request), [&](const Status& status, const StepReport&) {
    step_answer = status;
    if (status.is_ok()) stepped();
  });
  while (turns-- > 0) turn();
  store_->operations().sync(other_session, [&](const Status& status, const StepReport&) {
    sync_answer = status;
    if (status.is_ok()) synced();
  });
  until("a step and a sync", [&] { return step_answer && sync_answer; });
  return step_answer->is_ok() ? *sync_answer : *step_answer;
}

Status Runner::remove(uint64_t session, const std::string& name) {
  std::optional<Status> answer;
  store_->delete_shard(
      session, name, [&](const Result<bool>& removed) { answer = removed.status(); });
  until("a deletion", [&] { return answer.has_value(); });
  return *answer;
}

Status Runner::drop(const std::string& job) {
  const auto info = store_->reports().find_job(job);
  if (!info.is_ok()) return info.status();
  std::optional<Status> answer;
  store_->drop_job(info.value().job_id, true, [&](const Status& status) { answer = status; });
  until("the end of a job", [&] { return answer.has_value(); });
  return *answer;
}

bool Runner::is_running(uint64_t job_id, const char* kind) const {
  const std::vector<Activity> all = store_->reports().in_flight();
  return std::any_of(all.begin(), all.end(), [&](const Activity& each) {
    return each.job_id == job_id && each.kind == kind && each.waits_on.empty();
  });
}

Status Runner::await(uint64_t job_id,
                     const char* kind,
                     const std::optional<Status>& answer,
                     const std::function<void()>& written) {
  bool is_told = false;
  until(kind, [&] {
    if (!is_told && !answer && is_running(job_id, kind)) {
      is_told = true;
      written();
    }
    return answer.has_value();
  });
  return *answer;
}

Status Runner::write_moments(uint64_t session, const std::string& name, const testing::Twin& twin) {
  std::optional<Status> answer;
  store_->operations().write_moments(
      {.session_id = session,
       .shard_id = shard_id(session, name),
       .element_first = 0,
       .element_count = twin.m.size()},
      twin.t,
      {.exp_avg = twin.m, .exp_avg_sq = twin.v, .max_exp_avg_sq = {}},
      [&](const Status& status) { answer = status; });
  until("moments", [&] { return answer.has_value(); });
  return *answer;
}

Status Runner::end_load(uint64_t session, const std::string& name) {
  std::optional<Status> answer;
  store_->snapshots().end_load(session, name, [&](const Status& status) { answer = status; });
  until("the end of a load", [&] { return answer.has_value(); });
  return *answer;
}

void Runner::break_off(uint64_t session) {
  const uint64_t job_id = store_->job_of(session).value()->job_id();
  MEMD_CHECK(store_->detach(session).is_ok());
  wait_for_return(job_id);
}

Status Runner::make_snapshot(const std::string& job,
                             const std::string& name,
                             const std::function<void()>& written,
                             uint64_t load_session) {
  const auto info = store_->reports().find_job(job);
  if (!info.is_ok()) return info.status();
  std::optional<Status> answer;
  store_->snapshots().create(
      {.job_id = info.value().job_id, .name = name, .session_id = load_session},
      [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
  return await(info.value().job_id, "snapshot", answer, written);
}

Status Runner::drop_snapshot(const std::string& job, const std::string& name) {
  const auto info = store_->reports().find_job(job);
  if (!info.is_ok()) return info.status();
  std::optional<Status> answer;
  store_->snapshots().drop(
      info.value().job_id, name, [&](const Status& status) { answer = status; });
  until("the end of a snapshot", [&] { return answer.has_value(); });
  return *answer;
}

Status Runner::restore(const std::string& job,
                       const std::string& name,
                       const std::function<void()>& written) {
  const auto info = store_->reports().find_job(job);
  if (!info.is_ok()) return info.status();
  std::vector<uint64_t> ended;
  for (const auto& [session_id, session] : store_->sessions()) {
    if (session->job_id == info.value().job_id) ended.push_back(session_id);
  }
  for (const uint64_t session_id : ended) MEMD_CHECK(store_->detach(session_id).is_ok());
  std::optional<Status> answer;
  store_->snapshots().restore(
      info.value().job_id, name, [&](const Result<SnapshotInfo>& made) { answer = made.status(); });
  return await(info.value().job_id, "restore", answer, written);
}

Status Runner::read_moments(uint64_t session, const ShardInfo& info, ShardState& into) {
  uint64_t count = 1;
  for (const uint64_t size : info.spec.shape) count *= size;
  MEMD_CHECK_LE(count, kTileElements);
  std::optional<Status> answer;
  store_->operations().read_moments({.session_id = session,
                                     .shard_id = info.shard_id,
                                     .element_first = 0,
                                     .element_count = count},
                                    [&](const Status& status, const MomentValues& values) {
                                      const auto m_bytes = bytes_of(values.exp_avg);
                                      const auto v_bytes = bytes_of(values.exp_avg_sq);
                                      into.exp_avg.assign(m_bytes.begin(), m_bytes.end());
                                      into.exp_avg_sq.assign(v_bytes.begin(), v_bytes.end());
                                      answer = status;
                                    });
  until("moments", [&] { return answer.has_value(); });
  return *answer;
}

ShardState Runner::read(uint64_t session, const ShardInfo& info) {
  ShardState out;
  out.name = info.spec.name;
  out.kind = info.spec.kind;
  out.dtype = info.spec.dtype;
  out.shape = info.spec.shape;
  out.generation = info.generation;
  out.written = info.written;
  if (info.written) {
    const auto [status, grant] = lease(session, info.shard_id, LeaseMode::read, Part::value);
    out.lost = status;
    if (status.is_ok()) {
      out.value.assign(grant.data, grant.data + grant.length_bytes);
      release(session, grant);
    }
  }
  if (info.spec.kind == ShardKind::parameter) {
    const Status status = read_moments(session, info, out);
    if (out.lost.is_ok()) out.lost = status;
  }
  return out;
}

SetState Runner::read_all() {
  SetState state;
  for (const JobInfo& info : store_->reports().jobs()) {
    JobState job{.name = info.name, .step = info.committed_step, .shards = {}};
    const auto session = attach(info.name);
    if (session.status().code() == StatusCode::integrity && info.host_tier_bytes != 0) {
      state.push_back({.name = info.name});
      continue;
    }
    MEMD_CHECK(session.is_ok());
    const auto shards = store_->reports().shards(info.job_id);
    MEMD_CHECK(shards.is_ok());
    for (const ShardInfo& shard : shards.value()) {
      job.shards.push_back(read(session.value(), shard));
    }
    state.push_back(std::move(job));
  }
  sort_by_name(state);
  return state;
}

}  // namespace memd::powercut
