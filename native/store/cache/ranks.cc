#include "store/cache/ranks.h"

#include <algorithm>

#include "base/check.h"

namespace memd {

Status Ranks::check_place(const std::string& job_name, const RankPlace& place) const {
  if (place.rank >= place.world_size || place.world_size > kWorldMax) {
    return error(StatusCode::invalid_argument,
                 "job ",
                 job_name,
                 ": a rank is below its world size, which is at most ",
                 kWorldMax,
                 " on a node: rank ",
                 place.rank,
                 " of ",
                 place.world_size);
  }
  if (is_empty()) return Status::ok();
  // They may be ending: torchrun starts anew as soon as their processes are gone.
  if (Status whole = check_whole(job_name); !whole.is_ok()) {
    return error(StatusCode::unavailable,
                 whole.message(),
                 ", and others of its start are attached still; try again when all have ended");
  }
  if (place.world_size != world_size()) {
    return error(StatusCode::in_use,
                 "job ",
                 job_name,
                 " is trained by ",
                 world_size(),
                 " ranks, which are attached; end them before others attach as ranks of ",
                 place.world_size);
  }
  if (session_of(place.rank) == 0) return Status::ok();
  return error(StatusCode::in_use,
               "job ",
               job_name,
               " has ",
               describe(place.rank),
               " already; each process has a rank of its own, and attaches as it once");
}

void Ranks::attach(uint64_t session_id, uint32_t process_id, const RankPlace& place) {
  if (is_empty()) {
    places_.assign(place.world_size, {});
    left_first_.reset();
    ++start_;
  }
  MEMD_CHECK(session_of(place.rank) == 0);
  places_[place.rank] = {.session_id = session_id, .process_id = process_id};
  ++attached_count_;
}

void Ranks::detach(uint64_t session_id) {
  const auto rank = rank_of(session_id);
  if (!rank) return;
  places_[*rank].has_left = true;
  if (!left_first_) left_first_ = rank;
  --attached_count_;
}

std::optional<uint32_t> Ranks::rank_of(uint64_t session_id) const {
  const auto found = std::find_if(places_.begin(), places_.end(), [&](const Place& place) {
    return place.session_id == session_id && !place.has_left;
  });
  if (session_id == 0 || found == places_.end()) return std::nullopt;
  return static_cast<uint32_t>(found - places_.begin());
}

Status Ranks::check_whole(const std::string& job_name) const {
  if (!left_first_) return Status::ok();
  return error(StatusCode::fenced,
               "job ",
               job_name,
               ": ",
               describe(*left_first_),
               " has ended, and no step is made without it; start all ranks again, and resume from "
               "the last step");
}

std::string Ranks::describe(uint32_t rank) const {
  const Place& place = places_[rank];
  const std::string who = concat("rank ", rank, " of ", world_size());
  return place.session_id == 0 ? concat(who, ", which has not attached")
                               : concat(who, " (process ", place.process_id, ")");
}

void Ranks::begin_gradients() {
  for (Place& place : places_) place.has_ended_gradients = false;
}

bool Ranks::have_all_ended_gradients() const {
  return std::all_of(
      places_.begin(), places_.end(), [](const Place& place) { return place.has_ended_gradients; });
}

}  // namespace memd
