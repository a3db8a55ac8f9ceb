// Threads, where the machine may not give as many as are wanted.
#pragma once

#include <cstddef>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/memory_reserve.h"
#include "base/status.h"

namespace memd {

/// A thread that runs `run`, or why the machine gives none and what to raise. Nobody could be told
/// that an allocation of it failed: it may use the reserve.
template <typename Run>
Result<std::thread> start_thread(Run run) {
  try {
    return std::thread([run = std::move(run)]() mutable {
      use_reserve();
      run();
    });
  } catch (const std::system_error& failure) {
    return Status(
        StatusCode::capacity,
        concat("no thread can be started; raise the limit of processes (ulimit -u, TasksMax= of "
               "the unit, the container's pids limit), or free memory: ",
               failure.code().message()),
        failure.code().value());
  }
}

/// Adds up to `count` threads that run `run`: as many as the machine gives. An error where it gives
/// none.
template <typename Run>
Status start_threads(std::vector<std::thread>& threads, size_t count, Run run) {
  threads.reserve(threads.size() + count);  // nothing but the thread itself can fail below
  for (size_t i = 0; i < count; ++i) {
    auto thread = start_thread(run);
    if (!thread.is_ok()) return i == 0 ? thread.status() : Status::ok();
    threads.push_back(std::move(thread).value());
  }
  return Status::ok();
}

}  // namespace memd
