#include "kernel_cost.h"

#include <set>

#include "boxed_values.h"

namespace sim {
namespace {

/// The number of the first of two factors.
const std::map<std::string, size_t> kProducts{{"aten::mm", 0},
                                              {"aten::bmm", 0},
                                              {"aten::mv", 0},
                                              {"aten::dot", 0},
                                              {"aten::vdot", 0},
                                              {"aten::addmm", 1},
                                              {"aten::_addmm_activation", 1},
                                              {"aten::baddbmm", 1},
                                              {"aten::addbmm", 1},
                                              {"aten::addmv", 1}};
const std::set<std::string> kLookups{
    "aten::embedding", "aten::index", "aten::index_select", "aten::gather"};

int64_t product_flop(const at::Tensor& one, const at::Tensor& other) {
  return 2 * one.numel() * (other.dim() > 1 ? other.size(-1) : 1);
}

/// Each element of `swept` meets the weights of one channel.
int64_t convolution_flop(const at::Tensor& swept, const at::Tensor& weight) {
  return 2 * swept.numel() * (weight.numel() / std::max<int64_t>(weight.size(0), 1));
}

int64_t flop_of(const std::string& name,
                const std::vector<c10::IValue>& arguments,
                const std::vector<c10::IValue>& results) {
  auto argument = [&](size_t i) { return arguments.at(i).toTensor(); };
  if (auto found = kProducts.find(name.back() == '_' ? name.substr(0, name.size() - 1) : name);
      found != kProducts.end())
    return product_flop(argument(found->second), argument(found->second + 1));
  if (name == "aten::convolution") {
    bool is_transposed = arguments.at(6).toBool();
    return convolution_flop(is_transposed ? argument(0) : results.at(0).toTensor(), argument(1));
  }
  if (name == "aten::convolution_backward") {
    auto swept = argument(arguments.at(7).toBool() ? 1 : 0);
    auto wanted = arguments.at(10).toBoolList();
    return convolution_flop(swept, argument(2)) * (int{wanted[0]} + int{wanted[1]});
  }
  return 0;
}

int64_t bytes_of_all(const std::vector<c10::IValue>& values, size_t begin) {
  int64_t bytes = 0;
  for (size_t i = begin; i < values.size(); ++i)
    visit_tensors(values[i], [&](const at::Tensor& tensor) { bytes += moved_bytes(tensor); });
  return bytes;
}

}  // namespace

Cost cost_of(const std::string& name,
             const std::vector<c10::IValue>& arguments,
             const std::vector<c10::IValue>& results) {
  auto made = bytes_of_all(results, 0);
  bool is_lookup = kLookups.count(name) != 0;
  auto given = bytes_of_all(arguments, is_lookup ? 1 : 0) + (is_lookup ? made : 0);
  return SimClock::kernel(given + made, flop_of(name, arguments, results));
}

}  // namespace sim
