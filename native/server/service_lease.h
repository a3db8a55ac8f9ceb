// A lease that the daemon holds itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "server/server_thread.h"
#include "store/cache/lease_request.h"

namespace memd {

class Server;

/// Bytes of a shard pinned for a gRPC stream, whatever becomes of the session, and mapped until it
/// is released. Released when destroyed; any thread.
class ServiceLease {
 public:
  /// On the server thread, which must not hold its own server: who is granted the lease calls
  /// keep().
  ServiceLease(ServerThread& thread, uint64_t job_id, const LeaseGrant& grant);
  ~ServiceLease() { release(false); }
  ServiceLease(const ServiceLease&) = delete;
  ServiceLease& operator=(const ServiceLease&) = delete;

  std::byte* data() const { return grant_.data; }
  uint64_t bytes() const { return grant_.length_bytes; }
  /// Readers see what was written; with `discard`, an overwrite of a blob leaves no
  /// trace. Only the first call counts.
  void release(bool discard);
  void keep(std::shared_ptr<Server> server) { kept_ = std::move(server); }

 private:
  ServerThread* thread_;  // null once it was released
  std::shared_ptr<Server> kept_;
  uint64_t job_id_;
  LeaseGrant grant_;
};

}  // namespace memd
