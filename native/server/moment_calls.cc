#include "server/moment_calls.h"

#include <memory>
#include <utility>

namespace memd {

Result<MomentValues> MomentCalls::read(const MomentsRequest& request, double timeout_s) const {
  return thread_.ask_for_more<MomentValues>(
      timeout_s, "reading moments", [thread = &thread_, request](const auto& reply) {
        thread->store().operations().read_moments(
            request, [reply](const Status& status, MomentValues values) {
              status.is_ok() ? reply(std::move(values)) : reply(status);
            });
      });
}

Status MomentCalls::write(const MomentsRequest& request,
                          uint64_t generation,
                          MomentValues values,
                          double timeout_s) const {
  const auto shared = std::make_shared<MomentValues>(std::move(values));
  const auto written = thread_.ask_for_more<bool>(
      timeout_s,
      "writing moments",
      [thread = &thread_, request, generation, shared](const auto& reply) {
        thread->store().operations().write_moments(
            request, generation, std::move(*shared), [reply](const Status& status) {
              status.is_ok() ? reply(true) : reply(status);
            });
      });
  return written.status();
}

Result<uint64_t> MomentCalls::bytes_of_maxima(uint64_t session_id,
                                              const std::vector<uint32_t>& shard_ids) const {
  return thread_.ask_reading<uint64_t>(
      "sizing maxima", [thread = &thread_, session_id, shard_ids](const auto& reply) {
        reply(thread->store().reports().bytes_of_maxima(session_id, shard_ids));
      });
}

}  // namespace memd
