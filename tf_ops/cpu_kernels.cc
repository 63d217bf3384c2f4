#include "cpu_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "Eigen/Core"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hvd_eightbit {
namespace cpu {
namespace {

// A block is worked on in tiles that stay in the first-level cache; blocks up to a tile's size in one go.
constexpr int64_t kTile = 4096;
constexpr int64_t kNanosecondsPerElement = 1;

// Keeps subnormals in this thread for as long as it lives.
class KeepSubnormals {
 public:
#if defined(__x86_64__)
  KeepSubnormals() : mode_(_mm_getcsr()) { _mm_setcsr(mode_ & ~0x8040u); }
  ~KeepSubnormals() { _mm_setcsr(mode_); }

 private:
  unsigned mode_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode_));
    __asm__ volatile("msr fpcr, %0" ::"r"(mode_ & ~(1ull << 24)));
  }
  ~KeepSubnormals() { __asm__ volatile("msr fpcr, %0" ::"r"(mode_)); }

 private:
  uint64_t mode_;
#endif
};

// float32 elements are read and written where they are, others through a tile.
const float* ToFloat(const Loops&, const float* x, int64_t, float*) { return x; }

const float* ToFloat(const Loops& loops, const Eigen::half* x, int64_t elements, float* tile) {
  loops.half_to_float(x, elements, tile);
  return tile;
}

const float* ToFloat(const Loops& loops, const Eigen::bfloat16* x, int64_t elements, float* tile) {
  loops.bfloat16_to_float(x, elements, tile);
  return tile;
}

const float* ToFloat(const Loops&, const double* x, int64_t elements, float* tile) {
  for (int64_t i = 0; i < elements; ++i) tile[i] = static_cast<float>(x[i]);
  return tile;
}

void FromFloat(const Loops&, const float* tile, int64_t elements, float* x) {
  if (tile != x) memcpy(x, tile, elements * sizeof(float));
}

void FromFloat(const Loops& loops, const float* tile, int64_t elements, Eigen::half* x) {
  loops.float_to_half(tile, elements, x);
}

void FromFloat(const Loops& loops, const float* tile, int64_t elements, Eigen::bfloat16* x) {
  loops.float_to_bfloat16(tile, elements, x);
}

void FromFloat(const Loops&, const float* tile, int64_t elements, double* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] = tile[i];
}

float LoadAbsmax(const uint8_t* from) {
  float absmax;
  memcpy(&absmax, from, sizeof(absmax));
  return absmax;
}

void StoreAbsmax(float absmax, uint8_t* to) { memcpy(to, &absmax, sizeof(absmax)); }

// A run of consecutive elements of one tensor, cut into blocks, and where its codes and absmax values are.
struct Run {
  int64_t tensor;
  int64_t begin;  // its first element within the tensor
  int64_t elements;
  int64_t code;    // bytes from the base of all codes
  int64_t absmax;  // bytes from the base of all absmax values
  int64_t first_tile;
};

// A tile of a run: elements of one block.
struct Tile {
  const Run* run;
  int64_t begin;  // its first element within the tensor
  int64_t elements;
  int64_t code;    // as in Run, of its first element
  int64_t absmax;  // as in Run, of its block
  bool opens_block;
};

// All tiles of some runs, numbered, so that threads can share them out.
class Tiles {
 public:
  Tiles(std::vector<Run> runs, int64_t block_size) : runs_(std::move(runs)), block_size_(block_size) {
    for (Run& run : runs_) {
      run.first_tile = count_;
      const int64_t block_size = BlockSize(run), whole_blocks = run.elements / block_size;
      count_ += whole_blocks * CeilDiv(block_size, kTile) + CeilDiv(run.elements % block_size, kTile);
      blocks_are_tiles_ = blocks_are_tiles_ && block_size <= kTile;
    }
  }

  int64_t count() const { return count_; }
  bool blocks_are_tiles() const { return blocks_are_tiles_; }

  // Calls work(number, tile) for the tiles numbered [begin, end).
  template <typename Work>
  void ForEach(int64_t begin, int64_t end, const Work& work) const {
    if (begin >= end) return;
    const auto starts_after = [](int64_t tile, const Run& run) { return tile < run.first_tile; };
    auto run = std::upper_bound(runs_.begin(), runs_.end(), begin, starts_after) - 1;
    for (int64_t i = begin; i < end; ++i) {
      while (run + 1 != runs_.end() && i >= (run + 1)->first_tile) ++run;
      const int64_t block_size = BlockSize(*run), tiles_per_block = CeilDiv(block_size, kTile);
      const int64_t block = (i - run->first_tile) / tiles_per_block;
      const int64_t tile = (i - run->first_tile) % tiles_per_block;
      const int64_t first = block * block_size + tile * kTile;
      const int64_t last = std::min({first + kTile, (block + 1) * block_size, run->elements});
      work(i, Tile{&*run, run->begin + first, last - first, run->code + first, run->absmax + kAbsmaxBytes * block,
                   tile == 0});
    }
  }

