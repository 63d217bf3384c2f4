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

// Loops that vectorise are compiled for several instruction sets, one of which is chosen when the library is loaded.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__)
#define EIGHTBIT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EIGHTBIT_CLONES
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

EIGHTBIT_CLONES uint32_t MaxMagnitudeBits(const float* x, int64_t elements) {
  uint32_t result = 0;
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t bits = MagnitudeBits(x[i]);
    result = bits > result ? bits : result;
  }
  return result;
}

EIGHTBIT_CLONES void DecodeTo(const float* values, const uint8_t* codes, float absmax, int64_t elements, float* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] = Decode(values, codes[i], absmax);
}

EIGHTBIT_CLONES void AddDecoded(const float* values, const uint8_t* codes, float absmax, int64_t elements, float* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] += Decode(values, codes[i], absmax);
}

EIGHTBIT_CLONES void Add(const float* y, int64_t elements, float* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] += y[i];
}

EIGHTBIT_CLONES void Multiply(float factor, int64_t elements, float* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] *= factor;
}

#if defined(__x86_64__) && defined(__GNUC__)
bool HasAvx512() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }

// Encode of codec.h for 16 elements at a time. After each of its 8 steps, `code` holds the bits of the codes so far;
// the midpoints that the next step may look at, twice as many each time, are in one register, then 2, 4 and 8.
__attribute__((target("avx512f,avx512bw"))) void EncodeAvx512(const float* levels, const float* x, int64_t elements,
                                                              BlockScale scale, uint8_t* codes) {
  constexpr int kLevel = kCodes / 2;
  const auto table = [levels](int level, int part) __attribute__((target("avx512f,avx512bw"))) {
    return _mm512_load_ps(levels + level * kLevel + part * 16);
  };
  const __m512 level0 = _mm512_set1_ps(levels[0]);
  const __m512 level1 = table(1, 0), level2 = table(2, 0), level3 = table(3, 0), level4 = table(4, 0);
  const __m512 level5[2] = {table(5, 0), table(5, 1)};
  const __m512 level6[4] = {table(6, 0), table(6, 1), table(6, 2), table(6, 3)};
  const __m512 level7[8] = {table(7, 0), table(7, 1), table(7, 2), table(7, 3),
                            table(7, 4), table(7, 5), table(7, 6), table(7, 7)};
  const __m512 raise = _mm512_set1_ps(scale.raise), inverse = _mm512_set1_ps(scale.inverse);
  const __m512i one = _mm512_set1_epi32(1), bit5 = _mm512_set1_epi32(32), bit6 = _mm512_set1_epi32(64);

  const auto encode = [&](__m512 x) __attribute__((target("avx512f,avx512bw"))) {
    const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(x, raise), inverse);
    __m512i code = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(level0, scaled, _CMP_LT_OQ), one);
    const auto step = [&](__m512 midpoint) __attribute__((target("avx512f,avx512bw"))) {
      const __mmask16 above = _mm512_cmp_ps_mask(midpoint, scaled, _CMP_LT_OQ);
      code = _mm512_add_epi32(code, code);
      code = _mm512_mask_add_epi32(code, above, code, one);
    };
    step(_mm512_permutexvar_ps(code, level1));
    step(_mm512_permutexvar_ps(code, level2));
    step(_mm512_permutexvar_ps(code, level3));
    step(_mm512_permutexvar_ps(code, level4));
    step(_mm512_permutex2var_ps(level5[0], code, level5[1]));
    step(_mm512_mask_blend_ps(_mm512_test_epi32_mask(code, bit5), _mm512_permutex2var_ps(level6[0], code, level6[1]),
                              _mm512_permutex2var_ps(level6[2], code, level6[3])));
    const __mmask16 odd = _mm512_test_epi32_mask(code, bit5);
    step(_mm512_mask_blend_ps(_mm512_test_epi32_mask(code, bit6),
                              _mm512_mask_blend_ps(odd, _mm512_permutex2var_ps(level7[0], code, level7[1]),
                                                   _mm512_permutex2var_ps(level7[2], code, level7[3])),
                              _mm512_mask_blend_ps(odd, _mm512_permutex2var_ps(level7[4], code, level7[5]),
                                                   _mm512_permutex2var_ps(level7[6], code, level7[7]))));
    return _mm512_cvtepi32_epi8(code);
  };

  int64_t i = 0;
  for (; i + 16 <= elements; i += 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), encode(_mm512_loadu_ps(x + i)));
  }
  if (i < elements) {
    const __mmask16 rest = (1u << (elements - i)) - 1;
    alignas(16) uint8_t last[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(last), encode(_mm512_maskz_loadu_ps(rest, x + i)));
    memcpy(codes + i, last, elements - i);
  }
}
#else
bool HasAvx512() { return false; }
void EncodeAvx512(const float*, const float*, int64_t, BlockScale, uint8_t*) {}
#endif

