// The vectorised updates against the plain reference, bit for bit, and the two halves of a bf16
// parameter.
#include "optim/adam.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace memd {
namespace {

struct Fp32State {
  std::vector<float> parameter, exp_avg, exp_avg_sq, max_exp_avg_sq, gradient;
};

struct Bf16State {
  std::vector<uint16_t> half;
  std::vector<int16_t> remainder;
  std::vector<float> exp_avg, exp_avg_sq, max_exp_avg_sq;
  std::vector<uint16_t> gradient;
};

/// Ordinary numbers among the awkward ones.
float awkward(std::mt19937& random) {
  using Limits = std::numeric_limits<float>;
  const float choices[] = {0.0F,
                           -0.0F,
                           Limits::denorm_min(),
                           -Limits::denorm_min(),
                           1e-40F,
                           -1e-39F,
                           Limits::min(),
                           1e-30F,
                           -1e-20F,
                           1e19F,
                           -1e20F,
                           3e38F,
                           -Limits::max(),
                           Limits::infinity(),
                           -Limits::infinity(),
                           Limits::quiet_NaN()};
  if (random() % 4 == 0) return choices[random() % std::size(choices)];
  return std::normal_distribution<float>()(random) *
         std::pow(10.0F, static_cast<float>(static_cast<int>(random() % 13) - 6));
}

Fp32State fp32_state(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Fp32State state;
  for (size_t i = 0; i < count; ++i) {
    state.parameter.push_back(awkward(random));
    state.exp_avg.push_back(awkward(random));
    state.exp_avg_sq.push_back(std::fabs(awkward(random)));
    state.max_exp_avg_sq.push_back(std::fabs(awkward(random)));
    state.gradient.push_back(awkward(random));
  }
  return state;
}

Bf16State bf16_state(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bf16State state;
  for (size_t i = 0; i < count; ++i) {
    state.half.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(awkward(random)) >> 16));
    state.remainder.push_back(static_cast<int16_t>(random()));
    state.exp_avg.push_back(awkward(random));
    state.exp_avg_sq.push_back(std::fabs(awkward(random)));
    state.max_exp_avg_sq.push_back(std::fabs(awkward(random)));
    state.gradient.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(awkward(random)) >> 16));
  }
  return state;
}

void update(Isa isa, const AdamScalars& scalars, Fp32State& state, size_t first, size_t count) {
  adam_update(isa,
              scalars,
              count,
              state.parameter.data() + first,
              state.exp_avg.data() + first,
              state.exp_avg_sq.data() + first,
              state.gradient.data() + first,
              scalars.amsgrad ? state.max_exp_avg_sq.data() + first : nullptr);
}

void update(Isa isa, const AdamScalars& scalars, Bf16State& state, size_t first, size_t count) {
  adam_update(isa,
              scalars,
              count,
              state.half.data() + first,
              state.remainder.data() + first,
              state.exp_avg.data() + first,
              state.exp_avg_sq.data() + first,
              state.gradient.data() + first,
              scalars.amsgrad ? state.max_exp_avg_sq.data() + first : nullptr);
}

/// Which of several NaNs an operation hands on depends on the operand order, so all of them count
/// as one.
uint32_t bits_of(float value) {
  return std::isnan(value) ? 0x7FC00000U : std::bit_cast<uint32_t>(value);
}
uint32_t bits_of(uint16_t half) { return (half & 0x7FFFU) > 0x7F80U ? 0x7FC0U : half; }
uint32_t bits_of(int16_t remainder) { return static_cast<uint16_t>(remainder); }

template <typename T>
void expect_same_bits(const std::vector<T>& actual,
                      const std::vector<T>& expected,
                      const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    ASSERT_EQ(bits_of(actual[i]), bits_of(expected[i])) << what << " " << i;
}

void expect_same_bits(const Fp32State& actual, const Fp32State& expected) {
  expect_same_bits(actual.exp_avg, expected.exp_avg, "exp_avg");
  expect_same_bits(actual.exp_avg_sq, expected.exp_avg_sq, "exp_avg_sq");
  expect_same_bits(actual.max_exp_avg_sq, expected.max_exp_avg_sq, "max_exp_avg_sq");
  expect_same_bits(actual.parameter, expected.parameter, "parameter");
}

