// Large things end on a worker.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "base/workers.h"

namespace memd {

/// Destroys `what`, of about `bytes`, on a worker: to free a piece for each shard of a job takes
/// the server thread longer than a turn. Nothing else may refer to it.
template <typename T>
void free_on_worker(Workers& workers, JobId job, uint64_t bytes, T what) {
  const auto held = std::make_shared<std::optional<T>>(std::move(what));
  workers.submit(
      {.job = job, .bytes = bytes, .kind = WorkKind::bytes}, [held] { held->reset(); }, [] {});
}

}  // namespace memd
