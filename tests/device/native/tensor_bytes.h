// Device tensors, and the same tensors as tasks and Meta kernels see them.
#pragma once

#include <ATen/ATen.h>

#include "current_stream.h"
#include "machine.h"

namespace sim {

/// Below autograd, autocast and Python modes: what a task or a Meta kernel must see whatever
/// surrounds the call.
struct Plainly : c10::impl::ForceDispatchKeyGuard {
  Plainly()
      : ForceDispatchKeyGuard(
            c10::default_included_set.remove(c10::DispatchKey::ADInplaceOrView),
            c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}
};

/// Another current device, until the end of the block.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex device) : last_(std::exchange(current.device, device)) {}
  ~OnDevice() { current.device = last_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex last_;
};

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor with_geometry_of(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key);
at::Tensor as_meta(const at::Tensor& tensor);
/// The tensor's bytes as a CPU tensor. Holds nothing: they may be given away before a task runs, as
/// on a GPU.
at::Tensor bytes_of(const at::Tensor& tensor);
Span span_of(const at::Tensor& bytes, bool is_written);
/// From the tensor's first element to its last, without counting one twice that is repeated.
int64_t moved_bytes(const at::Tensor& tensor);

at::Tensor empty_like_meta(const at::Tensor& meta, c10::DeviceIndex device);
void resize_storage(const c10::Storage& storage, size_t size);
const at::Tensor& resize_tensor(const at::Tensor& self,
                                c10::IntArrayRef size,
                                std::optional<at::MemoryFormat> format);

}  // namespace sim
