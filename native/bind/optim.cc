#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bind/bind.h"
#include "optim/adam.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace memd {
namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::pair<std::string_view, Isa> kIsas[] = {
    {"plain", Isa::plain}, {"avx2", Isa::avx2}, {"avx512", Isa::avx512}};

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const auto& [name, isa] : kIsas) {
    if (isa <= isa_best()) names.emplace_back(name);
  }
  return names;
}

Isa isa_named(const std::string& wanted) {
  for (const auto& [name, isa] : kIsas) {
    if (name == wanted && isa <= isa_best()) return isa;
  }
  const std::string message = "isa must be one of isa_names(), what this processor has: " + wanted;
  throw nb::value_error(message.c_str());
}

void check_update_number(uint64_t t) {
  if (t == 0) throw nb::value_error("t is the number of the update and counts from 1: 0");
}

void check_length(const char* name, size_t length, size_t count) {
  if (length == count) return;
  const std::string message =
      concat(name, " must be as long as exp_avg: ", length, " against ", count);
  throw nb::value_error(message.c_str());
}

/// nullptr where there is none.
float* maximum_of(const AdamSettings& settings,
                  const std::optional<Array<float>>& max_exp_avg_sq,
                  size_t count) {
  if (settings.amsgrad != max_exp_avg_sq.has_value()) {
    throw nb::value_error("max_exp_avg_sq is given with amsgrad, and without it not");
  }
  if (!max_exp_avg_sq) return nullptr;
  check_length("max_exp_avg_sq", max_exp_avg_sq->size(), count);
  return max_exp_avg_sq->data();
}

float* at(float* array, size_t first) { return array == nullptr ? nullptr : array + first; }

/// Calls `update` for a parameter of `count` elements: before its tail, and in it. It gets the
/// scalars, the first element and how many there are.
template <typename Update>
void update_parts(const AdamSettings& settings, uint64_t t, size_t count, const Update& update) {
  AdamScalars scalars = adam_scalars(settings, t);
  const size_t tail_first = elements_before_tail(count);
  update(scalars, size_t{0}, tail_first);
  scalars.in_tail = true;
  update(scalars, tail_first, count - tail_first);
}

void update_fp32(const std::string& isa,
                 const AdamSettings& settings,
                 uint64_t t,
                 const Array<float>& parameter,
                 const Array<float>& exp_avg,
                 const Array<float>& exp_avg_sq,
                 const Array<const float>& gradient,
                 const std::optional<Array<float>>& max_exp_avg_sq) {
  const Isa chosen = isa_named(isa);
  check_update_number(t);
  check_length("parameter", parameter.size(), exp_avg.size());
  check_length("exp_avg_sq", exp_avg_sq.size(), exp_avg.size());
  check_length("gradient", gradient.size(), exp_avg.size());
  float* const maximum = maximum_of(settings, max_exp_avg_sq, exp_avg.size());
  const nb::gil_scoped_release unlocked;
  update_parts(
      settings, t, exp_avg.size(), [&](const AdamScalars& scalars, size_t first, size_t count) {
        adam_update(chosen,
                    scalars,
                    count,
                    parameter.data() + first,
                    exp_avg.data() + first,
                    exp_avg_sq.data() + first,
                    gradient.data() + first,
                    at(maximum, first));
      });
}

void update_bf16(const std::string& isa,
                 const AdamSettings& settings,
                 uint64_t t,
                 const Array<uint16_t>& half,
                 const Array<int16_t>& remainder,
                 const Array<float>& exp_avg,
                 const Array<float>& exp_avg_sq,
                 const Array<const uint16_t>& gradient,
                 const std::optional<Array<float>>& max_exp_avg_sq) {
  const Isa chosen = isa_named(isa);
  check_update_number(t);
  check_length("half", half.size(), exp_avg.size());
  check_length("remainder", remainder.size(), exp_avg.size());
  check_length("exp_avg_sq", exp_avg_sq.size(), exp_avg.size());
  check_length("gradient", gradient.size(), exp_avg.size());
  float* const maximum = maximum_of(settings, max_exp_avg_sq, exp_avg.size());
  const nb::gil_scoped_release unlocked;
  update_parts(
      settings, t, exp_avg.size(), [&](const AdamScalars& scalars, size_t first, size_t count) {
        adam_update(chosen,
                    scalars,
                    count,
                    half.data() + first,
                    remainder.data() + first,
                    exp_avg.data() + first,
                    exp_avg_sq.data() + first,
                    gradient.data() + first,
                    at(maximum, first));
      });
}

}  // namespace

void bind_optim(nb::module_& module) {
  nb::class_<AdamSettings>(module, "AdamSettings")
      .def(
          "__init__",
          [](AdamSettings* self,
             double lr,
             double beta1,
             double beta2,
             double eps,
             double weight_decay,
             bool decoupled,
             bool maximize,
             bool amsgrad) {
            new (self)
                AdamSettings{lr, beta1, beta2, eps, weight_decay, decoupled, maximize, amsgrad};
          },
          "lr"_a,
          "beta1"_a,
          "beta2"_a,
          "eps"_a,
          "weight_decay"_a,
          "decoupled"_a,
          "maximize"_a = false,
          "amsgrad"_a = false,
          "One parameter group's settings, as torch names them. decoupled: AdamW; else Adam with "
          "an L2 term.");
  module.def("isa_names",
             &isa_names,
             "The instruction sets of this processor that have a kernel, the widest last.");
  module.def(
      "adam_update",
      &update_fp32,
      "isa"_a,
      "settings"_a,
      "t"_a,
      "parameter"_a.noconvert(),
      "exp_avg"_a.noconvert(),
      "exp_avg_sq"_a.noconvert(),
      "gradient"_a.noconvert(),
      "max_exp_avg_sq"_a.noconvert() = nb::none(),
      "Update number `t`, from 1, of one fp32 parameter, in place. The arrays have equal length. "
      "`max_exp_avg_sq`: with amsgrad.");
  module.def("adam_update_bf16",
             &update_bf16,
             "isa"_a,
             "settings"_a,
             "t"_a,
             "half"_a.noconvert(),
             "remainder"_a.noconvert(),
             "exp_avg"_a.noconvert(),
             "exp_avg_sq"_a.noconvert(),
             "gradient"_a.noconvert(),
             "max_exp_avg_sq"_a.noconvert() = nb::none(),
             "Update number `t`, from 1, of one bf16 parameter, in place. The arrays have equal "
             "length; `half` and `gradient` hold bf16 as uint16. `max_exp_avg_sq`: with amsgrad.");
}

}  // namespace memd