 private:
  int64_t BlockSize(const Run& run) const { return block_size_ == 0 ? run.elements : block_size_; }

  std::vector<Run> runs_;
  int64_t block_size_;
  int64_t count_ = 0;
  bool blocks_are_tiles_ = true;
};

// The one run of a tensor with codes and absmax values in buffers of their own.
std::vector<Run> WholeTensor(int64_t elements) {
  if (elements == 0) return {};
  return {{0, 0, elements, 0, 0, 0}};
}

// Appends the runs of one chunk, whose message begins `message` bytes from the base.
void AppendChunk(const Layout& layout, int64_t chunk, int64_t message, std::vector<Run>* runs) {
  for (const Segment& segment : layout.chunks[chunk]) {
    runs->push_back({segment.tensor, segment.begin, segment.elements, message + segment.code,
                     message + layout.chunk_elements + kAbsmaxBytes * segment.block, 0});
  }
}

// Zeroes the bytes of a chunk's message that have neither code nor absmax; all bytes, if it has none.
void ClearUnused(const Layout& layout, int64_t chunk, bool all, uint8_t* message) {
  int64_t codes = 0, blocks = 0;
  if (!all && !layout.chunks[chunk].empty()) {
    const Segment& last = layout.chunks[chunk].back();
    codes = last.code + last.elements;
    blocks = last.block + Blocks(last.elements, layout.block_size);
  }
  const int64_t absmax_end = layout.chunk_elements + kAbsmaxBytes * blocks;
  memset(message + codes, 0, layout.chunk_elements - codes);
  memset(message + absmax_end, 0, layout.chunk_bytes - absmax_end);
}

// Codes every tile of the tensors. load(tile, scratch) returns its elements as float32, in scratch or wherever they
// are.
template <typename T, typename Load>
void EncodeTiles(const Table& table, const std::vector<const T*>& tensors, const Tiles& tiles, int64_t cost,
                 const ParallelFor& parallel_for, const Load& load, uint8_t* codes, uint8_t* absmax) {
  const auto encode = [&](const Tile& tile, const float* x, float block_absmax) {
    const T* next = tensors[tile.run->tensor] + tile.begin + tile.elements;
    table.EncodeBlock(x, tile.elements, block_absmax, codes + tile.code, next);
  };
  if (tiles.blocks_are_tiles()) {
    parallel_for(tiles.count(), cost, [&](int64_t begin, int64_t end) {
      KeepSubnormals keep;
      alignas(64) float scratch[kTile];
      tiles.ForEach(begin, end, [&](int64_t, const Tile& tile) {
        const float* x = load(tile, scratch);
        const float block_absmax = AbsmaxFromBits(table.loops().max_magnitude_bits(x, tile.elements));
        StoreAbsmax(block_absmax, absmax + tile.absmax);
        encode(tile, x, block_absmax);
      });
    });
    return;
  }
  // The absmax of a block of many tiles is known when all of them have been seen: they are loaded a second time.
  std::vector<uint32_t> tile_bits(tiles.count());
  parallel_for(tiles.count(), cost, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    alignas(64) float scratch[kTile];
    tiles.ForEach(begin, end, [&](int64_t i, const Tile& tile) {
      tile_bits[i] = ToBits(AbsmaxFromBits(table.loops().max_magnitude_bits(load(tile, scratch), tile.elements)));
    });
  });
  tiles.ForEach(0, tiles.count(), [&](int64_t i, const Tile& tile) {
    const uint32_t so_far = tile.opens_block ? 0 : ToBits(LoadAbsmax(absmax + tile.absmax));
    StoreAbsmax(FromBits(std::max(so_far, tile_bits[i])), absmax + tile.absmax);
  });
  parallel_for(tiles.count(), cost, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    alignas(64) float scratch[kTile];
    tiles.ForEach(begin, end, [&](int64_t, const Tile& tile) {
      encode(tile, load(tile, scratch), LoadAbsmax(absmax + tile.absmax));
    });
  });
}

// Decodes every tile into its tensor, times scale.
template <typename T>
void DecodeTiles(const Table& table, const Tiles& tiles, const ParallelFor& parallel_for, const uint8_t* codes,
                 const uint8_t* absmax, float scale, const std::vector<T*>& tensors) {
  parallel_for(tiles.count(), kTile * kNanosecondsPerElement, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    alignas(64) float scratch[kTile];
    tiles.ForEach(begin, end, [&](int64_t, const Tile& tile) {
      T* x = tensors[tile.run->tensor] + tile.begin;
      float* decoded = std::is_same<T, float>::value ? reinterpret_cast<float*>(x) : scratch;
      table.loops().decode(table.tables(), codes + tile.code, LoadAbsmax(absmax + tile.absmax), scale, tile.elements,
                           decoded);
      FromFloat(table.loops(), decoded, tile.elements, x);
    });
  });
}

}  // namespace

