#include "tensor_bytes.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>

#include <cstring>

#include "device_memory.h"
#include "install.h"

namespace sim {

at::Tensor with_geometry_of(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return tensor;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  // A number: Meta kernels insist that it stays on the CPU.
  if (!on_device(tensor) && tensor.dim() == 0) return tensor.detach();
  c10::Storage nothing(c10::Storage::use_byte_size_t{},
                       tensor.storage().nbytes(),
                       c10::DataPtr(nullptr, c10::Device(c10::kMeta)),
                       c10::GetAllocator(c10::kMeta),
                       true);
  return with_geometry_of(tensor, std::move(nothing), c10::DispatchKey::Meta);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  c10::Storage bytes(
      c10::Storage::use_byte_size_t{},
      tensor.storage().nbytes(),
      c10::DataPtr(memory().bytes_of(tensor.storage().data()), c10::Device(c10::kCPU)),
      nullptr,
      false);
  return with_geometry_of(tensor, std::move(bytes), c10::DispatchKey::CPU);
}

Span span_of(const at::Tensor& bytes, bool is_written) {
  const auto* begin =
      static_cast<const char*>(bytes.storage().data()) + bytes.storage_offset() * bytes.itemsize();
  if (bytes.numel() == 0) return {begin, begin, is_written};
  int64_t last = 0;
  for (int64_t dim = 0; dim < bytes.dim(); ++dim) last += (bytes.size(dim) - 1) * bytes.stride(dim);
  return {begin, begin + (last + 1) * bytes.itemsize(), is_written};
}

int64_t moved_bytes(const at::Tensor& tensor) {
  auto elements = tensor.numel();
  if (elements == 0) return 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.stride(dim) == 0) elements /= tensor.size(dim);
  return elements * static_cast<int64_t>(tensor.itemsize());
}

namespace {

at::Tensor empty_strided(c10::IntArrayRef size,
                         c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>,
                         std::optional<at::Device> device,
                         std::optional<bool>) {
  OnDevice there(device ? index_of(*device) : current.device);
  return at::detail::empty_strided_generic(size,
                                           stride,
                                           &memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef size,
                 std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>,
                 std::optional<at::Device> device,
                 std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  OnDevice there(device ? index_of(*device) : current.device);
  return at::detail::empty_generic(size,
                                   &memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype),
                                   format);
}

// As CUDA answers: `parameter.data = tensor` may bring a parameter from the CPU to the device, and
// tensors with other keys beside the device's.
bool may_take_data(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided && (on_device(tensor) || tensor.is_cpu());
  };
  return is_dense(self) && is_dense(from);
}

}  // namespace

at::Tensor empty_like_meta(const at::Tensor& meta, c10::DeviceIndex device) {
  return empty_strided(meta.sizes(), meta.strides(), meta.scalar_type(), {}, device_at(device), {});
}

void resize_storage(const c10::Storage& storage, size_t size) {
  auto device = storage.device().index();
  OnDevice there(device);
  auto data = memory().allocate(size);
  if (auto kept = std::min(size, storage.nbytes())) {
    auto *to = memory().bytes_of(data.get()), *from = memory().bytes_of(storage.data());
    machine().queue(current_stream(device),
                    {.name = "resize",
                     .cost = SimClock::kernel(2 * static_cast<int64_t>(kept), 0),
                     .spans = {{from, from + kept, false}, {to, to + kept, true}},
                     .run = [to, from, kept] { std::memcpy(to, from, kept); }});
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(size);
}

const at::Tensor& resize_tensor(const at::Tensor& self,
                                c10::IntArrayRef size,
                                std::optional<at::MemoryFormat>) {
  auto wanted = at::detail::computeStorageNbytesContiguous(
      size, self.itemsize(), static_cast<size_t>(self.storage_offset()));
  if (wanted > self.storage().nbytes()) resize_storage(self.storage(), wanted);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

void install_tensors(torch::Library& library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_take_data));
  library.impl("resize_", TORCH_FN(resize_tensor));
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}

}  // namespace sim
