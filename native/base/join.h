// Many asynchronous operations, one continuation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "base/status.h"

namespace memd {

using Done = std::function<void(const Status&)>;

/// Runs `done` once, with the first error or ok, when every branch and the owner have finished.
/// Used by one thread.
///
///   auto join = Join::start(done);
///   for (...) read(..., join->branch());
///   join->finish(Status::ok());          // the owner's own part; from here on the last branch
///   runs `done`
class Join : public std::enable_shared_from_this<Join> {
 public:
  static std::shared_ptr<Join> start(Done done) {
    return std::shared_ptr<Join>(new Join(std::move(done)));
  }

  Done branch() {
    ++pending_;
    return [self = shared_from_this()](const Status& status) { self->finish(status); };
  }

  void finish(const Status& status) {
    MEMD_CHECK_GT(pending_, uint64_t{0});
    if (first_error_.is_ok() && !status.is_ok()) first_error_ = status;
    if (--pending_ == 0) {
      const Done done = std::move(done_);
      done(first_error_);
    }
  }

 private:
  explicit Join(Done done) : done_(std::move(done)) {}

  Done done_;
  uint64_t pending_ = 1;
  Status first_error_;
};

}  // namespace memd
