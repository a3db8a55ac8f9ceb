// What each file of this folder adds to the module: one file per topic; they translate and decide
// nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "base/status.h"

namespace memd {

/// StatusError, and the codes it carries.
void bind_status(nanobind::module_& module);
/// AdamSettings, and the update itself on arrays of the caller, for tests and measurements.
void bind_optim(nanobind::module_& module);
/// ClientSession: a trainer's side of the rings.
void bind_ring(nanobind::module_& module);
/// Server and the records it answers with.
void bind_server(nanobind::module_& module);
/// What works on volumes without a daemon.
void bind_check(nanobind::module_& module);
/// What `memd bench` measures.
void bind_bench(nanobind::module_& module);

/// Raises StatusError with the status's message, code and errno. Called with the GIL.
[[noreturn]] void raise(const Status& status);

inline void raise_unless_ok(const Status& status) {
  if (!status.is_ok()) raise(status);
}

template <typename T>
T value_or_raise(Result<T> result) {
  raise_unless_ok(result.status());
  return std::move(result).value();
}

}  // namespace memd