Table::Table(const float* values, InstructionSet set) : loops_(LoopsFor(set)) {
  KeepSubnormals keep;
  std::copy_n(values, kCodes, tables_.values);
  for (int i = 0; i < kMidpoints; ++i) tables_.midpoints[i] = Midpoint(values, i);
  zero_code_ = Encode(tables_.midpoints, 0.0f);
  FillBuckets();
  FillSearch();
  FillPlanes();
}

void Table::FillBuckets() {
  // Midpoints that are equal (between equal values) are one border.
  int borders = 0;
  tables_.border_codes[0] = 0;
  for (int i = 0; i < kMidpoints; ++i) {
    const uint32_t key = OrderKey(tables_.midpoints[i]);
    if (borders == 0 || key != tables_.borders[borders - 1]) tables_.borders[borders++] = key;
    tables_.border_codes[borders] = static_cast<uint8_t>(i + 1);
  }
  std::fill(tables_.borders + borders, tables_.borders + kMidpoints + 1, std::numeric_limits<uint32_t>::max());
  std::fill(tables_.border_codes + borders + 1, tables_.border_codes + kCodes, 0);  // not used

  tables_.one_border_a_bucket = true;
  int border = 0;
  for (uint32_t bucket = 0; bucket < CodingTables::kBuckets; ++bucket) {
    tables_.first_border[bucket] = static_cast<uint8_t>(border);
    const int first = border;
    while (border < borders && tables_.borders[border] >> 16 == bucket) ++border;
    tables_.one_border_a_bucket = tables_.one_border_a_bucket && border - first <= 1;
  }
}

void Table::FillSearch() {
  const auto signed_key = [this](int border) { return tables_.borders[border] ^ 0x80000000u; };
  const auto upper_half = [&](int border) { return static_cast<int16_t>(signed_key(border) >> 16); };
  tables_.search[0] = 0.0f;
  tables_.border_search[0] = 0;
  for (int step = 0; step <= 8; ++step) {
    for (int outcomes = 0; outcomes < 1 << step; ++outcomes) {
      int codes = kCodes, first = 0;  // that are left, and the first of them
      for (int i = 0; i < step; ++i) {
        codes /= 2;
        if (outcomes >> i & 1) first += codes;
      }
      if (step < 8) {
        tables_.search[(1 << step) + outcomes] = tables_.midpoints[first + codes / 2 - 1];
        tables_.border_search[(1 << step) + outcomes] = upper_half(first + codes / 2 - 1);
      } else {
        for (int byte = 0; byte < 4; ++byte) {
          tables_.border_planes[byte][outcomes] = static_cast<uint8_t>(signed_key(first) >> (8 * byte));
        }
        tables_.code_below[outcomes] = tables_.border_codes[first];
        tables_.code_above[outcomes] = tables_.border_codes[std::min(first + 1, kMidpoints)];
      }
    }
  }
}

void Table::FillPlanes() {
  for (int byte = 0; byte < 4; ++byte) {
    for (int i = 0; i < kCodes; ++i) {
      tables_.planes[byte][i] = static_cast<uint8_t>(ToBits(tables_.values[i]) >> (8 * byte));
    }
  }
}

bool Table::Holds(const float* values) const { return memcmp(tables_.values, values, sizeof(tables_.values)) == 0; }

void Table::EncodeBlock(const float* x, int64_t elements, float absmax, uint8_t* codes, const void* next) const {
  if (IsCodable(absmax)) {
    loops_.encode(tables_, x, ScaleOf(absmax), elements, codes, next);
  } else {
    memset(codes, zero_code_, elements);
  }
}

template <typename T>
void Quantize(const Table& table, const T* x, int64_t elements, int64_t block_size, uint8_t* codes, float* absmax,
              const ParallelFor& parallel_for) {
  const Tiles tiles(WholeTensor(elements), block_size);
  const auto load = [&](const Tile& tile, float* scratch) {
    return ToFloat(table.loops(), x + tile.begin, tile.elements, scratch);
  };
  EncodeTiles<T>(table, {x}, tiles, kTile * kNanosecondsPerElement, parallel_for, load, codes,
                 reinterpret_cast<uint8_t*>(absmax));
}

template <typename T>
void Dequantize(const Table& table, const uint8_t* codes, const float* absmax, int64_t elements, int64_t block_size,
                T* x, const ParallelFor& parallel_for) {
  const Tiles tiles(WholeTensor(elements), block_size);
  DecodeTiles<T>(table, tiles, parallel_for, codes, reinterpret_cast<const uint8_t*>(absmax), 1.0f, {x});
}