void expect_same_bits(const Bf16State& actual, const Bf16State& expected) {
  expect_same_bits(actual.exp_avg, expected.exp_avg, "exp_avg");
  expect_same_bits(actual.exp_avg_sq, expected.exp_avg_sq, "exp_avg_sq");
  expect_same_bits(actual.max_exp_avg_sq, expected.max_exp_avg_sq, "max_exp_avg_sq");
  expect_same_bits(actual.half, expected.half, "half");
  expect_same_bits(actual.remainder, expected.remainder, "remainder");
}

std::vector<Isa> wide_isas() {
  std::vector<Isa> isas;
  if (isa_best() >= Isa::avx2) isas.push_back(Isa::avx2);
  if (isa_best() >= Isa::avx512) isas.push_back(Isa::avx512);
  return isas;
}

/// Every branch of the loop: no decay, AdamW's, Adam's; the lerp from either end; either sign; with
/// and without the maximum.
std::vector<AdamSettings> all_settings() {
  std::vector<AdamSettings> all;
  for (const auto& [maximize, amsgrad] : {std::pair(false, false),
                                          std::pair(true, false),
                                          std::pair(false, true),
                                          std::pair(true, true)}) {
    for (const double beta1 : {0.9, 0.5, 0.3, 0.0}) {
      for (const auto& [weight_decay, decoupled] :
           {std::pair(0.0, true), std::pair(0.1, true), std::pair(0.1, false)}) {
        all.push_back({.lr = 1e-3,
                       .beta1 = beta1,
                       .beta2 = 0.95,
                       .weight_decay = weight_decay,
                       .decoupled = decoupled,
                       .maximize = maximize,
                       .amsgrad = amsgrad});
      }
    }
  }
  return all;
}

std::string name_of(const AdamSettings& settings) {
  return "beta1 " + std::to_string(settings.beta1) + " weight_decay " +
         std::to_string(settings.weight_decay) + (settings.decoupled ? " decoupled" : " l2") +
         (settings.maximize ? " maximize" : "") + (settings.amsgrad ? " amsgrad" : "");
}

template <typename State>
void expect_every_isa_gives_the_bits_of_the_reference(State (*make_state)(size_t, uint32_t)) {
  for (const AdamSettings& settings : all_settings()) {
    for (const size_t count : {0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1000, 4097}) {
      SCOPED_TRACE(name_of(settings) + " count " + std::to_string(count));
      const State start = make_state(count, static_cast<uint32_t>(count));
      State expected = start;
      for (uint64_t t = 1; t <= 4; ++t)
        update(Isa::plain, adam_scalars(settings, t), expected, 0, count);
      for (const Isa isa : wide_isas()) {
        State actual = start;
        for (uint64_t t = 1; t <= 4; ++t) update(isa, adam_scalars(settings, t), actual, 0, count);
        expect_same_bits(actual, expected);
      }
    }
  }
}

template <typename State>
void expect_any_split_gives_the_same_bits(State (*make_state)(size_t, uint32_t)) {
  constexpr size_t kCount = 5000;
  const AdamScalars scalars = adam_scalars({.weight_decay = 0.01, .amsgrad = true}, 3);
  const State start = make_state(kCount, 1);
  State expected = start;
  update(Isa::plain, scalars, expected, 0, kCount);
  std::vector<Isa> isas = wide_isas();
  isas.push_back(Isa::plain);
  for (const Isa isa : isas) {
    for (uint32_t seed = 1; seed <= 20; ++seed) {
      SCOPED_TRACE(testing::Message() << "seed " << seed);
      std::mt19937 random(seed);
      State actual = start;
      for (size_t first = 0; first < kCount;) {
        const size_t count = std::min<size_t>(1 + random() % 300, kCount - first);
        update(isa, scalars, actual, first, count);
        first += count;
      }
      expect_same_bits(actual, expected);
    }
  }
}

TEST(Adam, has_the_bits_of_the_reference_on_every_instruction_set_in_fp32) {
  expect_every_isa_gives_the_bits_of_the_reference(fp32_state);
}

TEST(Adam, has_the_bits_of_the_reference_on_every_instruction_set_in_bf16) {
  expect_every_isa_gives_the_bits_of_the_reference(bf16_state);
}

