// Which job goes next where several want the same device or the same worker.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <unordered_map>

#include "base/job_weight.h"

namespace memd {

/// Deficit round robin over costs (bytes). In each round a job may spend its quantum, which is in
/// proportion to its weight; what it spends beyond that it pays back in the next rounds, and what
/// it leaves is lost when it wants nothing more. A job that was away for a round is served first
/// until it has spent a quantum. Each operation costs the same however many jobs there are, added
/// up over many. Owned by whoever asks for turns, on its thread.
class JobTurns {
 public:
  /// `quantum`: of a job of weight 1. Where more is spent at once than that, who leaves for
  /// kRoundsKept rounds may leave a debt behind.
  explicit JobTurns(uint64_t quantum) : quantum_(quantum) {}
  void set_quantum(uint64_t quantum) { quantum_ = quantum; }
  /// Kept until it is 1 again, which every job has that nothing was said of.
  void set_weight(JobId job, JobWeight weight);

  /// The job has something to do.
  void want(JobId job);
  /// It has nothing left.
  void leave(JobId job);
  /// The job that next() returned must not do it before resume().
  void hold(JobId job);
  void resume(JobId job);

  /// The job whose turn it is, of those that want one and are not held: it spends something, leaves
  /// or is held before the next call.
  std::optional<JobId> next();
  /// For the job that next() returned.
  void spend(JobId job, uint64_t cost);

  /// `all` in proportion to the job's weight among those that want something now or did in the last
  /// kRoundsKept rounds, the daemon left out. For the daemon, and for a job that is alone, `all`.
  uint64_t share(JobId job, uint64_t all) const;
  /// No other job but the daemon wants something now or did in the last kRoundsKept rounds.
  bool is_alone(JobId job) const;

  /// A job that does one thing after the other is away in between: for so long it counts as there,
  /// so that others do not take its place. As long as a job of the least weight pays back one
  /// quantum of weight 1.
  static constexpr uint64_t kRoundsKept = JobWeight::kOne / JobWeight::kMin;

 private:
  enum class Place : uint8_t { first, waiting, held, leaving };
  struct Turn {
    JobId job;
    uint32_t weight = JobWeight::kOne;
    Place place = Place::first;
    int64_t left = 0;      // of its quantum; below 0: a debt
    bool is_on = true;     // its turn has begun
    uint64_t left_at = 0;  // spent_ when it left
    bool left_first = false;
  };
  using Turns = std::list<Turn>;

  Turns& in(Place place);
  void move(Turns::iterator turn, Place to, bool to_front = false);
  int64_t quantum(const Turn& turn) const;
  /// The bytes that all of them spend in a round.
  uint64_t round(const Turn& turn) const;
  void come_back(Turns::iterator turn);
  void forget_who_left();

  uint64_t quantum_;
  uint64_t spent_ = 0;                           // by all
  uint64_t weight_here_ = 0;                     // of all turns but the daemon's
  std::unordered_map<JobId, uint32_t> weights_;  // other than 1
  std::unordered_map<JobId, Turns::iterator> turns_;
  Turns first_, waiting_, held_, leaving_;  // `leaving_`: the longest away first
};

}  // namespace memd
