// Arguments and results of operators, whatever their number and kind.
#pragma once

#include <ATen/core/ivalue.h>

#include "tensor_bytes.h"

namespace sim {

/// The value with each tensor changed, and another device where it names one.
template <class Change>
c10::IValue change_tensors(const c10::IValue& value, Change change, c10::Device device) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isDevice()) return device;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList())
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

template <class Visit>
void visit_tensors(const c10::IValue& value, Visit visit) {
  change_tensors(value, [&](const at::Tensor& tensor) { return visit(tensor), tensor; }, c10::kCPU);
}

inline std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

}  // namespace sim
