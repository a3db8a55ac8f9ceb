#include "io/io_queue.h"

#include "io/thread_queue.h"
#include "io/uring_queue.h"

namespace memd {

const char* io_kind_name(IoKind kind) {
  switch (kind) {
    case IoKind::read:
      return "read";
    case IoKind::write:
      return "write";
    case IoKind::sync:
      break;
  }
  return "sync";
}

const char* io_priority_name(IoPriority priority) {
  switch (priority) {
    case IoPriority::demand:
      return "demand";
    case IoPriority::prefetch:
      return "prefetch";
    case IoPriority::state:
      return "state";
    case IoPriority::writeback:
      return "writeback";
    case IoPriority::scrub:
      break;
  }
  return "scrub";
}

Status check_limits(const IoPathLimits& limits) {
  if (limits.depth == 0 || limits.depth > kDepthMax) {
    return error(StatusCode::invalid_argument,
                 "the I/O depth of a path is 1 to ",
                 kDepthMax,
                 ", not ",
                 limits.depth);
  }
  if (limits.chunk_bytes < kChunkBytesMin || limits.chunk_bytes > kChunkBytesMax ||
      !is_aligned(limits.chunk_bytes, kBlockBytes)) {
    return error(StatusCode::invalid_argument,
                 "a chunk has ",
                 kChunkBytesMin,
                 " to ",
                 kChunkBytesMax,
                 " bytes in whole blocks of ",
                 kBlockBytes,
                 ", not ",
                 limits.chunk_bytes);
  }
  return Status::ok();
}

Result<IoQueueChoice> make_io_queue(const IoQueueOptions& options) {
  if (options.depth == 0 || options.depth > 4096) {
    return error(StatusCode::invalid_argument, "the I/O depth is 1 to 4096, not ", options.depth);
  }
  std::string reason = "threads were asked for";
  if (options.engine != IoEngine::threads) {
    auto uring = UringQueue::create(options);
    if (uring.is_ok()) return IoQueueChoice{.queue = std::move(uring).value(), .reason = ""};
    if (options.engine == IoEngine::io_uring) {
      return Status(StatusCode::unavailable,
                    concat("io_uring was asked for and is not to be had (",
                           uring.status().message(),
                           "); allow it or choose the engine threads or automatic"),
                    uring.status().error_number());
    }
    reason = uring.status().message();
  }
  auto queue = std::make_unique<ThreadQueue>(options);
  if (!queue->status().is_ok()) return queue->status();
  return IoQueueChoice{.queue = std::move(queue), .reason = std::move(reason)};
}

}  // namespace memd
