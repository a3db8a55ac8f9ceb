#include "store/cache/shard_names.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "store/cache/labelled_specs.h"
#include "store/cache/shard_label.h"

namespace memd {
namespace {

TEST(ShardNames, finds_what_is_in_it_whatever_came_and_went) {
  std::vector<std::string> names(200);
  for (size_t id = 0; id < names.size(); ++id) names[id] = "layer." + std::to_string(id);
  ShardNames ids([&](uint32_t id) { return std::string_view(names[id]); });
  EXPECT_FALSE(ids.contains("layer.0"));
  std::map<std::string, uint32_t> wanted;
  std::mt19937 random(0);
  for (int turn = 0; turn < 5000; ++turn) {
    // Few at some times, so that runs of places are broken, and many at others, so that they join.
    const auto id = static_cast<uint32_t>(random() % (turn / 1000 % 2 == 0 ? 200 : 20));
    if (wanted.erase(names[id]) == 1) {
      ids.erase(id);
    } else {
      ids.insert(id);
      wanted[names[id]] = id;
    }
    ASSERT_EQ(ids.size(), wanted.size());
    for (const std::string& name : names) {
      const auto found = ids.find(name);
      const auto expected = wanted.find(name);
      ASSERT_EQ(found.has_value(), expected != wanted.end()) << name << " in turn " << turn;
      if (found) {
        ASSERT_EQ(*found, expected->second);
      }
    }
  }
}

TEST(LabelledSpecs, have_a_label_for_each_and_none_for_what_is_refused) {
  const std::string too_long(ShardLabel::kNameBytesMax + 1, 'x');
  const std::vector<uint64_t> too_many(ShardLabel::kDimensionsMax + 1, 1);
  LabelledSpecs declared{{.name = "a", .shape = {2, 3}},
                         {.name = too_long, .shape = {1}},
                         {.name = "b", .shape = too_many},
                         {.name = "c", .shape = {}}};
  ASSERT_EQ(declared.specs().size(), 4U);
  EXPECT_EQ(declared.take_label(declared.specs()[3]).name(), "c");
  const ShardLabel first = declared.take_label(declared.specs()[0]);
  EXPECT_EQ(first.name(), "a");
  EXPECT_EQ(first.shape(), (std::vector<uint64_t>{2, 3}));
  for (const size_t refused : {1, 2})
    EXPECT_EQ(declared.take_label(declared.specs()[refused]).name(), "");
}

TEST(ShardLabel, gives_back_name_and_shape) {
  const std::string long_name(ShardLabel::kNameBytesMax, 'x');
  const std::vector<uint64_t> many(ShardLabel::kDimensionsMax, uint64_t{1} << 60);
  const std::vector<std::vector<uint64_t>> shapes{{}, {3}, {2, 0, 5}, many};
  for (const std::string& name : {std::string("w"), std::string("embed.weight"), long_name}) {
    for (const auto& shape : shapes) {
      const ShardLabel label(name, shape);
      EXPECT_EQ(label.name(), name);
      EXPECT_EQ(label.shape(), shape);
    }
  }
  EXPECT_EQ(ShardLabel().name(), "");
  EXPECT_TRUE(ShardLabel().shape().empty());
}

}  // namespace
}  // namespace memd
