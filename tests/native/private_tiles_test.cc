// Dirty tiles have an order, and a time at which they became dirty.
#include "store/state/private_tiles.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace memd::testing {
namespace {

TEST(PrivateTilesTest, dirty_tiles_are_found_in_their_order_from_any_key_on) {
  PrivateTiles tiles;
  for (const uint32_t bucket : {7u, 2u, 5u}) {
    for (const uint64_t tile : {3u, 0u}) tiles.set_dirty(tile_key(bucket, tile));
  }
  std::vector<uint64_t> keys;
  uint64_t from = 0;
  while (const auto dirty = tiles.next_dirty(from)) {
    keys.push_back(dirty->key);
    from = dirty->key + 1;
  }
  EXPECT_EQ(keys,
            (std::vector<uint64_t>{tile_key(2, 0),
                                   tile_key(2, 3),
                                   tile_key(5, 0),
                                   tile_key(5, 3),
                                   tile_key(7, 0),
                                   tile_key(7, 3)}));
  EXPECT_EQ(tiles.next_dirty(tile_key(5, 1))->key, tile_key(5, 3));
}

TEST(PrivateTilesTest, a_bucket_has_dirty_tiles_of_its_own_alone) {
  PrivateTiles tiles;
  tiles.set_dirty(tile_key(4, 2));
  EXPECT_TRUE(tiles.has_dirty(4, 3));
  EXPECT_FALSE(tiles.has_dirty(4, 2));
  EXPECT_FALSE(tiles.has_dirty(3, 8));
  EXPECT_FALSE(tiles.has_dirty(5, 8));
  tiles.set_clean(tile_key(4, 2));
  EXPECT_FALSE(tiles.has_dirty(4, 3));
}

TEST(PrivateTilesTest, a_tile_that_stays_dirty_became_so_once) {
  PrivateTiles tiles;
  const uint64_t key = tile_key(1, 1);
  tiles.set_dirty(key);
  const uint64_t count = tiles.dirtied_count();
  tiles.set_dirty(key);
  EXPECT_LT(tiles.next_dirty(key)->dirtied_before, count);
  tiles.set_clean(key);
  tiles.set_dirty(key);
  EXPECT_GE(tiles.next_dirty(key)->dirtied_before, count);
}

}  // namespace
}  // namespace memd::testing
