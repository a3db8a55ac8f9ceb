#include "base/job_turns.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace memd {

void JobTurns::set_weight(JobId job, JobWeight weight) {
  if (weight == JobWeight()) {
    weights_.erase(job);
  } else {
    weights_[job] = weight.code();
  }
  const auto found = turns_.find(job);
  if (found == turns_.end()) return;
  Turn& turn = *found->second;
  if (job != kDaemonJob) weight_here_ = weight_here_ - turn.weight + weight.code();
  turn.weight = weight.code();
  turn.left = std::min(turn.left, quantum(turn));
}

JobTurns::Turns& JobTurns::in(Place place) {
  switch (place) {
    case Place::first:
      return first_;
    case Place::waiting:
      return waiting_;
    case Place::held:
      return held_;
    case Place::leaving:
      return leaving_;
  }
  MEMD_CHECK(false);
  return waiting_;
}

void JobTurns::move(Turns::iterator turn, Place to, bool to_front) {
  Turns& target = in(to);
  target.splice(to_front ? target.begin() : target.end(), in(turn->place), turn);
  turn->place = to;
}

int64_t JobTurns::quantum(const Turn& turn) const {
  return std::max<int64_t>(static_cast<int64_t>(quantum_ * turn.weight / JobWeight::kOne), 1);
}

uint64_t JobTurns::round(const Turn& turn) const {
  return std::max<uint64_t>(
      quantum_ * std::max<uint64_t>(weight_here_, turn.weight) / JobWeight::kOne, 1);
}

void JobTurns::want(JobId job) {
  const auto found = turns_.find(job);
  if (found != turns_.end()) {
    if (found->second->place == Place::leaving) come_back(found->second);
    return;
  }
  const auto weight = weights_.find(job);
  first_.push_back(
      {.job = job, .weight = weight == weights_.end() ? JobWeight::kOne : weight->second});
  const auto turn = std::prev(first_.end());
  turn->left = quantum(*turn);
  if (job != kDaemonJob) weight_here_ += turn->weight;
  turns_[job] = turn;
}

void JobTurns::come_back(Turns::iterator turn) {
  const auto rounds =
      static_cast<int64_t>(std::min((spent_ - turn->left_at) / round(*turn), kRoundsKept));
  // Within a round it is still its old turn: who leaves after each request gets no more for it.
  if (rounds > 0) turn->left = std::min(turn->left + rounds * quantum(*turn), quantum(*turn));
  turn->is_on = turn->left > 0 && (rounds > 0 || turn->left_first);
  move(turn, turn->is_on ? Place::first : Place::waiting);
}

void JobTurns::leave(JobId job) {
  const auto turn = turns_.at(job);
  if (turn->place == Place::leaving) return;
  turn->left_at = spent_;
  turn->left_first = turn->place == Place::first;
  move(turn, Place::leaving);
}

void JobTurns::hold(JobId job) { move(turns_.at(job), Place::held); }

void JobTurns::resume(JobId job) {
  const auto found = turns_.find(job);
  if (found == turns_.end() || found->second->place != Place::held) return;
  // With what is left of its turn.
  move(found->second, Place::waiting, true);
}

std::optional<JobId> JobTurns::next() {
  for (;;) {
    Turns& turns = first_.empty() ? waiting_ : first_;
    if (turns.empty()) return std::nullopt;
    const auto turn = turns.begin();
    if (!turn->is_on) {
      turn->left = std::min(turn->left + quantum(*turn), quantum(*turn));
      turn->is_on = true;
    }
    if (turn->left > 0) return turn->job;
    turn->is_on = false;
    move(turn, Place::waiting);
  }
}

void JobTurns::spend(JobId job, uint64_t cost) {
  turns_.at(job)->left -= static_cast<int64_t>(cost);
  spent_ += cost;
  forget_who_left();
}

void JobTurns::forget_who_left() {
  while (!leaving_.empty()) {
    const Turn& turn = leaving_.front();
    if (spent_ - turn.left_at < kRoundsKept * round(turn)) return;
    if (turn.job != kDaemonJob) weight_here_ -= turn.weight;
    turns_.erase(turn.job);
    leaving_.pop_front();
  }
}

uint64_t JobTurns::share(JobId job, uint64_t all) const {
  const auto turn = turns_.find(job);
  if (job == kDaemonJob || turn == turns_.end()) return all;
  return all * turn->second->weight / weight_here_;
}

bool JobTurns::is_alone(JobId job) const {
  const auto turn = turns_.find(job);
  const bool counts = job != kDaemonJob && turn != turns_.end();
  return weight_here_ == (counts ? turn->second->weight : 0);
}

}  // namespace memd
