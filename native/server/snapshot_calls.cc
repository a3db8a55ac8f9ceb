#include "server/snapshot_calls.h"

namespace memd {

Result<SnapshotInfo> SnapshotCalls::create(const SnapshotRequest& request, double timeout_s) const {
  return thread_.ask_for_more<SnapshotInfo>(
      timeout_s, "making a snapshot", [thread = &thread_, request](const auto& reply) {
        thread->store().snapshots().create(request, reply);
      });
}

Result<SnapshotInfo> SnapshotCalls::restore(uint64_t job_id,
                                            const std::string& name,
                                            double timeout_s) const {
  return thread_.ask_for_more<SnapshotInfo>(
      timeout_s, "going back to a snapshot", [thread = &thread_, job_id, name](const auto& reply) {
        thread->store().snapshots().restore(job_id, name, reply);
      });
}

Status SnapshotCalls::drop(uint64_t job_id, const std::string& name, double timeout_s) const {
  const auto dropped = thread_.ask<bool>(
      timeout_s, "dropping a snapshot", [thread = &thread_, job_id, name](const auto& reply) {
        thread->store().snapshots().drop(job_id, name, [reply](const Status& status) {
          reply(status.is_ok() ? Result<bool>(true) : Result<bool>(status));
        });
      });
  return dropped.status();
}

Status SnapshotCalls::end_load(uint64_t session_id,
                               const std::string& name,
                               double timeout_s) const {
  const auto ended = thread_.ask<bool>(
      timeout_s, "ending a load", [thread = &thread_, session_id, name](const auto& reply) {
        thread->store().snapshots().end_load(session_id, name, [reply](const Status& status) {
          reply(status.is_ok() ? Result<bool>(true) : Result<bool>(status));
        });
      });
  return ended.status();
}

Result<std::vector<std::string>> SnapshotCalls::take_notes() const {
  return thread_.ask<std::vector<std::string>>(
      kAnswerS, "looking for loads that broke off", [thread = &thread_](const auto& reply) {
        reply(thread->store().returns_to_snapshots().take_notes());
      });
}

Result<std::vector<SnapshotInfo>> SnapshotCalls::list(uint64_t job_id) const {
  return thread_.ask_reading<std::vector<SnapshotInfo>>(
      "listing snapshots", [thread = &thread_, job_id](const auto& reply) {
        reply(thread->store().snapshots().list(job_id));
      });
}

Result<SnapshotReading> SnapshotCalls::begin_reading(const SnapshotReadingRequest& request) const {
  return thread_.ask_for_more<SnapshotReading>(
      kAnswerS, "beginning an export", [thread = &thread_, request](const auto& reply) {
        reply(thread->store().snapshot_readings().begin(request));
      });
}

Result<SnapshotReadings::Piece> SnapshotCalls::read(uint64_t reading_id,
                                                    const SnapshotPlace& place,
                                                    const PieceMemory& into,
                                                    double timeout_s) const {
  return thread_.ask_for_more<SnapshotReadings::Piece>(
      timeout_s,
      "reading a snapshot",
      [thread = &thread_, reading_id, place, into](const auto& reply) {
        thread->store().snapshot_readings().read(reading_id, place, into, reply);
      });
}

void SnapshotCalls::end_reading(uint64_t reading_id) const {
  thread_.post(
      [thread = &thread_, reading_id] { thread->store().snapshot_readings().end(reading_id); });
}

}  // namespace memd
