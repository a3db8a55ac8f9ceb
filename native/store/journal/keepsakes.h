// The descriptors of jobs and sessions that outlive the daemon, by what they belong to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/descriptor_keeper.h"
#include "base/owned_fd.h"

namespace memd {

/// Descriptors that are kept for the next daemon. Without a keeper every call does
/// nothing. The one place that knows the names of jobs' and sessions' descriptors. Owned by the
/// ShardStore; the server thread calls everything; blocks no longer than the DescriptorKeeper does.
class Keepsakes {
 public:
  /// nullptr: nobody keeps any.
  explicit Keepsakes(DescriptorKeeper* keeper) : keeper_(keeper) {}

  bool has_keeper() const { return keeper_ != nullptr; }

  /// The ledger last: the next daemon goes by it.
  void keep_job(uint64_t job_id, int table_fd, int ledger_fd);
  void keep_tiles(uint64_t job_id, int fd);
  void forget_ledger(uint64_t job_id);
  void forget_table(uint64_t job_id);
  void forget_tiles(uint64_t job_id);

  void keep_session(uint64_t session_id, int session_fd, int doorbell_fd);
  void forget_session(uint64_t session_id);

 private:
  void keep(const std::string& name, int fd);
  void forget(const std::string& name);

  DescriptorKeeper* const keeper_;
};

/// Descriptors that the daemon before kept, while a start takes them over. Each is taken once; the
/// caller forgets the rest.
class Inheritance {
 public:
  /// nullptr: nothing was kept.
  explicit Inheritance(KeptDescriptors* all) : all_(all) {}

  struct Ledger {
    uint64_t job_id = 0;
    OwnedFd fd;
  };
  /// The next one that was not taken.
  std::optional<Ledger> take_ledger();
  std::optional<OwnedFd> take_table(uint64_t job_id);
  std::optional<OwnedFd> take_tiles(uint64_t job_id);
  struct Session {
    OwnedFd memory;
    OwnedFd doorbell;
  };
  /// Both, or nothing.
  std::optional<Session> take_session(uint64_t session_id);
  /// 0: there is no session.
  uint64_t session_id_max() const;

 private:
  std::optional<OwnedFd> take(const std::string& name);

  KeptDescriptors* const all_;
};

}  // namespace memd
