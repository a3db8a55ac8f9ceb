// Snapshots, as any thread asks for them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/server_thread.h"
#include "store/snapshot/job_snapshots.h"

namespace memd {

/// JobSnapshots, on the server thread, which is waited for: see Server.
class SnapshotCalls {
 public:
  explicit SnapshotCalls(ServerThread& thread) : thread_(thread) {}

  Result<SnapshotInfo> create(const SnapshotRequest& request, double timeout_s) const;
  Result<SnapshotInfo> restore(uint64_t job_id, const std::string& name, double timeout_s) const;
  Status drop(uint64_t job_id, const std::string& name, double timeout_s) const;
  Status end_load(uint64_t session_id, const std::string& name, double timeout_s) const;
  Result<std::vector<SnapshotInfo>> list(uint64_t job_id) const;
  /// As ReturnsToSnapshots has them.
  Result<std::vector<std::string>> take_notes() const;

  // SnapshotReadings.
  Result<SnapshotReading> begin_reading(const SnapshotReadingRequest& request) const;
  Result<SnapshotReadings::Piece> read(uint64_t reading_id,
                                       const SnapshotPlace& place,
                                       const PieceMemory& into,
                                       double timeout_s) const;
  void end_reading(uint64_t reading_id) const;

 private:
  ServerThread& thread_;
};

}  // namespace memd
