// The ranks that train a job together on this node.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace memd {

/// A session's place among the processes that one launcher started.
struct RankPlace {
  uint32_t rank = 0;
  uint32_t world_size = 1;
};

/// Owns which session has which rank, and which ranks have ended their gradients of the next step.
/// A gradient of several ranks is a sum in one slot. They add to it in their order, because a
/// floating-point sum depends on it; a rank that has ended its gradients adds no more.
///
/// A *start* begins with the first rank that attaches, and ends with the last one that leaves. Once
/// a rank has left, sums lack its part: nothing more is made in this start. Owned by the
/// TrainingGroup; the server thread calls everything; nothing blocks.
class Ranks {
 public:
  static constexpr uint32_t kWorldMax = 16;

  /// ok, or why no session may take the place now.
  Status check_place(const std::string& job_name, const RankPlace& place) const;
  void attach(uint64_t session_id, uint32_t process_id, const RankPlace& place);
  void detach(uint64_t session_id);

  bool is_empty() const { return attached_count_ == 0; }
  /// Counts starts: 0 before the first one.
  uint64_t start() const { return start_; }
  uint32_t world_size() const { return static_cast<uint32_t>(places_.size()); }
  std::optional<uint32_t> rank_of(uint64_t session_id) const;
  /// The rank's session, or its last one; 0: the rank has not come yet.
  uint64_t session_of(uint32_t rank) const { return places_[rank].session_id; }
  /// ok, or which rank has left first: others leave because of it.
  Status check_whole(const std::string& job_name) const;
  /// For people.
  std::string describe(uint32_t rank) const;

  void end_gradients(uint32_t rank) { places_[rank].has_ended_gradients = true; }
  /// A step has taken them, or they were dropped.
  void begin_gradients();
  bool has_ended_gradients(uint32_t rank) const { return places_[rank].has_ended_gradients; }
  bool have_all_ended_gradients() const;

 private:
  struct Place {
    uint64_t session_id = 0;
    uint32_t process_id = 0;
    bool has_left = false;
    bool has_ended_gradients = false;
  };

  std::vector<Place> places_;
  std::optional<uint32_t> left_first_;
  uint32_t attached_count_ = 0;
  uint64_t start_ = 0;
};

}  // namespace memd
