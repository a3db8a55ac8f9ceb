// Every operator that has a CPU kernel is queued as that kernel, on the tensors' bytes.
#include <ATen/core/dispatch/Dispatcher.h>

#include "boxed_values.h"
#include "host_waits.h"
#include "install.h"
#include "kernel_cost.h"
#include "known_shapes.h"

namespace sim {
namespace {

using c10::IValue;

/// One operator called on device tensors. The Meta kernel says which shapes come out. An operator
/// whose shapes depend on data, that draws random numbers or returns to the host waits for its
/// stream, as on a GPU (random numbers excepted: they are the CPU's).
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  std::vector<IValue> queue();

 private:
  using Stores = std::vector<std::pair<size_t, IValue>>;  // number of a return → its bytes

  c10::DeviceIndex find_device() const;
  IValue as_bytes(size_t i);
  at::Tensor on_host(const at::Tensor& tensor) const;
  at::Tensor target(const at::Tensor& tensor, bool is_written);
  std::vector<IValue> called(std::vector<IValue> stack) const;
  std::optional<std::vector<IValue>> output_shapes() const;
  bool returns_tensors() const;
  std::vector<IValue> compute_now();
  IValue result(size_t i, const IValue& shapes);
  size_t aliased(const c10::AliasInfo& alias) const;
  IValue fresh(size_t i, const IValue& shapes);
  IValue written(size_t source, const IValue& shape);
  static IValue viewed(const at::Tensor& whole, const IValue& shapes);
  static void run(const std::vector<IValue>& real,
                  const std::optional<std::vector<IValue>>& computed,
                  const Stores& stores,
                  const c10::OperatorHandle& op);
  static void store(const std::vector<at::Tensor>& from,
                    const std::vector<at::Tensor>& to,
                    const std::string& name);

  c10::OperatorHandle op_;
  std::string name_;
  std::vector<IValue> args_, real_;
  std::optional<std::vector<IValue>> computed_;  // where the host has waited for them
  c10::DeviceIndex device_;
  std::vector<Span> spans_;
  Stores stores_;
  bool is_view_ = false;
};

Call::Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
    : op_(op), name_(op.schema().name()) {
  args_ = torch::jit::pop(stack, op.schema().arguments().size());
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              name_,
                              " has no CPU kernel to simulate");
  device_ = find_device();
  for (size_t i = 0; i < args_.size(); ++i) real_.push_back(as_bytes(i));
}

std::vector<IValue> Call::queue() {
  auto shapes = output_shapes();
  if (!shapes) shapes = compute_now();
  std::vector<IValue> results, made;
  for (size_t i = 0; i < shapes->size(); ++i) {
    results.push_back(result(i, (*shapes)[i]));
    if (!op_.schema().returns()[i].alias_info()) made.push_back(results.back());
  }
  if (stores_.empty() && (computed_ || is_view_)) return results;
  machine().queue(current_stream(device_),
                  {.name = name_,
                   .cost = computed_ ? Cost{} : cost_of(name_, args_, made),
                   .spans = spans_,
                   .run = std::bind(&Call::run, real_, computed_, stores_, op_)});
  return results;
}

c10::DeviceIndex Call::find_device() const {
  c10::DeviceIndex found = -1;
  for (const auto& value : args_) {
    visit_tensors(value, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return;
      auto index = tensor.device().index();
      TORCH_CHECK(found < 0 || found == index,
                  name_,
                  ": all tensors must be on the same device: they are on ",
                  device_at(found),
                  " and ",
                  device_at(index));
      found = index;
    });
  }
  for (const auto& value : args_)
    if (found < 0 && value.isDevice()) found = index_of(value.toDevice());
  return found < 0 ? current.device : found;
}

IValue Call::as_bytes(size_t i) {
  const auto* alias = op_.schema().arguments()[i].alias_info();
  auto change = [&](const at::Tensor& tensor) {
    return on_device(tensor) ? target(tensor, alias && alias->isWrite()) : on_host(tensor);
  };
  Plainly plainly;
  return change_tensors(args_[i], change, c10::kCPU);
}

// The value that a number or index of the host has now.
at::Tensor Call::on_host(const at::Tensor& tensor) const {
  bool is_index = name_.find("index") != std::string::npos;
  TORCH_CHECK(tensor.dim() == 0 || is_index,
              name_,
              ": all tensors must be on the same device: one is on ",
              tensor.device());
  auto now = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    now.unsafeGetTensorImpl()->set_wrapped_number(true);
  return now;
}

at::Tensor Call::target(const at::Tensor& tensor, bool is_written) {
  auto bytes = bytes_of(tensor);
  spans_.push_back(span_of(bytes, is_written));
  return bytes;
}

std::vector<IValue> Call::called(std::vector<IValue> stack) const {
  Plainly plainly;
  op_.callBoxed(stack);
  return stack;
}

