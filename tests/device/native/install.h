// Registers the devices with torch. Call each function once in a process.
#pragma once

#include <torch/library.h>

namespace sim {

void install_devices();
/// Registers operators with kernels of their own first, then those that queue the CPU's kernel.
void install_tensors(torch::Library& library);
void install_copies(torch::Library& library);
void install_kernels(torch::Library& library);

}  // namespace sim
