// The simulation's controls, as torch.ops.simulation.
#include <ATen/Context.h>
#include <torch/library.h>

#include "current_stream.h"
#include "device_memory.h"
#include "host_waits.h"
#include "install.h"
#include "pinned_memory.h"

namespace sim {
namespace {

const char* at_address(int64_t address) { return reinterpret_cast<const char*>(address); }

void install() {
  install_devices();
  at::globalContext().lazyInitDevice(kType);  // or is_pinned() says no
  static auto* library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  install_tensors(*library);
  install_copies(*library);
  install_kernels(*library);
}

void host_touches(int64_t address, int64_t bytes, bool writes) {
  auto locked = machine().lock();
  for (const auto& part :
       pinned().parts({at_address(address), at_address(address) + bytes, writes}))
    machine().host_touches(part);
}

void set_copy_speed(int64_t bytes_per_second) {
  auto locked = machine().lock();
  machine().clock().set_copy_speed(bytes_per_second);
}

void record_timeline(bool is_on) {
  auto locked = machine().lock();
  machine().clock().record(is_on);
}

/// Names; and five numbers of each entry: actor, engine, begin, end, bytes.
std::tuple<std::vector<std::string>, std::vector<int64_t>> timeline() {
  auto locked = machine().lock();
  std::vector<std::string> names;
  std::vector<int64_t> numbers;
  for (const auto& [name, actor, cost, begin] : machine().clock().timeline()) {
    names.push_back(name);
    for (auto number :
         {actor, static_cast<int64_t>(cost.engine), begin, begin + cost.duration, cost.bytes})
      numbers.push_back(number);
  }
  return {names, numbers};
}

TORCH_LIBRARY(simulation, library) {
  library.def("install() -> ()", install);
  library.def("device_count() -> int", [] { return int64_t{kDevices}; });
  library.def("seed(int seed) -> ()", [](int64_t seed) {
    machine().seed(seed);
    memory().begin_anew();
  });
  library.def("check_races(bool on) -> ()", [](bool is_on) { machine().check_races(is_on); });
  library.def("limit(int device, int bytes) -> ()",
              [](int64_t device, int64_t bytes) { memory().set_limit(device, bytes); });
  library.def("host_waits() -> str[]", take_host_waits);
  library.def("pin(int address, int bytes) -> ()",
              [](int64_t address, int64_t bytes) { pinned().pin(at_address(address), bytes); });
  library.def("unpin(int address) -> ()",
              [](int64_t address) { pinned().unpin(at_address(address)); });
  library.def("host_touches(int address, int bytes, bool writes) -> ()", host_touches);
  library.def("copy_speed(int bytes_per_second) -> ()", set_copy_speed);
  library.def("record_timeline(bool on) -> ()", record_timeline);
  library.def("timeline() -> (str[], int[])", timeline);
}

}  // namespace
}  // namespace sim

// For locks. No operators: a lock may be taken below any dispatch mode.
extern "C" {
void sim_publish(int64_t key) { sim::machine().publish(key); }
void sim_publish_time(int64_t key) { sim::machine().publish_time(key); }
void sim_observe(int64_t key) { sim::machine().observe(key); }
}