// float32 elements are read and written where they are, others through a tile.
const float* ToFloat(const float* x, int64_t, float*) { return x; }

template <typename T>
const float* ToFloat(const T* x, int64_t elements, float* tile) {
  for (int64_t i = 0; i < elements; ++i) tile[i] = static_cast<float>(x[i]);
  return tile;
}

template <typename T>
void FromFloat(const float* tile, int64_t elements, T* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] = static_cast<T>(tile[i]);
}

void FromFloat(const float* tile, int64_t elements, float* x) {
  if (tile != x) memcpy(x, tile, elements * sizeof(float));
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

// Codes every tile. load(tile, scratch) returns its elements as float32, in scratch or wherever they are.
template <typename Load>
void EncodeTiles(const Table& table, const Tiles& tiles, int64_t cost, const ParallelFor& parallel_for,
                 const Load& load, uint8_t* codes, uint8_t* absmax) {
  if (tiles.blocks_are_tiles()) {
    parallel_for(tiles.count(), cost, [&](int64_t begin, int64_t end) {
      KeepSubnormals keep;
      float scratch[kTile];
      tiles.ForEach(begin, end, [&](int64_t, const Tile& tile) {
        const float* x = load(tile, scratch);
        const float block_absmax = AbsmaxFromBits(MaxMagnitudeBits(x, tile.elements));
        StoreAbsmax(block_absmax, absmax + tile.absmax);
        table.EncodeBlock(x, tile.elements, block_absmax, codes + tile.code);
      });
    });
    return;
  }
  // The absmax of a block of many tiles is known when all of them have been seen: they are loaded a second time.
  std::vector<uint32_t> tile_bits(tiles.count());
  parallel_for(tiles.count(), cost, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    float scratch[kTile];
    tiles.ForEach(begin, end, [&](int64_t i, const Tile& tile) {
      tile_bits[i] = ToBits(AbsmaxFromBits(MaxMagnitudeBits(load(tile, scratch), tile.elements)));
    });
  });
  tiles.ForEach(0, tiles.count(), [&](int64_t i, const Tile& tile) {
    const uint32_t so_far = tile.opens_block ? 0 : ToBits(LoadAbsmax(absmax + tile.absmax));
    StoreAbsmax(FromBits(std::max(so_far, tile_bits[i])), absmax + tile.absmax);
  });
  parallel_for(tiles.count(), cost, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    float scratch[kTile];
    tiles.ForEach(begin, end, [&](int64_t, const Tile& tile) {
      table.EncodeBlock(load(tile, scratch), tile.elements, LoadAbsmax(absmax + tile.absmax), codes + tile.code);
    });
  });
}

// Decodes every tile into its tensor, times scale.
template <typename T>
void DecodeTiles(const Table& table, const Tiles& tiles, const ParallelFor& parallel_for, const uint8_t* codes,
                 const uint8_t* absmax, float scale, const std::vector<T*>& tensors) {
  parallel_for(tiles.count(), kTile * kNanosecondsPerElement, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    float scratch[kTile];
    tiles.ForEach(begin, end, [&](int64_t, const Tile& tile) {
      T* x = tensors[tile.run->tensor] + tile.begin;
      float* decoded = std::is_same<T, float>::value ? reinterpret_cast<float*>(x) : scratch;
      DecodeTo(table.values(), codes + tile.code, LoadAbsmax(absmax + tile.absmax), tile.elements, decoded);
      if (scale != 1.0f) Multiply(scale, tile.elements, decoded);
      FromFloat(decoded, tile.elements, x);
    });
  });
}

}  // namespace

Table::Table(const float* values, Coding coding) : coding_(coding) {
  KeepSubnormals keep;
  std::copy_n(values, kCodes, values_);
  for (int i = 0; i < kMidpoints; ++i) midpoints_[i] = Midpoint(values_, i);
  zero_code_ = Encode(midpoints_, 0.0f);
  if (coding_ == Coding::kBest) coding_ = HasAvx512() ? Coding::kAvx512 : Coding::kBuckets;
  if (coding_ == Coding::kAvx512) {
    if (HasAvx512()) {
      FillLevels();
    } else {
      coding_ = Coding::kSearch;
    }
  }
  if (coding_ == Coding::kBuckets && !FillBuckets()) coding_ = Coding::kSearch;
}

