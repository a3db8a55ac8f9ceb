// The sessions that train a job together.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "ring/resident_lease.h"
#include "store/cache/ranks.h"
#include "store/cache/session.h"
#include "store/journal/contributors.h"
#include "store/journal/job_ledger.h"

namespace memd {

/// Owns its members, each with a seat, and whether they see what the step that runs has made. A
/// session becomes the group when the turn of its step comes. Then no value is uncommitted, so that
/// the rows of the shard table never show one group's value to another. A group of several members
/// is formed by join(), and left by the end of a member alone. Their gradients may be summed in one
/// slot: Contributors names them by their seats, and a member keeps its seat until no gradient has
/// a part of it.
///
/// Owned by the JobCache; the server thread calls everything; nothing blocks.
class TrainingGroup {
 public:
  using List = std::vector<std::shared_ptr<Session>>;

  /// `sessions`: those that are attached to the job.
  TrainingGroup(const List& sessions, JobLedger& ledger) : sessions_(sessions), ledger_(ledger) {}
  TrainingGroup(const TrainingGroup&) = delete;
  TrainingGroup& operator=(const TrainingGroup&) = delete;

  bool contains(uint64_t session_id) const { return seat_of(session_id).has_value(); }
  /// They see each other's uncommitted values.
  bool are_together(uint64_t a, uint64_t b) const { return a == b || (contains(a) && contains(b)); }
  size_t size() const;
  /// The session has fellow members.
  bool is_shared_by(uint64_t session_id) const { return contains(session_id) && size() > 1; }
  /// The visibility in the row of an uncommitted value.
  Visibility visibility() const { return is_shown_ ? Visibility::group : Visibility::nobody; }

  /// An attached session trains with those that are in the group. Refused while a step shows its
  /// values, and beyond kTrainingGroupMax members.
  Status join(uint64_t session_id);
  /// As one of several ranks, which are the group from the first one on.
  Status join(uint64_t session_id, const std::string& job_name, const RankPlace& place);
  /// The session ends. True where the group saw uncommitted values: nobody does until the commit,
  /// and the caller withdraws them.
  bool leave(uint64_t session_id);

  /// ok, or why a session outside of the group must not step.
  Status check_step(uint64_t session_id) const;
  /// The turn of the session's step has come: from here on its values are the group's to see. A
  /// group of one member gives way to another session.
  void begin_step(uint64_t session_id);
  /// It is committed, or is being undone: nothing that is uncommitted is shown from here on.
  void end_step() { is_shown_ = false; }

  Ranks& ranks() { return ranks_; }
  const Ranks& ranks() const { return ranks_; }
  /// The first rank that has to add to a sum, or to end its gradients, before this one adds its
  /// part; none: it is its turn.
  std::optional<uint32_t> rank_before(const Contributors& contributors, uint32_t rank) const;

  // Gradients.
  /// They are, with one more session: all of them train together, or it alone overwrites what the
  /// others made.
  Contributors with(const Contributors& contributors, uint64_t session_id) const;
  /// The session is one of them.
  bool has(const Contributors& contributors, uint64_t session_id) const;
  /// There are some, and all of them train with the session: its step may take the sum.
  bool are_all_with(const Contributors& contributors, uint64_t session_id) const;
  std::vector<uint64_t> sessions_of(const Contributors& contributors) const;
  /// These sessions; where one of them has ended, that one.
  Contributors of(const std::vector<uint64_t>& session_ids) const;
  /// A gradient that this session has added to is void: the session's next lease of a gradient, or
  /// its next step, is refused with `why`. The first is told, once.
  void tell(uint64_t session_id, const Status& why);
  std::optional<Status> take_notice(uint64_t session_id);

  /// As the daemon before had it, of the sessions that came back.
  void adopt(const TrainingGroupSeats& seats);
  /// All of it, into a ledger that is new or was adopted.
  void note_all() const;

 private:
  Session* find_session(uint64_t session_id) const;
  std::optional<size_t> seat_of(uint64_t session_id) const;
  void take_seat(size_t seat, Session& session);
  void free_seat(size_t seat);
  void free_seats();
  void note(size_t seat) const;

  const List& sessions_;
  JobLedger& ledger_;
  std::array<uint64_t, kTrainingGroupMax> seats_{};
  std::map<uint64_t, Status> notices_;  // by session
  bool is_shown_ = false;
  Ranks ranks_;
};

/// A sum cannot be taken apart: without the part of one session it is nobody's.
Status void_gradient(const std::string& job_name, std::string_view shard_name, uint64_t session_id);

}  // namespace memd
