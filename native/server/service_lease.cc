#include "server/service_lease.h"

namespace memd {

ServiceLease::ServiceLease(ServerThread& thread, uint64_t job_id, const LeaseGrant& grant)
    : thread_(&thread), job_id_(job_id), grant_(grant) {
  thread.begin_service_lease();
}

void ServiceLease::release(bool discard) {
  ServerThread* const thread = std::exchange(thread_, nullptr);
  if (thread == nullptr) return;
  thread->end_service_lease(job_id_, grant_, discard);
  kept_.reset();
}

}  // namespace memd
