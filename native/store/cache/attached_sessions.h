// The sessions that are attached to one job.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "ring/stalls.h"
#include "store/cache/session.h"

namespace memd {

/// Owns the job's list of its sessions, which Sessions has by id for all jobs, and the sum of what
/// the clients of ended ones said of their stalls. Owned by the JobCache; the ShardStore, which
/// attaches and detaches, and an adoption change it, on the server thread. Nothing blocks.
class AttachedSessions {
 public:
  using List = std::vector<std::shared_ptr<Session>>;

  const List& list() const { return list_; }
  bool empty() const { return list_.empty(); }
  size_t size() const { return list_.size(); }
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }

  void attach(std::shared_ptr<Session> session) { list_.push_back(std::move(session)); }
  /// Those of the daemon before.
  void adopt(List sessions) { list_ = std::move(sessions); }
  /// Its stalls count on.
  void detach(const std::shared_ptr<Session>& session) {
    stalls_ended_.add(session->ring.stalls());
    std::erase(list_, session);
  }
  /// Those of `before` count on here.
  void count_on(const AttachedSessions& before) { stalls_ended_ = before.stalls(); }
  /// The daemon ends, or an adoption failed: nothing counts on.
  void clear() { list_.clear(); }

  /// The sum over all sessions, those that have ended included.
  Stalls stalls() const {
    Stalls all = stalls_ended_;
    for (const auto& session : list_) all.add(session->ring.stalls());
    return all;
  }

 private:
  List list_;
  Stalls stalls_ended_;
};

}  // namespace memd