template <typename T>
void Pack(const Table& table, const Layout& layout, const std::vector<const T*>& tensors, int64_t rank,
          uint8_t* messages, const ParallelFor& parallel_for) {
  std::vector<Run> runs;
  for (int64_t chunk = 0; chunk < layout.ranks; ++chunk) {
    if (chunk != rank) AppendChunk(layout, chunk, chunk * layout.chunk_bytes, &runs);
  }
  for (int64_t chunk = 0; chunk < layout.ranks; ++chunk) {
    ClearUnused(layout, chunk, chunk == rank, messages + chunk * layout.chunk_bytes);
  }
  const auto load = [&](const Tile& tile, float* scratch) {
    return ToFloat(table.loops(), tensors[tile.run->tensor] + tile.begin, tile.elements, scratch);
  };
  EncodeTiles(table, tensors, Tiles(std::move(runs), layout.block_size), kTile * kNanosecondsPerElement, parallel_for,
              load, messages, messages);
}

template <typename T>
void Reduce(const Table& table, const Layout& layout, const std::vector<const T*>& tensors, int64_t rank,
            const uint8_t* received, uint8_t* message, const ParallelFor& parallel_for) {
  std::vector<Run> runs;
  AppendChunk(layout, rank, 0, &runs);
  ClearUnused(layout, rank, false, message);
  const float inverse_ranks = 1.0f / static_cast<float>(layout.ranks);
  // The mean is taken from a sum that begins with 0: without that, zeros may have another sign, but no other code.
  const auto load = [&](const Tile& tile, float* scratch) {
    const Loops& loops = table.loops();
    const T* own = tensors[tile.run->tensor] + tile.begin;
    const float* sum = nullptr;
    for (int64_t r = 0; r < layout.ranks; ++r) {
      const float factor = r + 1 == layout.ranks ? inverse_ranks : 1.0f;
      const uint8_t* codes = received + r * layout.chunk_bytes + tile.code;
      const uint8_t* absmax = received + r * layout.chunk_bytes + tile.absmax;
      if (r == rank && r == 0) {
        sum = ToFloat(loops, own, tile.elements, scratch);
        continue;
      }
      if (r == rank) {
        alignas(64) float own_scratch[kTile];
        loops.add(sum, ToFloat(loops, own, tile.elements, own_scratch), factor, tile.elements, scratch);
      } else if (r > 0) {
        loops.add_decoded(table.tables(), sum, codes, LoadAbsmax(absmax), factor, tile.elements, scratch);
      } else {
        loops.decode(table.tables(), codes, LoadAbsmax(absmax), factor, tile.elements, scratch);
      }
      sum = scratch;
    }
    return sum;
  };
  EncodeTiles(table, tensors, Tiles(std::move(runs), layout.block_size), layout.ranks * kTile * kNanosecondsPerElement,
              parallel_for, load, message, message);
}

template <typename T>
void Unpack(const Table& table, const Layout& layout, const uint8_t* gathered, float scale,
            const std::vector<T*>& tensors, const ParallelFor& parallel_for) {
  std::vector<Run> runs;
  for (int64_t chunk = 0; chunk < layout.ranks; ++chunk) {
    AppendChunk(layout, chunk, chunk * layout.chunk_bytes, &runs);
  }
  DecodeTiles(table, Tiles(std::move(runs), layout.block_size), parallel_for, gathered, gathered, scale, tensors);
}

#define EIGHTBIT_INSTANTIATE(T)                                                                                      \
  template void Quantize(const Table&, const T*, int64_t, int64_t, uint8_t*, float*, const ParallelFor&);            \
  template void Dequantize(const Table&, const uint8_t*, const float*, int64_t, int64_t, T*, const ParallelFor&);    \
  template void Pack(const Table&, const Layout&, const std::vector<const T*>&, int64_t, uint8_t*,                   \
                     const ParallelFor&);                                                                            \
  template void Reduce(const Table&, const Layout&, const std::vector<const T*>&, int64_t, const uint8_t*, uint8_t*, \
                       const ParallelFor&);                                                                          \
  template void Unpack(const Table&, const Layout&, const uint8_t*, float, const std::vector<T*>&, const ParallelFor&);

EIGHTBIT_INSTANTIATE(Eigen::half)
EIGHTBIT_INSTANTIATE(Eigen::bfloat16)
EIGHTBIT_INSTANTIATE(float)
EIGHTBIT_INSTANTIATE(double)

}  // namespace cpu
}  // namespace hvd_eightbit

const char* eightbit_cpu_instruction_set() {
  return hvd_eightbit::cpu::NameOf(hvd_eightbit::cpu::BestInstructionSet());
}
