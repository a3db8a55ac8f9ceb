// What makes torch know the devices. Each once in a process.
#pragma once

#include <torch/library.h>

namespace sim {

void install_devices();
/// What has a kernel of its own, then what is queued as the CPU's kernel.
void install_tensors(torch::Library& library);
void install_copies(torch::Library& library);
void install_kernels(torch::Library& library);

}  // namespace sim
