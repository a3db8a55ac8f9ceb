#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "base/units.h"
#include "bench/adam_rate.h"
#include "bench/hash_rate.h"
#include "bench/io_rate.h"
#include "bench/memory_traffic.h"

namespace memd {
namespace {

std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
    if (isa <= isa_best()) all.push_back(isa);
  }
  return all;
}

template <typename T>
std::vector<T> counted(size_t count, T first) {
  std::vector<T> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

TEST(MemoryTrafficTest, changes_nothing_at_any_length) {
  for (const Isa isa : isas()) {
    for (const size_t count : {0, 1, 15, 16, 17, 100, 1000}) {
      SCOPED_TRACE(count);
      auto p = counted<float>(count, 1), m = counted<float>(count, 2), v = counted<float>(count, 3);
      auto g = counted<float>(count, 4);
      memory_traffic(isa,
                     TrafficFp32{.count = count,
                                 .parameter = p.data(),
                                 .exp_avg = m.data(),
                                 .exp_avg_sq = v.data(),
                                 .gradient = g.data()});
      EXPECT_EQ(p, counted<float>(count, 1));
      EXPECT_EQ(m, counted<float>(count, 2));
      EXPECT_EQ(v, counted<float>(count, 3));
      auto half = counted<uint16_t>(count, 5), half_gradient = counted<uint16_t>(count, 6);
      auto remainder = counted<int16_t>(count, -7);
      memory_traffic(isa,
                     TrafficBf16{.count = count,
                                 .half = half.data(),
                                 .remainder = remainder.data(),
                                 .exp_avg = m.data(),
                                 .exp_avg_sq = v.data(),
                                 .gradient = half_gradient.data()});
      EXPECT_EQ(half, counted<uint16_t>(count, 5));
      EXPECT_EQ(remainder, counted<int16_t>(count, -7));
      EXPECT_EQ(m, counted<float>(count, 2));
      EXPECT_EQ(v, counted<float>(count, 3));
    }
  }
}

TEST(MemoryTrafficTest, reading_sees_every_word) {
  for (const Isa isa : isas()) {
    for (const size_t count : {0, 1, 63, 64, 65, 1000}) {
      const auto words = counted<uint64_t>(count, 1);
      uint64_t all = 0;
      for (const uint64_t word : words) all ^= word;
      EXPECT_EQ(memory_read(isa, words.data(), count), all) << count;
    }
  }
}

TEST(HashRateTest, every_round_times_all_three_on_as_many_bytes_as_asked_for) {
  const auto rate = measure_hash({.bytes = 3_MiB, .round_count = 2});
  ASSERT_TRUE(rate.is_ok()) << rate.status().message();
  EXPECT_EQ(rate.value().bytes, 3_MiB);
  for (const auto& seconds :
       {rate.value().hash_seconds, rate.value().plain_seconds, rate.value().read_seconds}) {
    ASSERT_EQ(seconds.size(), 2u);
    EXPECT_GT(seconds[0], 0);
    EXPECT_GT(seconds[1], 0);
  }
}

TEST(HashRateTest, what_cannot_be_measured_is_refused) {
  for (const HashRateOptions& options : {HashRateOptions{.bytes = 0},
                                         HashRateOptions{.bytes = 1_MiB + 4096},
                                         HashRateOptions{.bytes = 1_MiB, .round_count = 0}}) {
    EXPECT_EQ(measure_hash(options).status().code(), StatusCode::invalid_argument);
  }
  EXPECT_EQ(measure_hash({.bytes = uint64_t{1} << 60}).status().code(), StatusCode::capacity);
}

TEST(AdamRateTest, every_round_times_both_on_as_many_elements_as_asked_for) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    const auto rate = measure_adam({.dtype = dtype,
                                    .element_count = 600'001,
                                    .tensor_count = 7,
                                    .thread_count = 2,
                                    .round_count = 3});
    ASSERT_TRUE(rate.is_ok()) << rate.status().message();
    EXPECT_EQ(rate.value().element_count, 600'001u);
    EXPECT_EQ(rate.value().bytes_per_element, dtype == DType::float32 ? 28u : 26u);
    ASSERT_EQ(rate.value().update_seconds.size(), 3u);
    ASSERT_EQ(rate.value().traffic_seconds.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_GT(rate.value().update_seconds[i], 0);
      EXPECT_GT(rate.value().traffic_seconds[i], 0);
    }
  }
}

