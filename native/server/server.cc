#include "server/server.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/check.h"

namespace memd {
namespace {

constexpr size_t kSegmentsInPacket = 64;

// It waits for everything that a job has in flight.
constexpr double kDrainS = 600;
// Beside the store's own deadline, which says more.
constexpr double kGraceS = 10;

Result<OwnedFd> duplicate(int fd) {
  OwnedFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.is_open()) return device_error(errno, "duplicating a descriptor");
  return copy;
}

/// For what has no value but a status.
struct Nothing {};

Result<Nothing> nothing(const Status& status) {
  if (!status.is_ok()) return status;
  return Nothing{};
}

Status status_of(const Result<Nothing>& result) {
  return result.is_ok() ? Status::ok() : result.status();
}

template <typename T>
Result<T> value_or(const Status& status, T value) {
  if (!status.is_ok()) return status;
  return value;
}

}  // namespace

Result<std::shared_ptr<Server>> Server::start(const ServerOptions& options, KeptDescriptors kept) {
  auto engine = Engine::start(options, std::move(kept));
  if (!engine.is_ok()) return engine.status();
  std::shared_ptr<Server> server(new Server(options.keeper, std::move(engine).value()));
  if (Status started = server->thread_->start(); !started.is_ok()) return started;
  return server;
}

Server::Server(std::shared_ptr<DescriptorKeeper> keeper, std::unique_ptr<Engine> engine)
    : report_(engine->report()),
      keeper_(std::move(keeper)),
      thread_(std::make_unique<ServerThread>(std::move(engine))) {}

Server::~Server() {
  // For an orderly end, callers use stop() and look at its status.
  [[maybe_unused]] const Status status = stop(30.0);
}

ShardStore& Server::store() { return thread_->store(); }

Result<JobInfo> Server::open_job(const OpenJobRequest& request) {
  if (request.fresh) {
    if (Status gone_back = wait_for_return(request.name); !gone_back.is_ok()) return gone_back;
    // Its memory has to be back in the pool before the new job is admitted.
    const auto held = find_job(request.name);
    if (!held.is_ok() && held.status().code() != StatusCode::not_found) return held.status();
    if (held.is_ok()) {
      if (Status status = drop_job(held.value().job_id, false); !status.is_ok()) return status;
    }
  }
  // A stopped job that no catalogue named goes without being asked to.
  refill_pool();
  if (Status gone_back = wait_for_return(request.name); !gone_back.is_ok()) return gone_back;
  auto job =
      thread_->ask_for_more<JobInfo>(kAnswerS, "opening a job", [this, request](const auto& reply) {
        reply(store().admissions().open(request));
      });
  if (!job.is_ok()) refill_pool_after(job.status());
  if (!job.is_ok() || !job.value().created || !outlives_process()) return job;
  // Memory that outlives this process belongs to a job that the disk knows, so that the next daemon
  // has one to give it to.
  const uint64_t job_id = job.value().job_id;
  auto committed =
      thread_->ask<StepReport>(kDrainS, "the first commit", [this, job_id](const auto& reply) {
        store().operations().sync_job(job_id,
                                      [reply](const Status& status, const StepReport& report) {
                                        reply(value_or(status, report));
                                      });
      });
  if (committed.is_ok()) return job;
  [[maybe_unused]] const Status dropped = drop_job(job_id, false);
  return committed.status();
}

Status Server::wait_for_return(const std::string& job) {
  return status_of(thread_->ask<Nothing>(
      kDrainS, "a job that goes back to a snapshot", [this, job](const auto& reply) {
        const auto held = store().reports().find_job(job);
        if (!held.is_ok()) return reply(Nothing{});
        store().returns_to_snapshots().when_ended(held.value().job_id,
                                                  [reply] { reply(Nothing{}); });
      }));
}

Result<JobInfo> Server::find_job(const std::string& name) {
  return thread_->ask_reading<JobInfo>("finding a job", [this, name](const auto& reply) {
    reply(store().reports().find_job(name));
  });
}

Result<std::vector<JobInfo>> Server::jobs() {
  return thread_->ask_reading<std::vector<JobInfo>>(
      "listing jobs", [this](const auto& reply) { reply(store().reports().jobs()); });
}

Result<std::vector<ShardInfo>> Server::shards(uint64_t job_id, uint32_t first, size_t count_max) {
  return thread_->ask_reading<std::vector<ShardInfo>>(
      "listing shards", [this, job_id, first, count_max](const auto& reply) {
        reply(store().reports().shards(job_id, first, count_max));
      });
}

Result<ShardInfo> Server::find_shard(uint64_t job_id, const std::string& name) {
  return thread_->ask_reading<ShardInfo>("finding a shard",
                                         [this, job_id, name](const auto& reply) {
                                           reply(store().reports().find_shard(job_id, name));
                                         });
}

