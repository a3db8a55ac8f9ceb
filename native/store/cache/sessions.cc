#include "store/cache/sessions.h"

#include <algorithm>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/failpoint.h"

namespace memd {

Result<std::shared_ptr<Session>> Sessions::create(uint64_t job_id,
                                                  const SessionOwner& owner,
                                                  JobLedger& ledger) {
  auto ring = ServerRing::create();
  if (!ring.is_ok()) return ring.status();
  auto session = std::make_shared<Session>(Session{.session_id = id_next_++,
                                                   .job_id = job_id,
                                                   .ring = std::move(ring).value(),
                                                   .request_count_open = 0,
                                                   .owner = owner,
                                                   .step_committed = 0,
                                                   .plan = nullptr});
  MEMD_FAILPOINT("session.before_attached");
  if (Status kept = keep(ledger, *session); !kept.is_ok()) return kept;
  return session;
}

void Sessions::remove(uint64_t session_id) {
  all_.erase(session_id);
  not_resumed_.erase(session_id);
}

Status Sessions::keep(JobLedger& ledger, const Session& session) {
  if (!ledger.is_open()) return Status::ok();
  // The record last: a session that it names is kept.
  keepsakes_.keep_session(
      session.session_id, session.ring.session_fd(), session.ring.doorbell_fd());
  const Status noted =
      ledger.note_session({.session_id = session.session_id, .owner = session.owner});
  if (!noted.is_ok()) forget(ledger, session.session_id);
  return noted;
}

void Sessions::note(JobLedger& ledger, const Session& session) {
  const Status noted = ledger.note_session({.session_id = session.session_id,
                                            .owner = session.owner,
                                            .step_committed = session.step_committed});
  MEMD_CHECK(noted.is_ok());  // it has its place
}

void Sessions::forget(JobLedger& ledger, uint64_t session_id) {
  if (!ledger.is_open()) return;
  ledger.forget_session(session_id);
  keepsakes_.forget_session(session_id);
}

void Sessions::begin_ids(uint64_t taken_max) {
  // A trainer may come back to a session of a daemon whose memory was lost: no other session of its
  // process may have that number by then.
  if (keepsakes_.has_keeper()) id_next_ = (uint64_t{std::random_device{}()} << 16) + 1;
  id_next_ = std::max(id_next_, taken_max + 1);
}

void Sessions::adopt(const std::shared_ptr<Session>& session) {
  add(session);
  not_resumed_.insert(session->session_id);
}

std::vector<KeptSession> Sessions::kept() const {
  std::vector<KeptSession> kept;
  for (const uint64_t session_id : not_resumed_) {
    const Session& session = *all_.at(session_id);
    kept.push_back({.session_id = session_id, .job_id = session.job_id, .owner = session.owner});
  }
  return kept;
}

Result<std::shared_ptr<Session>> Sessions::resume(uint64_t session_id, const SessionOwner& owner) {
  const auto found = all_.find(session_id);
  // Others are not told its owner.
  if (found == all_.end() || found->second->owner != owner) {
    return error(StatusCode::fenced,
                 "this daemon has no such session of this process: its memory did not outlive the "
                 "daemon before; connect again: session ",
                 session_id);
  }
  not_resumed_.erase(session_id);
  return found->second;
}

}  // namespace memd