TEST(Adam, has_the_same_bits_for_any_split_over_calls_in_fp32) {
  expect_any_split_gives_the_same_bits(fp32_state);
}

TEST(Adam, has_the_same_bits_for_any_split_over_calls_in_bf16) {
  expect_any_split_gives_the_same_bits(bf16_state);
}

TEST(Adam, follows_the_papers_formula) {
  const AdamSettings settings{
      .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
  double theta = 0.5, m = 0.0, v = 0.0;
  Fp32State state{{0.5F}, {0.0F}, {0.0F}, {0.0F}, {0.0F}};
  for (uint64_t t = 1; t <= 50; ++t) {
    const double g = std::sin(static_cast<double>(t));
    state.gradient[0] = static_cast<float>(g);
    update(isa_best(), adam_scalars(settings, t), state, 0, 1);
    theta -= settings.lr * settings.weight_decay * theta;
    m = settings.beta1 * m + (1 - settings.beta1) * g;
    v = settings.beta2 * v + (1 - settings.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(settings.beta1, static_cast<double>(t)));
    const double v_hat = v / (1 - std::pow(settings.beta2, static_cast<double>(t)));
    theta -= settings.lr * m_hat / (std::sqrt(v_hat) + settings.eps);
  }
  EXPECT_NEAR(static_cast<double>(state.parameter[0]), theta, 1e-6);
}

TEST(Adam, with_amsgrad_the_largest_second_moment_so_far_divides) {
  const AdamSettings settings{
      .lr = 0.01, .beta1 = 0.9, .beta2 = 0.5, .eps = 1e-8, .weight_decay = 0.0, .amsgrad = true};
  double theta = 0.5, m = 0.0, v = 0.0, v_max = 0.0;
  Fp32State state{{0.5F}, {0.0F}, {0.0F}, {0.0F}, {0.0F}};
  for (uint64_t t = 1; t <= 20; ++t) {
    const double g = t % 5 == 1 ? 1.0 : 0.01;
    state.gradient[0] = static_cast<float>(g);
    update(isa_best(), adam_scalars(settings, t), state, 0, 1);
    m = settings.beta1 * m + (1 - settings.beta1) * g;
    v = settings.beta2 * v + (1 - settings.beta2) * g * g;
    v_max = std::max(v_max, v);
    const double m_hat = m / (1 - std::pow(settings.beta1, static_cast<double>(t)));
    const double v_hat = v_max / (1 - std::pow(settings.beta2, static_cast<double>(t)));
    theta -= settings.lr * m_hat / (std::sqrt(v_hat) + settings.eps);
    EXPECT_NEAR(static_cast<double>(state.max_exp_avg_sq[0]), v_max, 1e-7);
  }
  EXPECT_LT(v, v_max / 2) << "else the maximum is the last one";
  EXPECT_NEAR(static_cast<double>(state.parameter[0]), theta, 1e-6);
}

TEST(Adam, a_maximum_of_nan_stays_and_one_that_meets_nan_becomes_it) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<Isa> isas = wide_isas();
  isas.push_back(Isa::plain);
  for (const Isa isa : isas) {
    const auto of = [](float value) { return std::vector<float>(33, value); };
    Fp32State state{of(1.0F), of(0.0F), of(0.0F), of(nan), of(1.0F)};
    update(isa, adam_scalars({.amsgrad = true}, 1), state, 0, 33);
    for (const float maximum : state.max_exp_avg_sq) EXPECT_TRUE(std::isnan(maximum));
    state = {of(1.0F), of(0.0F), of(0.0F), of(7.0F), of(nan)};
    update(isa, adam_scalars({.amsgrad = true}, 1), state, 0, 33);
    for (const float maximum : state.max_exp_avg_sq) EXPECT_TRUE(std::isnan(maximum));
  }
}

/// One update, number 3, before the tail of a parameter and in it, on every instruction set.
void expect_updated(const AdamSettings& settings,
                    const Fp32State& start,
                    const Fp32State& before_tail,
                    const Fp32State& in_tail) {
  std::vector<Isa> isas = wide_isas();
  isas.push_back(Isa::plain);
  for (const Isa isa : isas) {
    AdamScalars scalars = adam_scalars(settings, 3);
    for (const Fp32State* const expected : {&before_tail, &in_tail}) {
      Fp32State actual = start;
      update(isa, scalars, actual, 0, 1);
      expect_same_bits(actual, *expected);
      scalars.in_tail = true;
    }
  }
}