Status Server::set_job_weight(uint64_t job_id, JobWeight weight) {
  return status_of(thread_->ask_for_more<Nothing>(
      kAnswerS, "setting a job's weight", [this, job_id, weight](const auto& reply) {
        reply(nothing(store().admissions().set_weight(job_id, weight)));
      }));
}

Status Server::drop_job(uint64_t job_id, bool force) {
  auto result =
      thread_->ask<Nothing>(kDrainS, "dropping a job", [this, job_id, force](const auto& reply) {
        const auto drop = [this, job_id, force, reply] {
          store().drop_job(
              job_id, force, [reply](const Status& status) { reply(nothing(status)); });
        };
        // The snapshot of a load that broke off is the daemon's own to drop.
        force ? drop() : store().returns_to_snapshots().when_ended(job_id, drop);
      });
  refill_pool();
  return status_of(result);
}

void Server::refill_pool() {
  using Pointer = std::shared_ptr<Pool::Replacement>;
  for (;;) {
    auto begun = thread_->ask<Pointer>(kAnswerS, "refilling the pool", [this](const auto& reply) {
      reply(store().memory().begin_replacement());
    });
    if (!begun.is_ok() || begun.value() == nullptr) return;
    // On the caller's thread: touching a fresh segment takes tens of milliseconds.
    begun.value()->make();
    const auto ended = thread_->ask<Nothing>(
        kAnswerS, "refilling the pool", [this, replacement = begun.value()](const auto& reply) {
          store().memory().end_replacement(*replacement);
          reply(Nothing{});
        });
    if (!ended.is_ok()) return;
  }
}

Result<SessionGrant> Server::attach(uint64_t job_id, const SessionOwner& owner, double timeout_s) {
  // A caller that gave up waiting drops the answer, and with it the session: nobody else knows of
  // it.
  struct Answer {
    SessionGrant grant;
    Server* server = nullptr;  // null once a caller has the grant
    Answer() = default;
    Answer(const Answer&) = delete;
    Answer& operator=(const Answer&) = delete;
    ~Answer() {
      if (server != nullptr) server->give_up_session(grant.session_id);
    }
  };
  using Pointer = std::shared_ptr<Answer>;
  const auto attach_now = [this, job_id, owner](const auto& reply) {
    // A trainer that died may have closed a step. Whoever follows goes on behind it.
    if (store().operations().has_orphaned_step(job_id)) {
      return reply(error(StatusCode::in_use,
                         "the job still makes the step that a session before this one has closed, "
                         "and the next one goes on behind it; try again"));
    }
    auto session = store().attach(job_id, owner);
    if (!session.is_ok()) return reply(session.status());
    const auto job = store().job_of(session.value()->session_id);
    if (!job.is_ok()) return reply(job.status());
    const uint64_t session_id = session.value()->session_id;
    const auto refuse = [&](const Status& status) {
      [[maybe_unused]] const auto leases = store().detach(session_id);
      reply(status);
    };
    auto answer = std::make_shared<Answer>();
    SessionGrant* const grant = &answer->grant;
    grant->session_id = session_id;
    grant->committed_step = job.value()->progress().committed_step();
    grant->durable_step = job.value()->progress().durable_step();
    grant->segment_bytes = job.value()->memory()->arena().segment_bytes();
    grant->arena_reserved_bytes = job.value()->memory()->arena().reserved_bytes();
    for (auto [from, into] : {std::pair{session.value()->ring.session_fd(), &grant->session},
                              std::pair{job.value()->cache().table().memory().fd(), &grant->table},
                              std::pair{session.value()->ring.doorbell_fd(), &grant->doorbell}}) {
      auto copy = duplicate(from);
      if (!copy.is_ok()) return refuse(copy.status());
      *into = std::move(copy).value();
    }
    if (Status status = thread_->watch(*session.value()); !status.is_ok()) return refuse(status);
    answer->server = this;
    reply(answer);
  };
  auto result = thread_->ask_for_more<Pointer>(
      timeout_s, "attaching", [this, job_id, attach_now](const auto& reply) {
        // The session before may have ended since the job was opened.
        store().returns_to_snapshots().when_ended(job_id,
                                                  [attach_now, reply] { attach_now(reply); });
      });
  if (!result.is_ok()) {
    refill_pool_after(result.status());
    return result.status();
  }
  result.value()->server = nullptr;
  return std::move(result.value()->grant);
}

void Server::refill_pool_after(const Status& refusal) {
  // Memory that could not be mapped. A caller that was not answered in time has stopped waiting.
  if (refusal.code() == StatusCode::device || refusal.code() == StatusCode::capacity) refill_pool();
}

