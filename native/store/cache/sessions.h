// All sessions of a daemon: who they are, and which of them the daemon before had.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "store/cache/session.h"
#include "store/journal/job_ledger.h"
#include "store/journal/keepsakes.h"

namespace memd {

/// A session of the daemon before, taken over with its leases and gradients.
struct KeptSession {
  uint64_t session_id = 0;
  uint64_t job_id = 0;
  SessionOwner owner;
};

/// The table of sessions by id, their ids, and what the next daemon is told of them. `ledger` is
/// the job's. Owned by the ShardStore; the server thread calls everything; nothing blocks.
class Sessions {
 public:
  using Map = std::unordered_map<uint64_t, std::shared_ptr<Session>>;
  using List = std::vector<std::shared_ptr<Session>>;

  explicit Sessions(Keepsakes& keepsakes) : keepsakes_(keepsakes) {}

  const Map& all() const { return all_; }
  bool contains(uint64_t session_id) const { return all_.contains(session_id); }
  Map::const_iterator find(uint64_t session_id) const { return all_.find(session_id); }
  Map::const_iterator end() const { return all_.end(); }
  const std::shared_ptr<Session>& at(uint64_t session_id) const { return all_.at(session_id); }

  /// A new one, which the next daemon would find; add() follows.
  Result<std::shared_ptr<Session>> create(uint64_t job_id,
                                          const SessionOwner& owner,
                                          JobLedger& ledger);
  void add(const std::shared_ptr<Session>& session) { all_[session->session_id] = session; }
  void remove(uint64_t session_id);

  // For the next daemon.
  void note(JobLedger& ledger, const Session& session);
  void forget(JobLedger& ledger, uint64_t session_id);

  // From the daemon before.
  /// At start: no id is given a second time, to which a trainer may still come back.
  void begin_ids(uint64_t taken_max);
  void adopt(const std::shared_ptr<Session>& session);
  /// Adopted, and not resumed yet.
  std::vector<KeptSession> kept() const;
  /// Its process is back. Refused where the session is not there or belongs to another process.
  Result<std::shared_ptr<Session>> resume(uint64_t session_id, const SessionOwner& owner);

 private:
  Status keep(JobLedger& ledger, const Session& session);

  Keepsakes& keepsakes_;
  Map all_;
  std::set<uint64_t> not_resumed_;
  uint64_t id_next_ = 1;
};

}  // namespace memd
