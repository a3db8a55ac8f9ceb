#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "bind/bind.h"
#include "ring/client_session.h"
#include "ring/protocol.h"
#include "store/cache/scratch_names.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {
namespace {

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto of = [dtype](Code code) {
    return nb::dlpack::dtype{
        static_cast<uint8_t>(code), static_cast<uint8_t>(8 * dtype_bytes(dtype)), 1};
  };
  switch (dtype) {
    case DType::float32:
    case DType::float16:
    case DType::float64:
      return of(Code::Float);
    case DType::bfloat16:
      return of(Code::Bfloat);
    case DType::int8:
    case DType::int16:
    case DType::int32:
    case DType::int64:
      return of(Code::Int);
    case DType::uint8:
      return of(Code::UInt);
    case DType::boolean:
      return of(Code::Bool);
    case DType::unspecified:
      break;
  }
  throw nb::value_error("unknown dtype");
}

/// Gives the lease back when the last view of the tensor's storage is gone.
struct HeldLease {
  std::shared_ptr<ClientSession> session;
  LeasedBytes bytes;

  HeldLease(std::shared_ptr<ClientSession> of, const LeasedBytes& leased)
      : session(std::move(of)), bytes(leased) {}
  ~HeldLease() { session->release(bytes); }
  HeldLease(const HeldLease&) = delete;
  HeldLease& operator=(const HeldLease&) = delete;
};

/// Descriptors of the arena's segments from an index on.
using SegmentsCallback = nb::typed<nb::callable, std::vector<int>(uint64_t)>;

StallPlace stall_place(uint8_t phase, uint32_t group) {
  if (phase >= kStallPhaseCount) throw nb::value_error("unknown phase");
  return {.phase = static_cast<StallPhase>(phase), .group = group};
}

/// A torch tensor over the leased bytes. If this raises, they are given back as they are;
/// `is_taken` holds from then on.
nb::object tensor_over(const std::shared_ptr<ClientSession>& session,
                       const LeasedBytes& bytes,
                       DType dtype,
                       const std::vector<size_t>& shape,
                       bool is_taken = false) {
  auto held = std::make_unique<HeldLease>(session, bytes);
  size_t wanted_bytes = dtype_bytes(dtype);
  for (const size_t size : shape) wanted_bytes *= size;
  if (wanted_bytes != bytes.length_bytes) {
    raise(error(StatusCode::invalid_argument,
                "shape and dtype do not fit the shard: ",
                wanted_bytes,
                " bytes against ",
                bytes.length_bytes));
  }
  const nb::capsule owner(held.get(), [](void* lease) noexcept {
    const std::unique_ptr<HeldLease> ended(static_cast<HeldLease*>(lease));
  });
  HeldLease& lease = *held.release();
  // nb::pytorch asks a Python object for its device and its capsule, in Python: of
  // the 1.9 µs that a resident lease took with it, half.
  // The import may let other threads run, which would wait in the guard of a static that is being
  // initialised while they hold the GIL.
  static PyObject* from_dlpack = nullptr;
  if (from_dlpack == nullptr) {
    from_dlpack = nb::object(nb::module_::import_("torch._C").attr("_from_dlpack")).release().ptr();
  }
  nb::object tensor = nb::handle(from_dlpack)(nb::cast(nb::ndarray<>(bytes.data,
                                                                     shape.size(),
                                                                     shape.data(),
                                                                     owner,
                                                                     nullptr,
                                                                     dlpack_dtype(dtype),
                                                                     nb::device::cpu::value)));
  lease.bytes.is_taken = is_taken;
  return tensor;
}

nb::object lease(const std::shared_ptr<ClientSession>& session,
                 uint32_t shard_id,
                 uint8_t part,
                 uint8_t mode,
                 uint8_t dtype,
                 const std::vector<size_t>& shape,
                 double timeout_s) {
  auto result = [&] {
    const nb::gil_scoped_release unlocked;
    return session->lease(
        shard_id, static_cast<Part>(part), static_cast<LeaseMode>(mode), timeout_ns_of(timeout_s));
  }();
  return tensor_over(session, value_or_raise(std::move(result)), static_cast<DType>(dtype), shape);
}