void Table::FillLevels() {
  for (int level = 0; level < kLevels; ++level) {
    for (int i = 0; i < kCodes / 2; ++i) {
      const int codes = kCodes >> level;  // that are still possible
      levels_[level][i] = i < 1 << level ? midpoints_[i * codes + codes / 2 - 1] : 0.0f;
    }
  }
}

// Whether no bucket has more than one border.
bool Table::FillBuckets() {
  // borders_[j] is a midpoint, border_codes_[j] the code of what lies above j borders. Midpoints that are equal
  // (between equal values) are one border.
  int borders = 0;
  border_codes_[0] = 0;
  for (int i = 0; i < kMidpoints; ++i) {
    if (borders == 0 || midpoints_[i] != borders_[borders - 1]) borders_[borders++] = midpoints_[i];
    border_codes_[borders] = static_cast<uint8_t>(i + 1);
  }
  std::fill(borders_ + borders, borders_ + kMidpoints + 1, std::numeric_limits<float>::infinity());

  // A bucket holds the floats that share their upper 16 bits; those of negative ones grow downwards.
  for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
    const float inner = FromBits(bucket << 16), outer = FromBits(bucket << 16 | 0xffffu);
    first_border_[bucket] = 0;
    if (std::isnan(inner) || std::isnan(outer)) continue;
    const float* lowest = std::lower_bound(borders_, borders_ + borders, std::min(inner, outer));
    const float* highest = std::lower_bound(borders_, borders_ + borders, std::max(inner, outer));
    if (highest - lowest > 1) return false;
    first_border_[bucket] = static_cast<uint8_t>(lowest - borders_);
  }
  return true;
}

bool Table::Holds(const float* values) const { return memcmp(values_, values, sizeof(values_)) == 0; }

void Table::EncodeBlock(const float* x, int64_t elements, float absmax, uint8_t* codes) const {
  if (!IsCodable(absmax)) {
    memset(codes, zero_code_, elements);
    return;
  }
  const BlockScale scale = ScaleOf(absmax);
  switch (coding_) {
    case Coding::kAvx512:
      EncodeAvx512(levels_[0], x, elements, scale, codes);
      break;
    case Coding::kBuckets:
      for (int64_t i = 0; i < elements; ++i) {
        const float scaled = Scaled(x[i], scale);
        const uint32_t border = first_border_[ToBits(scaled) >> 16];
        codes[i] = border_codes_[border + (borders_[border] < scaled)];
      }
      break;
    default:
      for (int64_t i = 0; i < elements; ++i) codes[i] = Encode(midpoints_, Scaled(x[i], scale));
  }
}

template <typename T>
void Quantize(const Table& table, const T* x, int64_t elements, int64_t block_size, uint8_t* codes, float* absmax,
              const ParallelFor& parallel_for) {
  const Tiles tiles(WholeTensor(elements), block_size);
  const auto load = [x](const Tile& tile, float* scratch) { return ToFloat(x + tile.begin, tile.elements, scratch); };
  EncodeTiles(table, tiles, kTile * kNanosecondsPerElement, parallel_for, load, codes,
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
  memset(messages, 0, layout.ranks * layout.chunk_bytes);
  const auto load = [&tensors](const Tile& tile, float* scratch) {
    return ToFloat(tensors[tile.run->tensor] + tile.begin, tile.elements, scratch);
  };
  EncodeTiles(table, Tiles(std::move(runs), layout.block_size), kTile * kNanosecondsPerElement, parallel_for, load,
              messages, messages);
}

template <typename T>
void Reduce(const Table& table, const Layout& layout, const std::vector<const T*>& tensors, int64_t rank,
            const uint8_t* received, uint8_t* message, const ParallelFor& parallel_for) {
  std::vector<Run> runs;
  AppendChunk(layout, rank, 0, &runs);
  memset(message, 0, layout.chunk_bytes);
  const float inverse_ranks = 1.0f / static_cast<float>(layout.ranks);
  const auto load = [&](const Tile& tile, float* sum) {
    std::fill_n(sum, tile.elements, 0.0f);
    for (int64_t r = 0; r < layout.ranks; ++r) {
      if (r == rank) {
        float scratch[kTile];
        Add(ToFloat(tensors[tile.run->tensor] + tile.begin, tile.elements, scratch), tile.elements, sum);
      } else {
        const uint8_t* from = received + r * layout.chunk_bytes;
        AddDecoded(table.values(), from + tile.code, LoadAbsmax(from + tile.absmax), tile.elements, sum);
      }
    }
    Multiply(inverse_ranks, tile.elements, sum);
    return static_cast<const float*>(sum);
  };
  EncodeTiles(table, Tiles(std::move(runs), layout.block_size), layout.ranks * kTile * kNanosecondsPerElement,
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
