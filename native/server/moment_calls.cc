#include "server/moment_calls.h"

#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "server/service_lease.h"

namespace memd {
namespace {

constexpr const char* kWriting = "writing moments";

std::function<void(const Status&)> reply_to(const std::function<void(Result<bool>)>& reply) {
  return [reply](const Status& status) { status.is_ok() ? reply(true) : reply(status); };
}

/// The moments of a leased blob, whose bytes stay leased as long as they may be read.
Result<NewMoments> moments_of(const StagedMoments& staged,
                              const Shard& shard,
                              const std::shared_ptr<const ServiceLease>& lease) {
  if (shard.kind != ShardKind::blob) {
    return error(StatusCode::invalid_argument,
                 "'",
                 shard.name(),
                 "' is no blob, and moments are staged in one");
  }
  const uint64_t part_count = 2 + (staged.has_maximum ? 1 : 0) + (staged.has_masters ? 1 : 0);
  const uint64_t element_count = lease->bytes() / sizeof(float) / part_count;
  if (lease->bytes() != element_count * part_count * sizeof(float) ||
      element_count > kTileElements) {
    return error(StatusCode::invalid_argument,
                 "'",
                 shard.name(),
                 "' has ",
                 lease->bytes(),
                 " bytes, which are no moments in fp32 of at most ",
                 kTileElements * sizeof(float),
                 " bytes each");
  }
  std::span rest(reinterpret_cast<const float*>(lease->data()), element_count * part_count);
  const auto next = [&rest, element_count](bool is_there) {
    const auto part = rest.first(is_there ? element_count : 0);
    rest = rest.subspan(part.size());
    return part;
  };
  NewMoments moments;
  moments.exp_avg = next(true);
  moments.exp_avg_sq = next(true);
  moments.max_exp_avg_sq = next(staged.has_maximum);
  moments.masters = next(staged.has_masters);
  moments.owner = lease;
  return moments;
}

}  // namespace

Result<MomentValues> MomentCalls::read(const MomentsRequest& request, double timeout_s) const {
  return thread_.ask_for_more<MomentValues>(
      timeout_s, "reading moments", [thread = &thread_, request](const auto& reply) {
        thread->store().operations().read_moments(
            request, [reply](const Status& status, MomentValues values) {
              status.is_ok() ? reply(std::move(values)) : reply(status);
            });
      });
}

MomentCalls::Write MomentCalls::begin_write(const MomentsRequest& request,
                                            uint64_t generation,
                                            NewMoments values) const {
  return thread_.begin_ask_for_more<bool>(
      kWriting,
      [thread = &thread_, request, generation, values = std::move(values)](const auto& reply) {
        thread->store().operations().write_moments(request, generation, values, reply_to(reply));
      });
}

MomentCalls::Write MomentCalls::begin_write(const MomentsRequest& request,
                                            uint64_t generation,
                                            const StagedMoments& staged,
                                            double timeout_s) const {
  const LeaseRequest lease{.session_id = request.session_id,
                           .shard_id = staged.shard_id,
                           .part = Part::value,
                           .mode = LeaseMode::read,
                           .timeout_ns = timeout_ns_of(timeout_s),
                           .for_service = true,
                           .prefetch = false};
  return thread_.begin_ask_for_more<bool>(
      kWriting, [thread = &thread_, request, generation, staged, lease](const auto& reply) {
        // Before it is the write's turn: an operation of the job that runs may be what keeps the
        // blob from memory.
        thread->store().lease(lease,
                              [thread, request, generation, staged, reply](
                                  const Status& status, const LeaseGrant& grant) {
                                if (!status.is_ok()) return reply(status);
                                const auto job = thread->store().job_of(request.session_id);
                                MEMD_CHECK(job.is_ok());
                                const auto granted = std::make_shared<const ServiceLease>(
                                    *thread, job.value()->job_id(), grant);
                                const Shard& shard = job.value()->shards()[staged.shard_id];
                                auto moments = moments_of(staged, shard, granted);
                                if (!moments.is_ok()) return reply(moments.status());
                                MomentsRequest sized = request;
                                sized.element_count = moments.value().exp_avg.size();
                                thread->store().operations().write_moments(
                                    sized, generation, std::move(moments).value(), reply_to(reply));
                              });
      });
}

Status MomentCalls::wait(Write& write, double timeout_s) const {
  return thread_.wait(write, timeout_s).status();
}

Result<uint64_t> MomentCalls::bytes_of_maxima(uint64_t session_id,
                                              const std::vector<uint32_t>& shard_ids) const {
  return thread_.ask_reading<uint64_t>(
      "sizing maxima", [thread = &thread_, session_id, shard_ids](const auto& reply) {
        reply(thread->store().reports().bytes_of_maxima(session_id, shard_ids));
      });
}

}  // namespace memd