/// Shard id, dtype, shape, and the number of its group of modules.
using WantedShard = std::tuple<uint32_t, uint8_t, std::vector<size_t>, uint32_t>;

std::vector<nb::object> lease_together(const std::shared_ptr<ClientSession>& session,
                                       const std::vector<WantedShard>& shards,
                                       uint8_t part,
                                       uint8_t mode,
                                       double timeout_s,
                                       uint8_t phase,
                                       bool follows) {
  std::vector<WantedLease> wanted;
  for (const auto& [shard_id, dtype, shape, group] : shards) {
    wanted.push_back({.shard_id = shard_id,
                      .part = static_cast<Part>(part),
                      .mode = static_cast<LeaseMode>(mode),
                      .stall_group = group,
                      .follows = follows});
  }
  const StallPlace place = stall_place(phase, 0);
  auto results = [&] {
    const nb::gil_scoped_release unlocked;
    return session->lease_together(wanted, timeout_ns_of(timeout_s), place.phase);
  }();
  std::vector<nb::object> leases;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto& [shard_id, dtype, shape, group] = shards[i];
    if (!results[i].is_ok()) {
      leases.push_back(status_exception(results[i].status()));
      continue;
    }
    try {
      leases.push_back(tensor_over(session, results[i].value(), static_cast<DType>(dtype), shape));
    } catch (...) {
      // Those after it belong to nobody yet.
      for (size_t rest = i + 1; rest < shards.size(); ++rest) {
        if (results[rest].is_ok()) session->release(results[rest].value());
      }
      throw;
    }
  }
  return leases;
}

void overwrite_gradient(ClientSession& session,
                        uint32_t shard_id,
                        uint32_t stall_group,
                        uintptr_t address,
                        size_t length_bytes,
                        double timeout_s,
                        uint8_t phase) {
  const WantedLease wanted{.shard_id = shard_id,
                           .part = Part::gradient,
                           .mode = LeaseMode::overwrite,
                           .stall_group = stall_group};
  const StallPlace place = stall_place(phase, stall_group);
  raise_unless_ok([&] {
    const nb::gil_scoped_release unlocked;
    return session.overwrite_gradient(wanted,
                                      {reinterpret_cast<const std::byte*>(address), length_bytes},
                                      timeout_ns_of(timeout_s),
                                      place.phase);
  }());
}

/// Without giving the GIL up, which costs more than the lease.
nb::object lease_resident(const std::shared_ptr<ClientSession>& session,
                          uint32_t shard_id,
                          uint8_t dtype,
                          const std::vector<size_t>& shape) {
  const auto bytes = session->lease_resident(shard_id);
  if (!bytes) return nb::none();
  return tensor_over(session, *bytes, static_cast<DType>(dtype), shape);
}

nb::object take_written(const std::shared_ptr<ClientSession>& session,
                        uint32_t shard_id,
                        uint8_t dtype,
                        const std::vector<size_t>& shape) {
  const auto bytes = session->reads().take_written(shard_id);
  if (!bytes) return nb::none();
  return tensor_over(session, *bytes, static_cast<DType>(dtype), shape, true);
}

/// `lease` lives as long as the storage of the tensor that is returned.
nb::object arena_view(ClientSession& session,
                      const nb::object& lease,
                      uintptr_t address,
                      uint8_t dtype,
                      const std::vector<size_t>& shape) {
  size_t length_bytes = dtype_bytes(static_cast<DType>(dtype));
  for (const size_t size : shape) length_bytes *= size;
  const auto place =
      session.reads().place(reinterpret_cast<const std::byte*>(address), length_bytes);
  if (!place || !session.arena().has(*place, length_bytes)) {
    raise(error(StatusCode::invalid_argument,
                "these are no bytes of a living lease of this session: ",
                length_bytes));
  }
  const nb::ndarray<> bytes(session.arena().base() + *place,
                            shape.size(),
                            shape.data(),
                            lease,
                            nullptr,
                            dlpack_dtype(static_cast<DType>(dtype)),
                            nb::device::cpu::value);
  return nb::object(nb::module_::import_("torch._C").attr("_from_dlpack"))(nb::cast(bytes));
}

