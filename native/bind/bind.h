// Each file of this folder adds one topic to the module; they translate and decide
// nothing.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "base/status.h"
#include "ring/layout.h"

namespace memd {

class Server;

/// StatusError, and the codes it carries.
void bind_status(nanobind::module_& module);
/// AdamSettings, and the update itself on arrays of the caller, for tests and measurements.
void bind_optim(nanobind::module_& module);
/// Bytes that a plan moves, for tests and reports.
void bind_plan(nanobind::module_& module);
/// ClientSession: a trainer's side of the rings.
void bind_ring(nanobind::module_& module);
/// Server and the records it answers with.
void bind_server(nanobind::module_& module);
/// The calls of Server that read snapshots for exports, and their records.
void bind_snapshot_readings(nanobind::module_& module, nanobind::class_<Server>& server);
/// The calls of Server for ranks that train a job together.
void bind_ranks(nanobind::module_& module, nanobind::class_<Server>& server);
/// Functions that work on volumes without a daemon.
void bind_check(nanobind::module_& module);
/// Measurements of `memd bench`.
void bind_bench(nanobind::module_& module);

/// By the reasons of stalls, with their names.
inline std::map<std::string, double> seconds_by_reason(const StallsByReason& wait_ns) {
  std::map<std::string, double> seconds;
  for (size_t i = 0; i < kStallReasonCount; ++i)
    seconds[stall_reason_name(i)] = static_cast<double>(wait_ns[i]) * 1e-9;
  return seconds;
}

/// By phase and reason.
inline std::map<std::string, std::map<std::string, double>> seconds_by_phase(const Stalls& stalls) {
  std::map<std::string, std::map<std::string, double>> seconds;
  for (size_t i = 0; i < kStallPhaseCount; ++i)
    seconds[kStallPhaseNames[i]] = seconds_by_reason(stalls.phase_ns()[i]);
  return seconds;
}

/// By group of modules and reason.
inline std::map<std::string, std::map<std::string, double>> seconds_by_group(const Stalls& stalls) {
  std::map<std::string, std::map<std::string, double>> seconds;
  for (const auto& [group, wait_ns] : stalls.group_ns())
    seconds[group] = seconds_by_reason(wait_ns);
  return seconds;
}

/// By LeaseWait, with its names.
inline std::map<std::string, double> seconds_by_reason(
    const std::array<uint64_t, kLeaseWaitCount>& wait_ns) {
  std::map<std::string, double> seconds;
  for (size_t i = 0; i < kLeaseWaitCount; ++i)
    seconds[kLeaseWaitNames[i]] = static_cast<double>(wait_ns[i]) * 1e-9;
  return seconds;
}

/// Raises StatusError with the status's message, code and errno. Called with the GIL.
[[noreturn]] void raise(const Status& status);
/// The StatusError that raise() raises, as an object.
nanobind::object status_exception(const Status& status);

inline void raise_unless_ok(const Status& status) {
  if (!status.is_ok()) raise(status);
}

template <typename T>
T value_or_raise(Result<T> result) {
  raise_unless_ok(result.status());
  return std::move(result).value();
}

/// Calls without the GIL, then raises with it.
template <typename Call>
auto unlocked(Call call) {
  auto result = [&] {
    const nanobind::gil_scoped_release released;
    return call();
  }();
  if constexpr (std::is_same_v<decltype(result), Status>) {
    raise_unless_ok(result);
  } else {
    return value_or_raise(std::move(result));
  }
}

}  // namespace memd
