#include "store/cache/training_group.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace memd {
namespace {

constexpr uint64_t bit(size_t seat) { return uint64_t{1} << seat; }
static_assert(kTrainingGroupMax < 63);  // so that no set looks sealed

}  // namespace

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

void TrainingGroup::free_seats() {
  for (size_t seat = 0; seat < seats_.size(); ++seat) {
    if (seats_[seat] != 0) free_seat(seat);
  }
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

Status TrainingGroup::join(uint64_t session_id,
                           const std::string& job_name,
                           const RankPlace& place) {
  Session* const session = find_session(session_id);
  MEMD_CHECK(session != nullptr);
  if (Status status = ranks_.check_place(job_name, place); !status.is_ok()) return status;
  if (ranks_.is_empty()) {
    // Sums of several name their seats, which no rank may take. The gradients of one name it by its
    // id.
    if (is_shown_ || size() > 1) {
      return error(StatusCode::unavailable,
                   "job ",
                   job_name,
                   " still ends what others have trained; try again");
    }
    free_seats();
  }
  if (Status status = join(session_id); !status.is_ok()) return status;
  ranks_.attach(session_id, session->owner.pid, place);
  return Status::ok();
}

bool TrainingGroup::leave(uint64_t session_id) {
  ranks_.detach(session_id);
  const auto seat = seat_of(session_id);
  if (!seat) return false;
  const bool was_shown = std::exchange(is_shown_, false);
  notices_.erase(session_id);
  free_seat(*seat);
  return was_shown;
}

// ---- Steps --------------------------------------------------------------------------------------

Status TrainingGroup::check_step(uint64_t session_id) const {
  // Also before the second rank comes, while the group is of one.
  if (!ranks_.is_empty() && !ranks_.rank_of(session_id)) {
    return error(StatusCode::in_use,
                 "session ",
                 session_id,
                 " is none of the ",
                 ranks_.world_size(),
                 " ranks that train this job; end them, or train another job");
  }
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
    free_seats();
    take_seat(0, *session);
  }
  is_shown_ = true;
}

// ---- Gradients ----------------------------------------------------------------------------------

Contributors TrainingGroup::with(const Contributors& contributors, uint64_t session_id) const {
  if (has(contributors, session_id)) return contributors;
  if (!are_all_with(contributors, session_id)) return Contributors::one(session_id);
  const uint64_t before =
      contributors.seats() != 0 ? contributors.seats() : bit(*seat_of(contributors.only()));
  return Contributors::several(before | bit(*seat_of(session_id)));
}

bool TrainingGroup::has(const Contributors& contributors, uint64_t session_id) const {
  if (contributors.only() == session_id) return true;
  const auto seat = seat_of(session_id);
  return seat && (contributors.seats() & bit(*seat)) != 0;
}

bool TrainingGroup::are_all_with(const Contributors& contributors, uint64_t session_id) const {
  if (contributors.empty() || contributors.is_sealed()) return false;
  return contributors.seats() != 0 ? contains(session_id)
                                   : are_together(contributors.only(), session_id);
}

std::optional<uint32_t> TrainingGroup::rank_before(const Contributors& contributors,
                                                   uint32_t rank) const {
  for (uint32_t other = 0; other < rank; ++other) {
    const uint64_t session_id = ranks_.session_of(other);
    const bool has_added = session_id != 0 && has(contributors, session_id);
    if (!has_added && !ranks_.has_ended_gradients(other)) return other;
  }
  return std::nullopt;
}

std::vector<uint64_t> TrainingGroup::sessions_of(const Contributors& contributors) const {
  std::vector<uint64_t> session_ids;
  if (contributors.only() != 0) session_ids.push_back(contributors.only());
  for (size_t seat = 0; seat < seats_.size(); ++seat) {
    if ((contributors.seats() & bit(seat)) != 0) session_ids.push_back(seats_[seat]);
  }
  return session_ids;
}

Contributors TrainingGroup::of(const std::vector<uint64_t>& session_ids) const {
  Contributors all;
  for (const uint64_t session_id : session_ids) {
    if (find_session(session_id) == nullptr) return Contributors::one(session_id);
    all = with(all, session_id);
  }
  return all;
}

void TrainingGroup::tell(uint64_t session_id, const Status& why) {
  const auto seat = seat_of(session_id);
  if (seat && notices_.emplace(session_id, why).second) note(*seat);
}

std::optional<Status> TrainingGroup::take_notice(uint64_t session_id) {
  const auto found = notices_.find(session_id);
  if (found == notices_.end()) return std::nullopt;
  const Status why = found->second;
  notices_.erase(found);
  note(*seat_of(session_id));
  return why;
}

Status void_gradient(const std::string& job_name,
                     std::string_view shard_name,
                     uint64_t session_id) {
  return error(StatusCode::invalid_argument,
               "the gradient of shard ",
               job_name,
               "/",
               shard_name,
               " is void, since session ",
               session_id,
               ", which had added to it, has ended or dropped it; run backward again");
}

// ---- Another daemon -----------------------------------------------------------------------------

void TrainingGroup::note(size_t seat) const {
  ledger_.note_seat(seat,
                    {.session_id = seats_[seat], .has_notice = notices_.contains(seats_[seat])});
}

void TrainingGroup::note_all() const {
  for (size_t seat = 0; seat < seats_.size(); ++seat) note(seat);
}

void TrainingGroup::adopt(const TrainingGroupSeats& seats) {
  for (size_t seat = 0; seat < seats.size(); ++seat) {
    const auto& [session_id, has_notice] = seats[seat];
    Session* const session = find_session(session_id);
    if (session == nullptr || contains(session_id)) continue;
    take_seat(seat, *session);
    if (has_notice) {
      tell(session_id,
           error(StatusCode::invalid_argument,
                 "a gradient is void, since a session that had added to it ended before this "
                 "daemon began; run backward again"));
    }
  }
}

}  // namespace memd