// The numbers are those of torch 2.13's fused Adam, from a parameter of 8 such elements and of one.
TEST(Adam, in_the_tail_of_a_parameter_it_rounds_as_torch_does_there) {
  expect_updated({.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95},
                 {{0.5F}, {0.25F}, {0x1.22b2b2p-1F}, {0.0F}, {0x1.ac221ap-2F}},
                 {{0x1.ff7c58p-2F}, {0x1.11369cp-2F}, {0x1.18a35ep-1F}, {0.0F}, {0x1.ac221ap-2F}},
                 {{0x1.ff7c58p-2F}, {0x1.11369cp-2F}, {0x1.18a360p-1F}, {0.0F}, {0x1.ac221ap-2F}});
}

TEST(Adam, in_the_tail_of_a_parameter_a_lerp_to_its_end_keeps_the_sign_of_zero) {
  for (const float exp_avg : {1.0F, -1.0F}) {
    const float zero = std::copysign(0.0F, exp_avg);
    expect_updated({.lr = 1e-3, .beta1 = 0.0, .beta2 = 0.95},
                   {{0.5F}, {exp_avg}, {0.0F}, {0.0F}, {-0.0F}},
                   {{0.5F}, {-zero}, {0.0F}, {0.0F}, {-0.0F}},
                   {{0.5F}, {zero}, {0.0F}, {0.0F}, {-0.0F}});
  }
}

TEST(Adam, in_the_tail_of_a_parameter_a_nan_is_no_maximum) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect_updated({.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .amsgrad = true},
                 {{0.5F}, {0.0F}, {0.0F}, {7.0F}, {nan}},
                 {{nan}, {nan}, {nan}, {nan}, {nan}},
                 {{nan}, {nan}, {nan}, {7.0F}, {nan}});
}

template <typename State>
void negate(State& state);

template <>
void negate(Fp32State& state) {
  for (float& gradient : state.gradient) gradient = -gradient;
}

template <>
void negate(Bf16State& state) {
  for (uint16_t& gradient : state.gradient) gradient ^= 0x8000U;
}

/// Decay included: it is not negated.
template <typename State>
void expect_maximize_moves_as_the_negated_gradient_does(State (*make_state)(size_t, uint32_t)) {
  std::vector<Isa> isas = wide_isas();
  isas.push_back(Isa::plain);
  for (AdamSettings settings : all_settings()) {
    if (!settings.maximize) continue;
    for (const Isa isa : isas) {
      SCOPED_TRACE(name_of(settings));
      State actual = make_state(1000, 5);
      State expected = actual;
      negate(expected);
      settings.maximize = true;
      update(isa, adam_scalars(settings, 3), actual, 0, 1000);
      settings.maximize = false;
      update(isa, adam_scalars(settings, 3), expected, 0, 1000);
      expect_same_bits(actual, expected);
    }
  }
}

TEST(Adam, maximize_moves_as_the_negated_gradient_does_in_fp32) {
  expect_maximize_moves_as_the_negated_gradient_does(fp32_state);
}

TEST(Adam, maximize_moves_as_the_negated_gradient_does_in_bf16) {
  expect_maximize_moves_as_the_negated_gradient_does(bf16_state);
}

TEST(Adam, interpolates_from_the_end_where_torchs_lerp_does) {
  EXPECT_FALSE(adam_scalars({.beta1 = 0.9}, 1).lerp_from_end);
  EXPECT_FALSE(adam_scalars({.beta1 = 0.5000001}, 1).lerp_from_end);
  EXPECT_TRUE(adam_scalars({.beta1 = 0.5}, 1).lerp_from_end);
  EXPECT_TRUE(adam_scalars({.beta1 = 0.0}, 1).lerp_from_end);
}

/// An update that leaves the parameter as it is: no learning rate, no decay.
constexpr AdamSettings kStandStill{.lr = 0.0, .weight_decay = 0.0};