TEST(AdamRateTest, what_cannot_be_measured_is_refused) {
  const AdamRateOptions good{.element_count = 10};
  for (const auto& change : std::vector<std::function<void(AdamRateOptions&)>>{
           [](auto& options) { options.element_count = 0; },
           [](auto& options) { options.tensor_count = 11; },
           [](auto& options) { options.tensor_count = 0; },
           [](auto& options) { options.thread_count = 0; },
           [](auto& options) { options.round_count = 0; },
           [](auto& options) { options.dtype = DType::float16; }}) {
    AdamRateOptions options = good;
    change(options);
    EXPECT_EQ(measure_adam(options).status().code(), StatusCode::invalid_argument);
  }
  AdamRateOptions huge = good;
  huge.element_count = uint64_t{1} << 45;
  EXPECT_EQ(measure_adam(huge).status().code(), StatusCode::capacity);
}

class IoBenchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // The temporary folder may lie in memory.
    std::string name = (std::filesystem::current_path() / "bench-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_;
};

TEST_F(IoBenchTest, reads_and_writes_are_counted_and_the_file_goes) {
  {
    auto made = IoBench::create(folder_.string(), 8_MiB);
    ASSERT_TRUE(made.is_ok()) << made.status().message();
    IoBench& bench = *made.value();
    EXPECT_EQ(std::filesystem::file_size(bench.path()), 8_MiB);
    struct stat state{};
    ASSERT_EQ(::stat(bench.path().c_str(), &state), 0);
    EXPECT_GE(static_cast<uint64_t>(state.st_blocks) * 512, 8_MiB) << "a hole";
    for (const bool raw : {false, true}) {
      for (const IoMix mix : {IoMix::read, IoMix::write, IoMix::mixed}) {
        const IoRateOptions options{.mix = mix, .block_bytes = 1_MiB, .depth = 4, .seconds = 0.02};
        const auto rate = raw ? bench.raw(options) : bench.through_queue(options);
        if (raw && rate.status().code() == StatusCode::unavailable) continue;
        ASSERT_TRUE(rate.is_ok()) << rate.status().message();
        EXPECT_EQ(rate.value().read_bytes > 0, mix != IoMix::write);
        EXPECT_EQ(rate.value().written_bytes > 0, mix != IoMix::read);
        EXPECT_EQ(rate.value().read_bytes % 1_MiB, 0u);
        EXPECT_GT(rate.value().seconds, 0);
      }
    }
    const auto shortest = bench.through_queue({.block_bytes = 1_MiB, .depth = 4, .seconds = 1e-9});
    ASSERT_TRUE(shortest.is_ok()) << shortest.status().message();
    EXPECT_EQ(shortest.value().read_bytes, 4_MiB) << "a busy machine measures something, too";
    const auto second = IoBench::create(folder_.string(), 8_MiB);
    EXPECT_EQ(second.status().code(), StatusCode::already_exists);
    EXPECT_TRUE(std::filesystem::exists(bench.path())) << "it belongs to the first";
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(IoBenchTest, as_much_of_a_mix_is_written_as_asked_for) {
  auto made = IoBench::create(folder_.string(), 8_MiB);
  ASSERT_TRUE(made.is_ok()) << made.status().message();
  for (const double share : {0.0, 0.2, 0.6, 1.0}) {
    const auto rate = made.value()->through_queue({.mix = IoMix::mixed,
                                                   .block_bytes = 64_KiB,
                                                   .depth = 4,
                                                   .seconds = 0.02,
                                                   .write_share = share});
    ASSERT_TRUE(rate.is_ok()) << rate.status().message();
    const auto written = static_cast<double>(rate.value().written_bytes);
    const auto all = written + static_cast<double>(rate.value().read_bytes);
    EXPECT_NEAR(written, share * all, 64_KiB) << share;
  }
}

TEST_F(IoBenchTest, what_cannot_be_measured_is_refused_and_leaves_nothing) {
  EXPECT_EQ(IoBench::create(folder_.string(), 0).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(IoBench::create(folder_.string(), 5).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(IoBench::create("/nowhere", 1_MiB).status().code(), StatusCode::device);
  EXPECT_EQ(IoBench::create(folder_.string(), uint64_t{1} << 50).status().code(),
            StatusCode::device);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  auto made = IoBench::create(folder_.string(), 1_MiB);
  ASSERT_TRUE(made.is_ok());
  const IoRateOptions good{.block_bytes = 4096, .depth = 1, .seconds = 0.01};
  for (const auto& change : std::vector<std::function<void(IoRateOptions&)>>{
           [](auto& options) { options.block_bytes = 0; },
           [](auto& options) { options.block_bytes = 1000; },
           [](auto& options) { options.block_bytes = 2_MiB; },
           [](auto& options) { options.depth = 0; },
           [](auto& options) { options.depth = 5000; },
           [](auto& options) { options.seconds = 0; },
           [](auto& options) { options.write_share = 1.5; }}) {
    IoRateOptions options = good;
    change(options);
    EXPECT_EQ(made.value()->through_queue(options).status().code(), StatusCode::invalid_argument);
    EXPECT_EQ(made.value()->raw(options).status().code(), StatusCode::invalid_argument);
  }
}

}  // namespace
}  // namespace memd
