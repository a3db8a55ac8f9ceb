#include <nanobind/nanobind.h>

#include "bind/bind.h"

namespace nb = nanobind;

namespace memd {
namespace {

PyObject* status_error = nullptr;  // lives as long as the module, which is never unloaded

}  // namespace

void bind_status(nb::module_& module) {
  status_error = PyErr_NewExceptionWithDoc("memd_native._core.StatusError",
                                           "Something outside failed. `code` is a StatusCode of "
                                           "native/base/status.h, `error_number` an errno or 0, "
                                           "`quota_name` that of a quota of `quota_bytes` that "
                                           "the request would exceed, or empty.",
                                           nullptr,
                                           nullptr);
  if (status_error == nullptr) throw nb::python_error();
  module.attr("StatusError") = nb::borrow(status_error);
}

nb::object status_exception(const Status& status) {
  const nb::object type = nb::borrow(status_error);
  nb::object exception = type(nb::str(status.message().c_str(), status.message().size()));
  exception.attr("code") = static_cast<uint32_t>(status.code());
  exception.attr("error_number") = status.error_number();
  exception.attr("quota_name") = status.quota() ? status.quota()->name : "";
  exception.attr("quota_bytes") = status.quota() ? status.quota()->bytes_max : 0;
  return exception;
}

void raise(const Status& status) {
  const nb::object exception = status_exception(status);
  PyErr_SetObject(status_error, exception.ptr());
  throw nb::python_error();
}

}  // namespace memd
