#include <nanobind/nanobind.h>

#include <string>

#include "base/check_format.h"
#include "bind/bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {
namespace {

PyObject* status_error = nullptr;  // lives as long as the module, which is never unloaded

void set_format(const std::string& log_format, bool to_journal) {
  if (log_format == "json") {
    set_check_format(CheckFormat::json);
  } else if (log_format == "text") {
    set_check_format(to_journal ? CheckFormat::journal : CheckFormat::text);
  } else {
    throw nb::value_error(("log_format is text or json: " + log_format).c_str());
  }
}

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
  module.def("set_check_format",
             &set_format,
             "log_format"_a,
             nb::kw_only(),
             "to_journal"_a,
             "How this process writes the line of a check that fails, before it aborts: as "
             "memd/log.py writes events. Without it the line is plain.");
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