std::shared_ptr<ClientSession> connect(int session_fd,
                                       int table_fd,
                                       int doorbell_fd,
                                       int connection_fd,
                                       uint64_t segment_bytes,
                                       uint64_t arena_reserved_bytes,
                                       SegmentsCallback more_segments) {
  ClientSessionOptions options;
  options.session = OwnedFd(session_fd);
  options.table = OwnedFd(table_fd);
  options.doorbell = OwnedFd(doorbell_fd);
  options.connection = OwnedFd(connection_fd);
  options.segment_bytes = segment_bytes;
  options.arena_reserved_bytes = arena_reserved_bytes;
  // The last reference may die on any thread: it is given back with the GIL.
  const std::shared_ptr<nb::callable> callback(new nb::callable(std::move(more_segments)),
                                               [](nb::callable* held) {
                                                 if (!nb::is_alive()) return;
                                                 const nb::gil_scoped_acquire locked;
                                                 delete held;
                                               });
  options.more_segments = [callback](uint64_t first) -> Result<std::vector<OwnedFd>> {
    const nb::gil_scoped_acquire locked;
    try {
      std::vector<OwnedFd> fds;
      for (const int fd : nb::cast<std::vector<int>>((*callback)(first))) fds.emplace_back(fd);
      return fds;
    } catch (const std::exception& failure) {  // raised there, or no list of descriptors
      return error(StatusCode::unavailable, "the daemon sent no segments: ", failure.what());
    }
  };
  return value_or_raise(ClientSession::create(std::move(options)));
}

void bind_words(nb::module_& module) {
  module.attr("PROTOCOL_OLDEST") = kProtocolOldest;
  module.attr("PROTOCOL_VERSION") = kProtocolVersion;
  module.attr("PART_VALUE") = static_cast<int>(Part::value);
  module.attr("PART_GRADIENT") = static_cast<int>(Part::gradient);
  module.attr("PART_RANK_SUM") = static_cast<int>(Part::rank_sum);
  module.attr("SCRATCH_PREFIX") = std::string(kScratchPrefix);
  module.attr("MODE_READ") = static_cast<int>(LeaseMode::read);
  module.attr("MODE_WRITE") = static_cast<int>(LeaseMode::write);
  module.attr("STALL_STEP") = static_cast<int>(LeaseWait::step);
  module.attr("STALL_GRADIENT") = static_cast<int>(LeaseWait::gradient);
  module.attr("PHASE_FORWARD") = static_cast<int>(StallPhase::forward);
  module.attr("PHASE_BACKWARD") = static_cast<int>(StallPhase::backward);
  module.attr("PHASE_STEP") = static_cast<int>(StallPhase::step);
  module.attr("PHASE_OTHER") = static_cast<int>(StallPhase::other);
  module.attr("MODE_OVERWRITE") = static_cast<int>(LeaseMode::overwrite);
}

void bind_session_statistics(nb::module_& module) {
  nb::class_<ClientStatistics>(module, "ClientStatistics")
      .def_ro("lease_count", &ClientStatistics::lease_count)
      .def_ro("hits", &ClientStatistics::hits, "Those without a request.")
      .def_ro("resident_count",
              &ClientStatistics::resident_count,
              "Those that the daemon made wait for nothing.")
      .def_prop_ro("lease_wait_seconds",
                   [](const ClientStatistics& self) {
                     return static_cast<double>(self.lease_wait_ns) * 1e-9;
                   })
      .def_prop_ro("step_wall_seconds",
                   [](const ClientStatistics& self) {
                     return static_cast<double>(self.stalls.step_wall_ns()) * 1e-9;
                   })
      .def_prop_ro("stall_phase_seconds",
                   [](const ClientStatistics& self) { return seconds_by_phase(self.stalls); })
      .def_prop_ro("stall_group_seconds",
                   [](const ClientStatistics& self) { return seconds_by_group(self.stalls); })
      .def_ro("leases_held", &ClientStatistics::leases_held);
}

