#include "store/cache/training_group.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace memd {

Session* TrainingGroup::find_session(uint64_t session_id) const {
  const auto found = std::find_if(sessions_.begin(), sessions_.end(), [&](const auto& session) {
    return session->session_id == session_id;
  });
  return found == sessions_.end() ? nullptr : found->get();
}

std::optional<size_t> TrainingGroup::seat_of(uint64_t session_id) const {
  const auto found = std::find(seats_.begin(), seats_.end(), session_id);
  if (session_id == 0 || found == seats_.end()) return std::nullopt;
  return static_cast<size_t>(found - seats_.begin());
}

size_t TrainingGroup::size() const {
  return seats_.size() - static_cast<size_t>(std::count(seats_.begin(), seats_.end(), 0));
}

// ---- Members ------------------------------------------------------------------------------------

void TrainingGroup::take_seat(size_t seat, Session& session) {
  MEMD_CHECK(!is_shown_ && seats_[seat] == 0);
  seats_[seat] = session.session_id;
  note(seat);
  session.ring.set_in_group(true);
}

void TrainingGroup::free_seat(size_t seat) {
  if (Session* const session = find_session(seats_[seat])) session->ring.set_in_group(false);
  seats_[seat] = 0;
  note(seat);
}

Status TrainingGroup::join(uint64_t session_id) {
  if (contains(session_id)) return Status::ok();
  Session* const session = find_session(session_id);
  if (session == nullptr)
    return error(StatusCode::fenced, "the session has ended; connect again: ", session_id);
  if (is_shown_) {
    return error(StatusCode::unavailable,
                 "a step of the training group is under way; join when it has ended");
  }
  const auto free = std::find(seats_.begin(), seats_.end(), 0);
  if (free == seats_.end())
    return error(StatusCode::capacity, "a training group has at most ", seats_.size(), " sessions");
  take_seat(static_cast<size_t>(free - seats_.begin()), *session);
  return Status::ok();
}

bool TrainingGroup::leave(uint64_t session_id) {
  const auto seat = seat_of(session_id);
  if (!seat) return false;
  const bool was_shown = std::exchange(is_shown_, false);
  free_seat(*seat);
  return was_shown;
}

// ---- Steps --------------------------------------------------------------------------------------

Status TrainingGroup::check_step(uint64_t session_id) const {
  if (contains(session_id) || size() <= 1) return Status::ok();
  return error(StatusCode::invalid_argument,
               "session ",
               session_id,
               " is none of the ",
               size(),
               " that train this job together; end them, or train another job");
}

void TrainingGroup::begin_step(uint64_t session_id) {
  MEMD_CHECK(!is_shown_);
  Session* const session = find_session(session_id);
  // If it has ended, or a group of several was formed meanwhile, its values are nobody's until they
  // are committed.
  if (session == nullptr || !check_step(session_id).is_ok()) return;
  if (!contains(session_id)) {
    for (size_t seat = 0; seat < seats_.size(); ++seat) {
      if (seats_[seat] != 0) free_seat(seat);
    }
    take_seat(0, *session);
  }
  is_shown_ = true;
}

// ---- Another daemon -----------------------------------------------------------------------------

void TrainingGroup::note(size_t seat) const {
  if (ledger_ != nullptr) ledger_->note_seat(seat, seats_[seat]);
}

void TrainingGroup::note_all() const {
  for (size_t seat = 0; seat < seats_.size(); ++seat) note(seat);
}

void TrainingGroup::adopt(const TrainingGroupSeats& seats) {
  for (size_t seat = 0; seat < seats.size(); ++seat) {
    Session* const session = find_session(seats[seat]);
    if (session != nullptr && !contains(seats[seat])) take_seat(seat, *session);
  }
}

}  // namespace memd