TEST(AdamBf16, keeps_every_fp32_number_exactly_in_half_and_remainder) {
  constexpr uint32_t kLowHalves[] = {
      0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFE, 0xFFFF};
  std::vector<Isa> isas = wide_isas();
  isas.push_back(Isa::plain);
  for (const Isa isa : isas) {
    for (const uint32_t low : kLowHalves) {
      constexpr size_t kCount = 1 << 16;
      Bf16State state{std::vector<uint16_t>(kCount),
                      std::vector<int16_t>(kCount),
                      std::vector<float>(kCount),
                      std::vector<float>(kCount),
                      {},
                      std::vector<uint16_t>(kCount)};
      for (uint32_t high = 0; high < kCount; ++high) {
        // Any halves whose sum is the number will do as the start.
        const uint32_t bits = (high << 16) + low;
        state.remainder[high] = static_cast<int16_t>(low);
        state.half[high] = static_cast<uint16_t>(
            (bits - static_cast<uint32_t>(int32_t{state.remainder[high]})) >> 16);
      }
      update(isa, adam_scalars(kStandStill, 1), state, 0, kCount);
      for (uint32_t high = 0; high < kCount; ++high) {
        const uint32_t bits = (high << 16) + low;
        const uint32_t half = state.half[high];
        const uint32_t rebuilt =
            (half << 16) + static_cast<uint32_t>(int32_t{state.remainder[high]});
        if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
          ASSERT_GT(half & 0x7FFFU, 0x7F80U)
              << std::hex << bits << ": the published half of a NaN is a NaN";
          ASSERT_GT(rebuilt & 0x7FFFFFFFU, 0x7F800000U) << std::hex << bits;
        } else {
          ASSERT_EQ(rebuilt, bits) << std::hex << bits;
          ASSERT_EQ(half, (bits + 0x8000U) >> 16) << std::hex << bits;
        }
      }
    }
  }
}

TEST(AdamBf16, a_number_beyond_bf16_is_published_as_infinity_and_kept_exactly) {
  Bf16State state{{0x7F80}, {-1}, {0.0F}, {0.0F}, {}, {0}};  // 0x7F7FFFFF, the largest fp32
  update(isa_best(), adam_scalars(kStandStill, 1), state, 0, 1);
  EXPECT_EQ(state.half[0], 0x7F80);
  EXPECT_EQ(state.remainder[0], -1);
}

TEST(AdamBf16, moves_like_fp32_fed_the_same_gradients) {
  constexpr size_t kCount = 333;
  std::mt19937 random(7);
  Bf16State state = bf16_state(kCount, 7);
  Fp32State expected{
      {}, std::vector<float>(kCount), std::vector<float>(kCount), {}, std::vector<float>(kCount)};
  state.exp_avg.assign(kCount, 0.0F);
  state.exp_avg_sq.assign(kCount, 0.0F);
  for (size_t i = 0; i < kCount; ++i) {
    const float start = std::normal_distribution<float>()(random);
    state.half[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(start) >> 16);
    state.remainder[i] = 0;
    expected.parameter.push_back(std::bit_cast<float>(uint32_t{state.half[i]} << 16));
  }
  for (uint64_t t = 1; t <= 20; ++t) {
    for (size_t i = 0; i < kCount; ++i) {
      const float gradient = std::normal_distribution<float>()(random);
      state.gradient[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(gradient) >> 16);
      expected.gradient[i] = std::bit_cast<float>(uint32_t{state.gradient[i]} << 16);
    }
    const AdamScalars scalars = adam_scalars({.weight_decay = 0.1}, t);
    update(isa_best(), scalars, state, 0, kCount);
    update(isa_best(), scalars, expected, 0, kCount);
  }
  for (size_t i = 0; i < kCount; ++i) {
    const uint32_t bits =
        (uint32_t{state.half[i]} << 16) + static_cast<uint32_t>(int32_t{state.remainder[i]});
    ASSERT_EQ(bits, std::bit_cast<uint32_t>(expected.parameter[i])) << i;
  }
}

TEST(AdamDeathTest, the_first_update_is_number_one) {
  EXPECT_DEATH(adam_scalars({}, 0), "CHECK failed");
}

}  // namespace
}  // namespace memd
