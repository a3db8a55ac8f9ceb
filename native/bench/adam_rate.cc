#include "bench/adam_rate.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/units.h"
#include "bench/memory_traffic.h"
#include "optim/adam.h"

namespace memd {
namespace {

/// Anonymous memory, touched when it is made.
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }

  Status make(uint64_t bytes) {
    void* const data = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (data == MAP_FAILED) {
      return error(StatusCode::capacity,
                   "there is no memory for this; measure fewer elements: ",
                   bytes,
                   " bytes wanted for one of its arrays");
    }
    data_ = data;
    bytes_ = bytes;
    return Status::ok();
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

struct Arrays {
  Array parameter, remainder, exp_avg, exp_avg_sq, gradient;

  Status make(const AdamRateOptions& options) {
    const uint64_t count = options.element_count;
    const bool is_half = options.dtype == DType::bfloat16;
    const uint64_t value_bytes = is_half ? 2 : 4;
    for (auto [array, bytes] : {std::pair{&parameter, value_bytes * count},
                                std::pair{&gradient, value_bytes * count},
                                std::pair{&exp_avg, 4 * count},
                                std::pair{&exp_avg_sq, 4 * count}}) {
      if (Status status = array->make(bytes); !status.is_ok()) return status;
    }
    if (is_half) {
      if (Status status = remainder.make(2 * count); !status.is_ok()) return status;
    }
    // Numbers of training: neither zero nor denormal, which are slower or faster than these.
    constexpr uint16_t kHalf = 0x3c23;  // bf16 of 0.01
    for (uint64_t i = 0; i < count; ++i) {
      if (is_half) {
        parameter.as<uint16_t>()[i] = kHalf;
        gradient.as<uint16_t>()[i] = kHalf;
      } else {
        parameter.as<float>()[i] = 0.01F;
        gradient.as<float>()[i] = 0.01F;
      }
      exp_avg.as<float>()[i] = 1e-3F;
      exp_avg_sq.as<float>()[i] = 1e-4F;
    }
    return Status::ok();
  }
};

struct Piece {
  uint64_t begin;
  uint64_t count;
};

std::vector<Piece> pieces_of(const AdamRateOptions& options) {
  std::vector<Piece> pieces;
  for (uint64_t tensor = 0; tensor < options.tensor_count; ++tensor) {
    const uint64_t begin = options.element_count * tensor / options.tensor_count;
    const uint64_t end = options.element_count * (tensor + 1) / options.tensor_count;
    for (uint64_t at = begin; at < end; at += kTileElements) {
      pieces.push_back({.begin = at, .count = std::min<uint64_t>(kTileElements, end - at)});
    }
  }
  return pieces;
}

void update(const Arrays& arrays, DType dtype, const AdamScalars& scalars, const Piece& piece) {
  const auto [at, count] = piece;
  if (dtype == DType::bfloat16) {
    return adam_update(isa_best(),
                       scalars,
                       count,
                       arrays.parameter.as<uint16_t>() + at,
                       arrays.remainder.as<int16_t>() + at,
                       arrays.exp_avg.as<float>() + at,
                       arrays.exp_avg_sq.as<float>() + at,
                       arrays.gradient.as<uint16_t>() + at);
  }
  adam_update(isa_best(),
              scalars,
              count,
              arrays.parameter.as<float>() + at,
              arrays.exp_avg.as<float>() + at,
              arrays.exp_avg_sq.as<float>() + at,
              arrays.gradient.as<float>() + at);
}

void move(const Arrays& arrays, DType dtype, const Piece& piece) {
  const auto [at, count] = piece;
  if (dtype == DType::bfloat16) {
    return memory_traffic(isa_best(),
                          TrafficBf16{.count = count,
                                      .half = arrays.parameter.as<uint16_t>() + at,
                                      .remainder = arrays.remainder.as<int16_t>() + at,
                                      .exp_avg = arrays.exp_avg.as<float>() + at,
                                      .exp_avg_sq = arrays.exp_avg_sq.as<float>() + at,
                                      .gradient = arrays.gradient.as<uint16_t>() + at});
  }
  memory_traffic(isa_best(),
                 TrafficFp32{.count = count,
                             .parameter = arrays.parameter.as<float>() + at,
                             .exp_avg = arrays.exp_avg.as<float>() + at,
                             .exp_avg_sq = arrays.exp_avg_sq.as<float>() + at,
                             .gradient = arrays.gradient.as<float>() + at});
}

}  // namespace

Result<AdamRate> measure_adam(const AdamRateOptions& options) {
  if (options.element_count == 0 || options.thread_count == 0 || options.round_count == 0 ||
      options.tensor_count == 0 || options.tensor_count > options.element_count) {
    return error(StatusCode::invalid_argument,
                 "elements, threads, rounds and tensors are at least 1, and every tensor has an "
                 "element: ",
                 options.element_count,
                 " elements in ",
                 options.tensor_count,
                 " tensors, ",
                 options.thread_count,
                 " threads, ",
                 options.round_count,
                 " rounds");
  }
  if (options.dtype != DType::float32 && options.dtype != DType::bfloat16) {
    return error(StatusCode::invalid_argument, "updates are made of fp32 and bf16 parameters");
  }
  Arrays arrays;
  if (Status status = arrays.make(options); !status.is_ok()) return status;
  const std::vector<Piece> pieces = pieces_of(options);
  AdamRate rate{.bytes_per_element = options.dtype == DType::bfloat16 ? 26u : 28u,
                .element_count = options.element_count,
                .update_seconds = {},
                .traffic_seconds = {}};

  std::atomic<size_t> next{0};
  std::function<void(const Piece&)> work;
  bool is_over = false;
  std::barrier gate(static_cast<ptrdiff_t>(options.thread_count) + 1);
  std::vector<std::jthread> threads;
  const auto run = [&] {
    for (;;) {
      gate.arrive_and_wait();
      if (is_over) return;
      for (size_t at = next.fetch_add(1); at < pieces.size(); at = next.fetch_add(1)) {
        work(pieces[at]);
      }
      gate.arrive_and_wait();
    }
  };
  try {
    for (uint32_t i = 0; i < options.thread_count; ++i) threads.emplace_back(run);
  } catch (const std::system_error& thrown) {
    is_over = true;
    const auto missing = options.thread_count - static_cast<uint32_t>(threads.size());
    for (uint32_t i = 0; i < missing; ++i) gate.arrive_and_drop();
    gate.arrive_and_wait();
    return error(StatusCode::capacity,
                 "no more than ",
                 threads.size(),
                 " threads can be made; measure with fewer: ",
                 thrown.what());
  }
  const auto pass = [&](std::function<void(const Piece&)> what) {
    work = std::move(what);
    next.store(0);
    const auto began = std::chrono::steady_clock::now();
    gate.arrive_and_wait();
    gate.arrive_and_wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  };
  const auto update_all = [&](uint64_t t) {
    return pass([&arrays, &options, scalars = adam_scalars({}, t)](const Piece& piece) {
      update(arrays, options.dtype, scalars, piece);
    });
  };
  const auto move_all = [&] {
    return pass([&](const Piece& piece) { move(arrays, options.dtype, piece); });
  };
  update_all(1);
  move_all();
  for (uint64_t round = 0; round < options.round_count; ++round) {
    rate.update_seconds.push_back(update_all(2 + round));
    rate.traffic_seconds.push_back(move_all());
  }
  is_over = true;
  gate.arrive_and_wait();
  return rate;
}

}  // namespace memd
