#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "bind/bind.h"
#include "server/server.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {

void bind_ranks(nb::module_& module, nb::class_<Server>& server) {
  module.attr("RANKS_MAX") = Ranks::kWorldMax;
  nb::class_<RanksReport>(module, "RanksReport", "The ranks of a job, none of which has left.")
      .def_ro("start", &RanksReport::start, "Another one where all ranks were started again.")
      .def_ro("names", &RanksReport::names, "By rank, for people.")
      .def_ro("sessions", &RanksReport::sessions, "By rank; 0: it has not attached.");
  server
      .def(
          "join_ranks",
          [](Server& self, uint64_t session_id, uint32_t rank, uint32_t world_size) {
            const RankPlace place{.rank = rank, .world_size = world_size};
            unlocked([&] { return self.ranks().join(session_id, place); });
          },
          "session_id"_a,
          nb::kw_only(),
          "rank"_a,
          "world_size"_a)
      .def(
          "ranks",
          [](Server& self, uint64_t session_id) {
            return unlocked([&] { return self.ranks().report(session_id); });
          },
          "session_id"_a,
          "The ranks of the session's job; fenced where one of them has left.")
      .def(
          "end_gradients",
          [](Server& self, uint64_t session_id) {
            unlocked([&] { return self.ranks().end_gradients(session_id); });
          },
          "session_id"_a,
          "A rank has made its gradients of the next step.")
      .def(
          "gradients_of_other_ranks",
          [](Server& self, uint64_t session_id) {
            return unlocked([&] { return self.ranks().made_by_others(session_id); });
          },
          "session_id"_a,
          "Shards whose gradient is a sum without a part of this rank.")
      .def(
          "drop_gradients_of_ranks",
          [](Server& self, uint64_t session_id, const std::vector<uint32_t>& shard_ids) {
            unlocked([&] { return self.ranks().drop_gradients(session_id, shard_ids); });
          },
          "session_id"_a,
          "shard_ids"_a,
          "All ranks do.");
}

}  // namespace memd