/// How a session is made, its leases, and what it waits for.
void bind_leases(nb::class_<ClientSession>& session) {
  session
      .def(nb::new_(&connect),
           nb::kw_only(),
           "session_fd"_a,
           "table_fd"_a,
           "doorbell_fd"_a,
           "connection_fd"_a,
           "segment_bytes"_a,
           "arena_reserved_bytes"_a,
           "more_segments"_a,
           "Takes ownership of the descriptors. `more_segments(first)` returns descriptors of the "
           "arena's segments from `first` on; it "
           "is called with the GIL when a lease lies beyond what is mapped.")
      .def("lease",
           &lease,
           "shard_id"_a,
           "part"_a,
           "mode"_a,
           "dtype"_a,
           "shape"_a,
           "timeout_s"_a,
           "A torch tensor over the arena's own bytes. The lease lives exactly as long as the "
           "tensor's storage.")
      .def("lease_together",
           &lease_together,
           "shards"_a,
           "part"_a,
           "mode"_a,
           "timeout_s"_a,
           "phase"_a,
           "follows"_a = true,
           "Leases by request, all of them asked for before the first is waited for. `shards`: "
           "shard id, dtype, shape and what stall_group() said of each. `follows`: they come after "
           "the step of follow(). Returns a tensor for each, or the StatusError of that one.")
      .def(
          "stall_group",
          [](ClientSession& self, std::string_view name) { return self.stalls().group(name); },
          "name"_a,
          "The number under which waits for parameters of this group of modules are counted; 0, "
          "that of \"other\", where there are too many.")
      .def(
          "note_stall",
          [](ClientSession& self, uint8_t phase, uint32_t group, size_t reason, double waited_s) {
            self.stalls().note(stall_place(phase, group), reason, timeout_ns_of(waited_s));
          },
          "phase"_a,
          "group"_a,
          "reason"_a,
          "seconds"_a,
          "The caller has waited by other means than a lease.")
      .def(
          "note_step",
          [](ClientSession& self, double wall_s) {
            self.stalls().note_step(timeout_ns_of(wall_s));
          },
          "wall_seconds"_a,
          "From the end of one step to that of the next.")
      .def("lease_resident",
           &lease_resident,
           "shard_id"_a,
           "dtype"_a,
           "shape"_a,
           "A lease() for reading a value, where that takes no request; otherwise None.")
      .def(
          "overwrite_gradient",
          &overwrite_gradient,
          "shard_id"_a,
          "stall_group"_a,
          "address"_a,
          "length_bytes"_a,
          "timeout_s"_a,
          "phase"_a,
          "Copies a gradient from `address` into its slot, which is leased for that and given back."
          " No tensor is made of the slot.")
      .def(
          "ask_ahead",
          [](ClientSession& self, const std::vector<uint32_t>& shard_ids) {
            self.ask_ahead(shard_ids);
          },
          "shard_ids"_a,
          "Asks for the slots of gradients that there are none of yet, so that the answers are "
          "there when they are overwritten; returns at once and may do nothing.")
      .def("forget_asked",
           &ClientSession::forget_asked,
           "Gives back what was asked for ahead and not leased; whether there was any.")
      .def(
          "prefetch",
          [](ClientSession& self, uint32_t shard_id) { raise_unless_ok(self.prefetch(shard_id)); },
          "shard_id"_a,
          "Asks for the shard to be brought up; returns at once and may be dropped.")
      .def(
          "gradient_is_final",
          [](ClientSession& self, uint32_t shard_id) {
            raise_unless_ok(self.gradient_is_final(shard_id));
          },
          "shard_id"_a,
          "The session has let go of the shard's gradient, and writes it no more before the step "
          "that uses it; returns at once.")
      .def(
          "rank_sum_ended",
          [](ClientSession& self, uint32_t shard_id) {
            raise_unless_ok(self.hint(Opcode::rank_sum_ended, shard_id));
          },
          "shard_id"_a,
          "This rank's own sum of the shard's gradients is in that of all ranks; returns at once.")
      .def(
          "scratch_ended",
          [](ClientSession& self, uint32_t shard_id) {
            raise_unless_ok(self.hint(Opcode::scratch_ended, shard_id));
          },
          "shard_id"_a,
          "Nobody leases the bytes of this scratch blob any more; leases that live stay valid. "
          "Returns at once.");
}