void Server::give_up_session(uint64_t session_id) {
  // It may have ended with its job meanwhile.
  thread_->post(
      [this, session_id] { [[maybe_unused]] const auto leases = store().detach(session_id); });
}

Result<std::vector<KeptSession>> Server::kept_sessions() {
  return thread_->ask<std::vector<KeptSession>>(
      kAnswerS, "listing kept sessions", [this](const auto& reply) {
        reply(store().kept_sessions());
      });
}

void Server::redo_steps() {
  thread_->post([this] { store().operations().redo_steps(); });
}

Result<SessionGrant> Server::resume_session(uint64_t session_id, const SessionOwner& owner) {
  using Pointer = std::shared_ptr<SessionGrant>;
  auto result =
      thread_->ask<Pointer>(kAnswerS, "resuming", [this, session_id, owner](const auto& reply) {
        const auto session = store().resume_session(session_id, owner);
        if (!session.is_ok()) return reply(session.status());
        const auto job = store().job_of(session_id);
        if (!job.is_ok()) return reply(job.status());
        if (Status status = thread_->watch(*session.value()); !status.is_ok()) return reply(status);
        auto grant = std::make_shared<SessionGrant>();
        grant->session_id = session_id;
        grant->committed_step = job.value()->progress().committed_step();
        grant->durable_step = job.value()->progress().durable_step();
        grant->segment_bytes = job.value()->memory()->arena().segment_bytes();
        grant->arena_reserved_bytes = job.value()->memory()->arena().reserved_bytes();
        reply(grant);
      });
  if (!result.is_ok()) return result.status();
  return std::move(*result.value());
}

Result<uint64_t> Server::closing_step(uint64_t job_id) {
  return thread_->ask<uint64_t>(
      kAnswerS, "finding the closing step", [this, job_id](const auto& reply) {
        reply(store().operations().closing_step(job_id));
      });
}

Result<std::vector<OwnedFd>> Server::segment_fds(uint64_t session_id, uint64_t first) {
  using Pointer = std::shared_ptr<std::vector<OwnedFd>>;
  auto result =
      thread_->ask<Pointer>(kAnswerS, "segments", [this, session_id, first](const auto& reply) {
        const auto job = store().job_of(session_id);
        if (!job.is_ok()) return reply(job.status());
        auto fds = std::make_shared<std::vector<OwnedFd>>();
        const Arena& arena = job.value()->memory()->arena();
        for (uint64_t i = first; i < arena.segment_count() && fds->size() < kSegmentsInPacket;
             ++i) {
          auto copy = duplicate(arena.segment(i).fd());
          if (!copy.is_ok()) return reply(copy.status());
          fds->push_back(std::move(copy).value());
        }
        reply(fds);
      });
  if (!result.is_ok()) return result.status();
  return std::move(*result.value());
}

Result<uint32_t> Server::detach(uint64_t session_id) {
  return thread_->ask<uint32_t>(kAnswerS, "detaching", [this, session_id](const auto& reply) {
    reply(store().detach(session_id));
  });
}

Result<std::pair<std::vector<ShardInfo>, bool>> Server::declare(
    uint64_t session_id, const std::vector<ShardSpec>& specs) {
  return thread_->ask_for_more<std::pair<std::vector<ShardInfo>, bool>>(
      kAnswerS,
      "declaring shards",
      [this, session_id, declared = std::make_shared<LabelledSpecs>(specs)](const auto& reply) {
        reply(store().declare(session_id, std::move(*declared)));
      });
}

Result<StepReport> Server::step(const StepRequest& request,
                                const std::vector<StepCall>& others,
                                double timeout_s) {
  return thread_->ask_for_more<StepReport>(
      timeout_s, "the step", [this, request, others](const auto& reply) {
        store().operations().step(
            request, others, [reply](const Status& status, const StepReport& report) {
              reply(value_or(status, report));
            });
      });
}

Status Server::expect_step(uint64_t session_id, const std::vector<StepGroup>& groups) {
  return status_of(thread_->ask_for_more<Nothing>(
      kAnswerS, "saying what a step will do", [this, session_id, groups](const auto& reply) {
        reply(nothing(store().gradients().expect_step(session_id, groups)));
      }));
}

Result<StepReport> Server::sync(uint64_t session_id, double timeout_s) {
  return thread_->ask_for_more<StepReport>(
      timeout_s, "the sync", [this, session_id](const auto& reply) {
        store().operations().sync(session_id,
                                  [reply](const Status& status, const StepReport& report) {
                                    reply(value_or(status, report));
                                  });
      });
}

Status Server::drop_gradients(uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
  return status_of(thread_->ask<Nothing>(
      kAnswerS, "dropping gradients", [this, session_id, shard_ids](const auto& reply) {
        reply(nothing(store().gradients().drop(session_id, shard_ids)));
      }));
}

