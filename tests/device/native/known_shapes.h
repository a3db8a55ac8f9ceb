// Shapes that Meta kernels have told before: many of them are Python, which takes most of a call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <mutex>
#include <unordered_map>

namespace sim {

/// A call, as far as its results' shapes may depend on it; nothing where an argument is of a kind
/// that nobody has looked at, or where a result is a view, which depends on storages too.
std::optional<std::string> question_of(const c10::OperatorHandle& op,
                                       const std::vector<c10::IValue>& arguments);

/// Results of calls as Meta tensors, which nobody changes. Any thread may call.
class KnownShapes {
 public:
  std::optional<std::vector<c10::IValue>> find(const std::string& question) const;
  void note(const std::string& question, const std::vector<c10::IValue>& shapes);

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::vector<c10::IValue>> shapes_;
};

KnownShapes& known_shapes();

}  // namespace sim
