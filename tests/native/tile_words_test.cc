// What is said of tiles that are updated in place: two states of each, and the piece that changes.
#include "store/state/tile_words.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <vector>

#include "base/units.h"
#include "store/state/private_tiles.h"

namespace memd {
namespace {

constexpr uint64_t kBase = 5;

OwnedFd copy_of(int fd) { return OwnedFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

/// How often the words have this one.
size_t count_of(const TileWords& words, uint64_t word) {
  size_t count = 0;
  for (off_t end = 0, at = 0; (at = lseek(words.fd(), end, SEEK_DATA)) >= 0;) {
    end = lseek(words.fd(), at, SEEK_HOLE);
    std::vector<uint64_t> found(static_cast<size_t>(end - at) / sizeof(uint64_t));
    EXPECT_EQ(pread(words.fd(), found.data(), found.size() * sizeof(uint64_t), at), end - at);
    count += static_cast<size_t>(std::count(found.begin(), found.end(), word));
  }
  return count;
}

/// A tile of two and a half pieces, every byte of it another one than its neighbours'.
class Tile {
 public:
  Tile(DType dtype, bool keeps_maxima)
      : dtype_(dtype),
        keeps_maxima_(keeps_maxima),
        value_(elements() * dtype_bytes(dtype)),
        rest_(elements() * ((dtype == DType::bfloat16 ? 10 : 8) + (keeps_maxima ? 4 : 0))) {
    change(1);
  }
  void change(size_t by) {
    for (size_t i = 0; i < value_.size(); ++i) value_[i] = static_cast<std::byte>(i * 7 + by);
    for (size_t i = 0; i < rest_.size(); ++i) rest_[i] = static_cast<std::byte>(i * 11 + by);
  }
  TileArrays arrays() {
    return {.dtype = dtype_,
            .elements = elements(),
            .keeps_maxima = keeps_maxima_,
            .value = value_.data(),
            .rest = rest_.data()};
  }
  bool operator==(const Tile&) const = default;

  uint64_t elements() const { return 2 * piece_elements(keeps_maxima_) + 320; }

 private:
  DType dtype_;
  bool keeps_maxima_;
  std::vector<std::byte> value_;
  std::vector<std::byte> rest_;
};

TEST(TileWords, the_state_before_stays_until_the_next_one_is_whole) {
  constexpr uint64_t kFirst = 0x1111'2222'3333;
  constexpr uint64_t kSecond = 0x4444'5555'6666;
  auto words = TileWords::create(7).value();
  const uint32_t record = words->record_of(tile_key(2, 3)).value();
  words->publish(
      record, {.step = kFirst, .private_offset_bytes = 0, .value = {}, .rest = {}}, kBase);
  words->publish(
      record, {.step = kSecond, .private_offset_bytes = 0, .value = {}, .rest = {}}, kBase);
  // A daemon that had died before the last store would have left the first one.
  EXPECT_EQ(count_of(*words, kFirst), 1u);
  EXPECT_EQ(count_of(*words, kSecond), 1u);
  auto next = TileWords::adopt(copy_of(words->fd()), 7).value();
  const auto tiles = next->read(kBase);
  ASSERT_TRUE(tiles.is_ok()) << tiles.status().message();
  ASSERT_EQ(tiles.value().size(), 1u);
  EXPECT_EQ(tiles.value()[0].key, tile_key(2, 3));
  EXPECT_EQ(tiles.value()[0].state.step, kSecond);
  EXPECT_FALSE(tiles.value()[0].update);
  EXPECT_TRUE(TileWords::adopt(copy_of(words->fd()), 7).value()->read(kBase + 1).value().empty())
      << "the catalogue on disk is newer";
}

void expect_piece_restored(DType dtype, bool keeps_maxima) {
  auto words = TileWords::create(7).value();
  const uint32_t record = words->record_of(tile_key(0, 0)).value();
  words->publish(record, {.step = 1, .private_offset_bytes = 0, .value = {}, .rest = {}}, kBase);
  const uint32_t scratch = words->take_scratch().value();
  Tile tile(dtype, keeps_maxima);
  const Tile before = tile;
  std::vector<uint64_t> pieces = {0, 1, 2};
  for (const uint64_t piece : pieces) words->begin_piece(record, tile.arrays(), piece, scratch);
  auto next = TileWords::adopt(copy_of(words->fd()), 7).value();
  const auto tiles = next->read(kBase);
  ASSERT_TRUE(tiles.is_ok()) << tiles.status().message();
  ASSERT_TRUE(tiles.value().at(0).update);
  EXPECT_EQ(tiles.value()[0].update->piece, 2u);
  EXPECT_EQ(tiles.value()[0].update->scratch, scratch);
  tile.change(2);
  // The last piece, and the one before it: the record names that until it names this one.
  next->restore_piece(tile.arrays(), *tiles.value()[0].update);
  next->restore_piece(tile.arrays(), {.piece = 1, .scratch = scratch});
  Tile expected(dtype, keeps_maxima);
  expected.change(2);
  const uint64_t elements = tile.elements();
  const auto expect_restored = [&](uint64_t offset, uint64_t element_bytes, bool in_value) {
    const std::byte* const now = in_value ? tile.arrays().value : tile.arrays().rest;
    Tile copy = before;
    const std::byte* const old = in_value ? copy.arrays().value : copy.arrays().rest;
    const std::byte* const changed = in_value ? expected.arrays().value : expected.arrays().rest;
    const uint64_t begin = offset + piece_elements(keeps_maxima) * element_bytes;
    const uint64_t end = offset + elements * element_bytes;
    EXPECT_EQ(std::memcmp(now + begin, old + begin, end - begin), 0);
    EXPECT_EQ(std::memcmp(now + offset, changed + offset, begin - offset), 0) << "was done";
  };
  expect_restored(0, dtype_bytes(dtype), true);
  expect_restored(0, 4, false);
  expect_restored(elements * 4, 4, false);
  if (dtype == DType::bfloat16) expect_restored(elements * 8, 2, false);
  if (keeps_maxima) expect_restored(elements * (dtype == DType::bfloat16 ? 10 : 8), 4, false);
}

TEST(TileWords, the_next_daemon_finds_the_piece_that_changes_as_it_was_in_either_dtype) {
  for (const DType dtype : {DType::float32, DType::bfloat16}) {
    for (const bool keeps_maxima : {false, true}) {
      SCOPED_TRACE(testing::Message() << "keeps maxima: " << keeps_maxima);
      expect_piece_restored(dtype, keeps_maxima);
    }
  }
}

TEST(TileWords, the_last_piece_of_a_full_tile_with_maxima_is_known_to_the_next_daemon) {
  auto words = TileWords::create(7).value();
  const uint32_t record = words->record_of(tile_key(0, 0)).value();
  const uint64_t last = (kTileElements - 1) / piece_elements(true);
  for (const uint64_t piece : {last, last + 1}) {
    words->publish(record,
                   {.step = 1, .private_offset_bytes = std::nullopt, .value = {}, .rest = {}},
                   kBase,
                   piece);
    const auto tiles = TileWords::adopt(copy_of(words->fd()), 7).value()->read(kBase);
    EXPECT_EQ(tiles.is_ok(), piece == last) << piece;
  }
}

}  // namespace
}  // namespace memd