Result<bool> Server::delete_shard(uint64_t session_id, const std::string& name) {
  return thread_->ask<bool>(
      kDrainS, "deleting a shard", [this, session_id, name](const auto& reply) {
        store().delete_shard(session_id, name, reply);
      });
}

Result<std::unique_ptr<ServiceLease>> Server::lease(
    uint64_t session_id, uint32_t shard_id, Part part, LeaseMode mode, double timeout_s) {
  using Granted = std::shared_ptr<std::unique_ptr<ServiceLease>>;
  const LeaseRequest request{.session_id = session_id,
                             .shard_id = shard_id,
                             .part = part,
                             .mode = mode,
                             .timeout_ns = timeout_ns_of(timeout_s),
                             .for_service = true,
                             .prefetch = false};
  // The store answers at the deadline itself, and says on what it waited.
  auto result =
      thread_->ask<Granted>(timeout_s + kGraceS, "a lease", [this, request](const auto& reply) {
        store().lease(
            request, [this, request, reply](const Status& status, const LeaseGrant& grant) {
              if (!status.is_ok()) return reply(status);
              const auto job = store().job_of(request.session_id);
              MEMD_CHECK(job.is_ok());
              // From here on somebody owns the grant: a caller that gave up waiting drops
              // it.
              reply(std::make_shared<std::unique_ptr<ServiceLease>>(
                  std::make_unique<ServiceLease>(*thread_, job.value()->job_id(), grant)));
            });
      });
  if (!result.is_ok()) return result.status();
  std::unique_ptr<ServiceLease> lease = std::move(*result.value());
  lease->keep(shared_from_this());
  return lease;
}

Result<ServerStatistics> Server::statistics() {
  return thread_->ask_reading<ServerStatistics>("counting", [this](const auto& reply) {
    ServerStatistics statistics = store().reports().statistics();
    statistics.turns = thread_->turns();
    reply(std::move(statistics));
  });
}

void Server::set_scrub_rate(uint64_t bytes_per_second) {
  thread_->post([this, bytes_per_second] { store().set_scrub_rate(bytes_per_second); });
}

Result<uint64_t> Server::begin_check(const LiveCheckRequest& request) {
  return thread_->ask_for_more<uint64_t>(
      kAnswerS, "beginning a check", [this, request](const auto& reply) {
        reply(store().live_check().begin(request));
      });
}

Result<LiveCheckProgress> Server::check_progress(uint64_t check_id) {
  return thread_->ask<LiveCheckProgress>(
      kAnswerS, "a check's progress", [this, check_id](const auto& reply) {
        reply(store().live_check().progress(check_id));
      });
}

void Server::end_check(uint64_t check_id) {
  thread_->post([this, check_id] { store().live_check().end(check_id); });
}

Result<std::vector<Activity>> Server::in_flight() {
  return thread_->ask_reading<std::vector<Activity>>(
      "listing what is in flight",
      [this](const auto& reply) { reply(store().reports().in_flight()); });
}

Status Server::stop(double timeout_s) {
  const std::lock_guard only_once(stop_mutex_);
  if (!thread_->is_running()) return Status::ok();
  const auto deadline = std::chrono::time_point_cast<std::chrono::steady_clock::duration>(
      std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s));
  const auto left_s = [&deadline] {
    return std::max(
        0.01, std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count());
  };
  Status status;
  if (!outlives_process()) {
    // Sessions end first, so that their clients hear of it and begin nothing more; steps that were
    // begun go on.
    status =
        status_of(thread_->ask<Nothing>(left_s(), "ending sessions", [this](const auto& reply) {
          store().detach_all();
          reply(Nothing{});
        }));
  }
  const auto all_jobs = thread_->ask<std::vector<JobInfo>>(
      left_s(), "listing the jobs to sync", [this](const auto& reply) {
        reply(store().reports().jobs());
      });
  if (!all_jobs.is_ok() && status.is_ok()) status = all_jobs.status();
  for (const JobInfo& job : all_jobs.is_ok() ? all_jobs.value() : std::vector<JobInfo>()) {
    // It stays at its last commit, which is durable.
    if (!job.lost_shards.empty()) continue;
    auto synced = thread_->ask<StepReport>(
        left_s(), "the last sync", [this, id = job.job_id](const auto& reply) {
          // A load that ended with its session is gone from disk first.
          store().returns_to_snapshots().when_ended(id, [this, id, reply] {
            store().operations().sync_job(id,
                                          [reply](const Status& done, const StepReport& report) {
                                            reply(value_or(done, report));
                                          });
          });
        });
    if (!synced.is_ok() && status.is_ok()) status = synced.status();
  }
  Status stopped = thread_->stop(deadline);
  return stopped.is_ok() ? status : stopped;
}

}  // namespace memd