/// Leases for reading that are written all the same.
void bind_writes(nb::class_<ClientSession>& session) {
  session
      .def_prop_ro(
          "reads_privately",
          [](ClientSession& self) { return self.reads().are_private(); },
          "Whether a write through a lease for reading stays in this process. Not where the daemon "
          "has reserved huge pages.")
      .def(
          "watch_writes",
          [](ClientSession& self, uint32_t shard_id) { self.reads().watch(shard_id); },
          "shard_id"_a,
          "From now on take_written() has leases of this shard, until unwatch_writes() was called "
          "as often.")
      .def(
          "unwatch_writes",
          [](ClientSession& self, uint32_t shard_id) {
            for (const LeasedBytes& lease : self.reads().unwatch(shard_id)) self.release(lease);
          },
          "shard_id"_a,
          "Undoes one watch_writes(). After the last one, leases that nobody has taken end.")
      .def_prop_ro(
          "has_written",
          [](ClientSession& self) { return self.reads().has_written(); },
          "Whether take_written() has any, of whatever shard.")
      .def("take_written",
           &take_written,
           "shard_id"_a,
           "dtype"_a,
           "shape"_a,
           "A lease of the shard's value that was for reading, has ended, and was written: a "
           "tensor, with which the bytes go. None if there is no other.")
      .def(
          "note_shown",
          [](ClientSession& self, uintptr_t address, uint64_t length_bytes) {
            self.reads().note_shown(reinterpret_cast<std::byte*>(address), length_bytes);
          },
          "address"_a,
          "length_bytes"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "A living lease for reading, at this address, was given another value by memd: from now "
          "on it is written if that changes.")
      .def(
          "is_written",
          [](ClientSession& self, uintptr_t address, uint64_t length_bytes) {
            return self.reads().is_written(reinterpret_cast<std::byte*>(address), length_bytes);
          },
          "address"_a,
          "length_bytes"_a,
          "Whether a living lease for reading, at this address, was written.");
}

/// The mapping that a device's driver may register: leases for reading are no part of it.
void bind_arena(nb::class_<ClientSession>& session) {
  session
      .def_prop_ro(
          "arena_address",
          [](const ClientSession& self) {
            return reinterpret_cast<uintptr_t>(self.arena().base());
          },
          "The arena's segments are mapped from here on, back to back, as long as this object "
          "lives.")
      .def_prop_ro("segment_bytes",
                   [](const ClientSession& self) { return self.arena().segment_bytes(); })
      .def("arena_view",
           &arena_view,
           "lease"_a,
           "address"_a,
           "dtype"_a,
           "shape"_a,
           "A torch tensor over the arena's own bytes of `lease` or a part of it, which begins at "
           "`address`. It keeps the lease.");
}

/// Which step and which daemon it follows, and its end.
void bind_connection(nb::class_<ClientSession>& session) {
  session
      .def("follow",
           &ClientSession::follow,
           "call"_a,
           "Requests from now on come after the step of this call, whichever of them "
           "reaches the daemon first; 0: after none that is on its way.")
      .def("daemon_is_gone",
           &ClientSession::daemon_is_gone,
           "Whether the other end of the attach connection is closed.")
      .def("suspend",
           &ClientSession::suspend,
           nb::call_guard<nb::gil_scoped_release>(),
           "Before the next daemon is asked for the session: who waits for a lease, or asks for "
           "one, gets UNAVAILABLE until reconnect(). Leases that are held stay valid.")
      .def(
          "reconnect",
          [](ClientSession& self, int connection_fd) { self.reconnect(OwnedFd(connection_fd)); },
          "connection_fd"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "The next daemon has taken the session over. Takes ownership of the descriptor.")
      .def("statistics", &ClientSession::statistics)
      .def("close",
           &ClientSession::close,
           "No lease can be had afterwards. Views that live keep their memory mapped, and give "
           "their pins back as they die.");
}

}  // namespace

void bind_ring(nb::module_& module) {
  bind_words(module);
  bind_session_statistics(module);
  nb::class_<ClientSession> session(
      module,
      "ClientSession",
      "A trainer's side of the rings. Any thread may call it; a forked child "
      "may not, and views that a child inherited do nothing "
      "when they die there.");
  bind_leases(session);
  bind_writes(session);
  bind_arena(session);
  bind_connection(session);
}

}  // namespace memd
