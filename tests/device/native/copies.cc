// Copies on a device, between devices, and between a device and the host.
#include "device_memory.h"
#include "host_waits.h"
#include "install.h"
#include "pinned_memory.h"
#include "tensor_bytes.h"

namespace sim {
namespace {

std::function<void()> copying(const at::Tensor& from, const at::Tensor& to) {
  return [from, to] {
    Plainly plainly;
    to.copy_(from);
  };
}

void copy_within(const at::Tensor& from, const at::Tensor& to) {
  auto source = bytes_of(from), target = bytes_of(to);
  machine().queue(current_stream(to.device().index()),
                  {.name = "copy",
                   .cost = SimClock::kernel(moved_bytes(from) + moved_bytes(to), 0),
                   .spans = {span_of(source, false), span_of(target, true)},
                   .run = copying(source, target)});
}

/// On the source's stream, which waits for the target's, and the target's for it: as in CUDA.
void copy_across(const at::Tensor& from, const at::Tensor& to) {
  auto leaves = current_stream(from.device().index());
  auto arrives = current_stream(to.device().index());
  auto source = bytes_of(from), target = bytes_of(to);
  auto locked = machine().lock();
  machine().block(leaves, machine().mark(arrives));
  machine().queue(leaves,
                  {.name = "copy to device",
                   .cost = machine().clock().copy(Engine::copy_out, moved_bytes(from)),
                   .spans = {span_of(source, false), span_of(target, true)},
                   .run = copying(source, target)});
  machine().block(arrives, machine().mark(leaves));
}

/// Whether the device itself copies, in its own time. CUDA too refuses what crosses a range's end.
bool is_direct(const at::Tensor& host, const at::Tensor& other) {
  const auto* range = pinned().find(host.data_ptr());
  bool is_plain = host.is_non_overlapping_and_dense() && host.dtype() == other.dtype() &&
                  host.sizes() == other.sizes() && host.strides() == other.strides();
  if (!range || !is_plain) return false;
  TORCH_CHECK(pinned().find(span_of(host, false).end - 1) == range,
              "a copy crosses the end of a registered range: it begins ",
              static_cast<const char*>(host.data_ptr()) - range,
              " bytes into the range and is ",
              host.nbytes(),
              " bytes long");
  return true;
}

at::Tensor borrowed(const at::Tensor& host) {
  return at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());
}

/// The calling thread itself reads or writes memory that a device may use as well.
void touch_pinned(const at::Tensor& host, bool is_written) {
  if (pinned().find(host.data_ptr())) machine().host_touches(span_of(host, is_written));
}

void copy_up(const at::Tensor& from, const at::Tensor& to, bool is_blocking) {
  auto stream = current_stream(to.device().index());
  bool reads_later = is_direct(from, to);
  if (!reads_later) touch_pinned(from, false);
  auto source = reads_later ? borrowed(from) : from.clone();
  auto target = bytes_of(to);
  std::vector<Span> spans{span_of(target, true)};
  if (reads_later) spans.push_back(span_of(source, false));
  machine().queue(stream,
                  {.name = "copy to device",
                   .cost = machine().clock().copy(Engine::copy_in, moved_bytes(from)),
                   .spans = std::move(spans),
                   .run = copying(source, target)});
  if (is_blocking) machine().finish(stream);
}

void copy_down(const at::Tensor& from, const at::Tensor& to, bool is_blocking) {
  auto stream = current_stream(from.device().index());
  bool writes_later = is_direct(to, from);
  if (!writes_later) touch_pinned(to, true);
  auto source = bytes_of(from);
  auto target = writes_later ? borrowed(to) : to;
  std::vector<Span> spans{span_of(source, false)};
  if (writes_later) spans.push_back(span_of(target, true));
  machine().queue(stream,
                  {.name = "copy to host",
                   .cost = machine().clock().copy(Engine::copy_out, moved_bytes(from)),
                   .spans = std::move(spans),
                   .run = copying(source, target)});
  if (is_blocking || !writes_later) machine().finish(stream);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  Plainly plainly;
  if (!on_device(from))
    copy_up(from, to, !non_blocking);
  else if (!on_device(to))
    copy_down(from, to, !non_blocking);
  else if (from.device() == to.device())
    copy_within(from, to);
  else
    copy_across(from, to);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const at::Tensor& self) {
  auto bytes = bytes_of(self);
  wait_for_stream(current_stream(self.device().index()),
                  {.name = "aten::_local_scalar_dense",
                   .cost = machine().clock().copy(Engine::copy_out, moved_bytes(self)),
                   .spans = {span_of(bytes, false)},
                   .run = nullptr});
  Plainly plainly;
  return bytes.item();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  memory().recordStream(self.storage().data_ptr(), stream);
}

}  // namespace

void install_copies(torch::Library& library) {
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(read_scalar));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace sim