// The outputs as Meta tensors; none if only the CPU kernel can tell, or if the call is the caller's
// mistake, which the CPU kernel explains better.
std::optional<std::vector<IValue>> Call::output_shapes() const {
  for (auto tag : {at::Tag::nondeterministic_seeded,
                   at::Tag::dynamic_output_shape,
                   at::Tag::data_dependent_output})
    if (op_.hasTag(tag)) return std::nullopt;
  if (!returns_tensors()) return std::nullopt;
  auto question = question_of(op_, args_);
  if (question)
    if (auto known = known_shapes().find(*question)) return known;
  try {
    std::vector<IValue> meta;
    for (const auto& value : args_) meta.push_back(change_tensors(value, as_meta, c10::kMeta));
    auto shapes = called(std::move(meta));
    if (question) known_shapes().note(*question, shapes);
    return shapes;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool Call::returns_tensors() const {
  return std::all_of(op_.schema().returns().begin(),
                     op_.schema().returns().end(),
                     [](const c10::Argument& result) {
                       return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                              result.type()->isSubtypeOf(*c10::ListType::ofTensors());
                     });
}

std::vector<IValue> Call::compute_now() {
  auto cost = cost_of(name_, args_, {});
  wait_for_stream(current_stream(device_),
                  {.name = name_, .cost = cost, .spans = spans_, .run = nullptr});
  computed_ = called(real_);
  return *computed_;
}

IValue Call::result(size_t i, const IValue& shapes) {
  const auto* alias = op_.schema().returns()[i].alias_info();
  if (!alias) return fresh(i, shapes);
  auto source = aliased(*alias);
  if (alias->isWrite()) return written(source, shapes);
  is_view_ = true;
  return viewed(args_[source].toTensor(), shapes);
}

size_t Call::aliased(const c10::AliasInfo& alias) const {
  const auto& arguments = op_.schema().arguments();
  auto is_same = [&](const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->beforeSets() == alias.beforeSets();
  };
  return std::find_if(arguments.begin(), arguments.end(), is_same) - arguments.begin();
}

IValue Call::fresh(size_t i, const IValue& shapes) {
  auto allocate = [&](const at::Tensor& shape) { return empty_like_meta(shape, device_); };
  auto outputs = change_tensors(shapes, allocate, device_at(device_));
  auto to_bytes = [&](const at::Tensor& output) { return target(output, true); };
  stores_.emplace_back(i, change_tensors(outputs, to_bytes, c10::kCPU));
  return outputs;
}

IValue Call::written(size_t source, const IValue& shape) {
  const auto& argument = args_[source];
  if (argument.isTensor() && argument.toTensor().sizes() != shape.toTensor().sizes()) {
    TORCH_CHECK(!computed_, name_, ": an output whose shape depends on data must have that shape");
    resize_tensor(argument.toTensor(), shape.toTensor().sizes(), std::nullopt);
    real_[source] = target(argument.toTensor(), true);
  }
  return argument;
}

IValue Call::viewed(const at::Tensor& whole, const IValue& shapes) {
  auto view = [&](const at::Tensor& shape) {
    return with_geometry_of(shape, c10::Storage(whole.storage()), c10::DispatchKey::PrivateUse1);
  };
  return change_tensors(shapes, view, whole.device());
}

void Call::run(const std::vector<IValue>& real,
               const std::optional<std::vector<IValue>>& computed,
               const Stores& stores,
               const c10::OperatorHandle& op) {
  Plainly plainly;
  auto results = computed ? *computed : real;
  if (!computed) op.callBoxed(results);
  for (const auto& [i, place] : stores)
    store(tensors_of(results[i]), tensors_of(place), op.schema().name());
}

void Call::store(const std::vector<at::Tensor>& from,
                 const std::vector<at::Tensor>& to,
                 const std::string& name) {
  auto is_same = [](const at::Tensor& one, const at::Tensor& other) {
    return one.sizes() == other.sizes() && one.dtype() == other.dtype();
  };
  TORCH_CHECK(std::equal(from.begin(), from.end(), to.begin(), to.end(), is_same),
              name,
              ": the Meta kernel's outputs are not the CPU kernel's");
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

void queue_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (auto& result : Call(op, *stack).queue()) stack->push_back(std::move(result));
}

}  // namespace

void install_kernels(torch::Library& library) {
  auto queued = [] { return torch::CppFunction::makeFromBoxedFunction<&queue_kernel>(); };
  auto& dispatcher = c10::Dispatcher::singleton();
  // By name, not by the backend's fallback alone: an operator with a composite kernel would take
  // that one first, and have other bits than the CPU's.
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) || !op->hasSchema() ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    library.impl(c10::toString(name).c_str(), queued());
  }
  // These choose the CPU's library themselves, below one name.
  library.impl("convolution", queued());
  library.impl("convolution_backward", queued());
  static auto* others = new torch::Library(
      torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  others->fallback(queued());
}

}  // namespace sim
