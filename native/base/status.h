// A failure in the world outside: a code that the client turns into an exception, and a
// sentence for a person.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "base/check.h"

namespace memd {

/// The numbers travel in ring completions and are part of the session protocol: append, never
/// renumber.
enum class StatusCode : uint32_t {
  ok = 0,
  invalid_argument = 1,   // the caller: ValueError
  not_found = 2,          // no such job, shard or session
  already_exists = 3,     // a name taken, with another shape, dtype or owner
  permission_denied = 4,  // another user's job
  capacity = 5,           // CapacityError: no memory or disk space that could be freed
  device = 6,             // DeviceError: errno, path and offset are in the message
  integrity = 7,          // IntegrityError: a checksum did not match twice
  fenced = 8,             // SessionFenced: the daemon gave this session up
  deadline = 9,           // waited too long; the message says on what
  unavailable = 10,       // the daemon stops or is not there
  not_yet = 11,           // a promised name that a later version fills in
  in_use = 12,            // somebody uses it, who has to end first
};

/// Bytes that a request would exceed, for programs; the message says so to people. "host_bytes" and
/// "nvme_bytes" are a job's quotas; "host" and "nvme" are what the daemon has free.
struct ByteQuota {
  const char* name;
  uint64_t bytes_max;
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, int error_number = 0)
      : code_(code), error_number_(error_number), message_(std::move(message)) {}

  static Status ok() { return {}; }

  bool is_ok() const { return code_ == StatusCode::ok; }
  StatusCode code() const { return code_; }
  /// The errno of a failed system call, 0 where there was none.
  int error_number() const { return error_number_; }
  const std::string& message() const { return message_; }
  const std::optional<ByteQuota>& quota() const { return quota_; }

  /// The same failure, about that quota.
  Status about(const ByteQuota& quota) && {
    quota_ = quota;
    return std::move(*this);
  }

 private:
  StatusCode code_ = StatusCode::ok;
  int error_number_ = 0;
  std::optional<ByteQuota> quota_;
  std::string message_;
};

/// The arguments one after the other, as a stream would print them.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status error(StatusCode code, const Parts&... parts) {
  return Status(code, concat(parts...));
}

/// A system call failed: `what` (with path and offset), then the reason in words.
inline Status device_error(int error_number, const std::string& what) {
  return Status(StatusCode::device, concat(what, ": ", std::strerror(error_number)), error_number);
}

/// A value, or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value)
      : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor): return a T as it is
  Result(Status status) : status_(std::move(status)) { MEMD_CHECK(!status_.is_ok()); }  // NOLINT

  bool is_ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    MEMD_CHECK(value_.has_value());
    return *value_;
  }
  const T& value() const& {
    MEMD_CHECK(value_.has_value());
    return *value_;
  }
  T&& value() && {
    MEMD_CHECK(value_.has_value());
    return std::move(*value_);
  }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace memd
