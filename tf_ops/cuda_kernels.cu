// The same codec as cpu_kernels.cc, bit for bit. Compile with --fmad=false (see codec.h).
//
// A block of threads works on one tile, at most kTile elements of one codec block, at a time. Where a codec block is no
// larger than a tile, one kernel does all: a tile is read once, into registers, its absmax is found, and it is coded.
// Larger codec blocks (block_size=None) take two passes, the first of which collects absmax by an atomic maximum of
// integers, which does not depend on order.

#include "cuda_kernels.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "codec.h"
#include "wire.h"

#ifdef HVD_EIGHTBIT_CUDA_EMULATION  // tests/cuda_emulation: the same source, executed without a GPU
#include "cuda_emulation.h"
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define EIGHTBIT_LAUNCH(kernel, grid, threads, stream, ...) kernel<<<grid, threads, 0, stream>>>(__VA_ARGS__)
#define EIGHTBIT_CHECK_ALIGNED(pointer, bytes)
#endif

namespace hvd_eightbit {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kTile = 4096;
constexpr int kPerThread = kTile / kThreads;
constexpr int kBlocksPerProcessor = 8;

// ---- Elements: 16 bytes of them at a time where they are aligned --------------------------------------------------

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(double x) { return static_cast<float>(x); }
__device__ __forceinline__ float ToFloat(Half x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ __forceinline__ float ToFloat(Bfloat16 x) { return FromBits(static_cast<uint32_t>(x.bits) << 16); }

__device__ __forceinline__ void FromFloat(float x, float* to) { *to = x; }
__device__ __forceinline__ void FromFloat(float x, double* to) { *to = x; }
__device__ __forceinline__ void FromFloat(float x, Half* to) { to->bits = __half_as_ushort(__float2half_rn(x)); }
__device__ __forceinline__ void FromFloat(float x, Bfloat16* to) {
  const uint32_t bits = ToBits(x);
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);  // to nearest, ties to even
  to->bits = static_cast<uint16_t>(MagnitudeBits(x) > kInfinityBits ? kNaNBits >> 16 : rounded >> 16);
}

// The type of one wide access of that many bytes.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

template <typename T, int kCount>
using Word = typename WordOf<sizeof(T) * kCount>::Type;

// Elements in 16 bytes.
template <typename T>
constexpr int kVector = 16 / sizeof(T);

// Whether kCount elements from this address on can be accessed as one word.
template <int kCount, typename T>
__device__ __forceinline__ bool IsAligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Word<T, kCount>) == 0;
}

// Elements [0, count) of `from`, at most kCount; what is beyond is left as it is.
template <int kCount, typename T>
__device__ __forceinline__ void LoadSome(const T* from, int64_t count, bool aligned, T* to) {
  if (aligned && count >= kCount) {
    EIGHTBIT_CHECK_ALIGNED(from, sizeof(Word<T, kCount>));
    const Word<T, kCount> word = *reinterpret_cast<const Word<T, kCount>*>(from);
    memcpy(to, &word, sizeof(word));
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) to[i] = from[i];
    }
  }
}

template <int kCount, typename T>
__device__ __forceinline__ void StoreSome(const T* from, int64_t count, bool aligned, T* to) {
  if (aligned && count >= kCount) {
    EIGHTBIT_CHECK_ALIGNED(to, sizeof(Word<T, kCount>));
    Word<T, kCount> word;
    memcpy(&word, from, sizeof(word));
    __stcg(reinterpret_cast<Word<T, kCount>*>(to), word);  // the compiler takes an ordinary store of a word apart
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) to[i] = from[i];
    }
  }
}

// ---- What is to be done: runs, blocks, tiles -----------------------------------------------------------------------

// A run of consecutive elements of one tensor, cut into codec blocks, and where its codes and absmax values are.
struct Run {
  void* x;  // its first element
  int64_t elements;
  int64_t code;    // bytes from the base of all codes
  int64_t absmax;  // bytes from the base of all absmax values
  int64_t first_tile;
};

// Kernel parameters have 4 KiB in all.
constexpr int kMaxRuns = 96;

struct Job {
  Run runs[kMaxRuns];
  int run_count;
  int64_t block_size;  // 0: one block a run
  int64_t tiles;
};

// A tile: elements of one codec block.
struct Tile {
  const Run* run;
  int64_t begin;  // within the run
  int elements;
  int64_t code;
  int64_t absmax;
};

__host__ __device__ __forceinline__ int64_t BlockSize(const Job& job, const Run& run) {
  return job.block_size == 0 ? run.elements : job.block_size;
}

__device__ __forceinline__ Tile TileAt(const Job& job, int64_t tile) {
  int low = 0, high = job.run_count - 1;
  while (low < high) {  // the last run that starts at this tile or before
    const int middle = (low + high + 1) / 2;
    if (job.runs[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Run& run = job.runs[low];
  const int64_t block_size = BlockSize(job, run), tiles_per_block = (block_size + kTile - 1) / kTile;
  const int64_t block = (tile - run.first_tile) / tiles_per_block;
  const int64_t begin = block * block_size + (tile - run.first_tile) % tiles_per_block * kTile;
  int64_t end = begin + kTile;
  if (end > (block + 1) * block_size) end = (block + 1) * block_size;
  if (end > run.elements) end = run.elements;
  return {&run, begin, static_cast<int>(end - begin), run.code + begin, run.absmax + kAbsmaxBytes * block};
}

// ---- The table in shared memory ------------------------------------------------------------------------------------

// Instead of all 8 steps of Encode: the sign, the exponent and kMantissaBits of the scaled element lead to the first
// code of their bucket, from which few steps remain (2 for the dynamic tree and the linear type).
constexpr int kMantissaBits = 4;
constexpr int kShift = 23 - kMantissaBits;
constexpr int kLowest = (127 - 32) << kMantissaBits;  // magnitudes below 2^-32 share the first bucket
constexpr int kBuckets = (32 << kMantissaBits) + 1;   // the last holds 1

struct EncodeTable {
  float midpoints[2 * kCodes];  // infinity from kMidpoints on
  uint8_t first[2 * kBuckets];  // of positive, then of negative numbers
  int steps;
};

__device__ __forceinline__ float BucketStart(int bucket) {
  return bucket == 0 ? 0.0f : FromBits(static_cast<uint32_t>(bucket + kLowest) << kShift);
}

__device__ __forceinline__ float BucketEnd(int bucket) {
  return FromBits((static_cast<uint32_t>(bucket + 1 + kLowest) << kShift) - 1);
}

// By all threads of a block together.
__device__ void Build(const float* values, EncodeTable* table) {
  for (int i = threadIdx.x; i < 2 * kCodes; i += kThreads) {
    table->midpoints[i] = i < kMidpoints ? Midpoint(values, i) : FromBits(kInfinityBits);
  }
  if (threadIdx.x == 0) table->steps = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * kBuckets; i += kThreads) {
    const bool negative = i >= kBuckets;
    const int bucket = negative ? i - kBuckets : i;
    const float lowest = negative ? -BucketEnd(bucket) : BucketStart(bucket);
    const float highest = negative ? -BucketStart(bucket) : BucketEnd(bucket);
    const int first = Encode(table->midpoints, lowest);
    int steps = 0;
    while (first + (1 << steps) - 1 < Encode(table->midpoints, highest)) ++steps;
    table->first[i] = static_cast<uint8_t>(first);
    atomicMax(&table->steps, steps);
  }
  __syncthreads();
}

__device__ __forceinline__ uint8_t EncodeFast(const EncodeTable& table, int steps, float scaled) {
  int bucket = static_cast<int>(MagnitudeBits(scaled) >> kShift) - kLowest;
  bucket = bucket < 0 ? 0 : bucket;
  int code = table.first[scaled < 0.0f ? bucket + kBuckets : bucket];
  for (int step = 1 << steps >> 1; step > 0; step >>= 1) {
    if (table.midpoints[code + step - 1] < scaled) code += step;
  }
  return static_cast<uint8_t>(code);
}

// ---- Coding --------------------------------------------------------------------------------------------------------

// Calls work(i, offset, count) for each part of a tile that this thread has: kCount elements from `offset` on, of which
// `count` are in the tile, kept in registers i to i + kCount - 1.
template <int kCount, typename Work>
__device__ __forceinline__ void ForEachPart(int elements, const Work& work) {
#pragma unroll
  for (int i = 0; i < kPerThread; i += kCount) {
    const int offset = i * kThreads + static_cast<int>(threadIdx.x) * kCount;
    if (offset < elements) work(i, offset, elements - offset);
  }
}

// Where the elements of a tile come from: a tensor ...
template <typename T>
struct FromTensor {
  static constexpr int kCount = kVector<T>;

  __device__ __forceinline__ void Load(const Tile& tile, float* x) const {
    const T* from = static_cast<const T*>(tile.run->x) + tile.begin;
    const bool aligned = IsAligned<kCount>(from);
    ForEachPart<kCount>(tile.elements, [&](int i, int offset, int count) {
      T part[kCount];
      LoadSome<kCount>(from + offset, count, aligned, part);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j < count) x[i + j] = ToFloat(part[j]);
      }
    });
  }
};

// ... or all ranks: the mean of what they sent, with the own contribution exact.
template <typename T>
struct FromRanks {
  static constexpr int kCount = kVector<T>;

  const uint8_t* received;
  int64_t ranks;
  int64_t rank;
  int64_t chunk_bytes;
  float inverse_ranks;
  const float* values;  // set by the kernel, to its shared memory

  __device__ __forceinline__ void Load(const Tile& tile, float* x) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) x[i] = 0.0f;
    for (int64_t r = 0; r < ranks; ++r) {
      if (r == rank) {
        float own[kPerThread];
        FromTensor<T>{}.Load(tile, own);
        ForEachPart<kCount>(tile.elements, [&](int i, int, int count) {
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            if (j < count) x[i + j] = x[i + j] + own[i + j];
          }
        });
      } else {
        const uint8_t* message = received + r * chunk_bytes;
        const uint8_t* codes = message + tile.code;
        const float absmax = *reinterpret_cast<const float*>(message + tile.absmax);
        const bool aligned = IsAligned<kCount>(codes);
        ForEachPart<kCount>(tile.elements, [&](int i, int offset, int count) {
          uint8_t part[kCount];
          LoadSome<kCount>(codes + offset, count, aligned, part);
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            if (j < count) x[i + j] = x[i + j] + Decode(values, part[j], absmax);
          }
        });
      }
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) x[i] = Mean(x[i], inverse_ranks);
  }
};

template <typename T>
__device__ __forceinline__ void UseValues(const float*, FromTensor<T>*) {}
template <typename T>
__device__ __forceinline__ void UseValues(const float* values, FromRanks<T>* from) {
  from->values = values;
}

// The maximum over a block of threads, given to all of them. `shared` has an element for each warp.
__device__ __forceinline__ uint32_t BlockMax(uint32_t x, uint32_t* shared) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, lanes);
    x = other > x ? other : x;
  }
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  uint32_t result = shared[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) result = shared[warp] > result ? shared[warp] : result;
  __syncthreads();  // before the next call writes to `shared`
  return result;
}

enum class Pass { kWhole, kAbsmax, kCodes };

template <Pass kPass, typename From>
__global__ void __launch_bounds__(kThreads)
    EncodeKernel(const __grid_constant__ Job job, const float* values, From from, uint8_t* codes, uint8_t* absmax) {
  __shared__ float shared_values[kCodes];
  __shared__ EncodeTable table;
  __shared__ uint32_t shared_max[kThreads / kWarp];
  for (int i = threadIdx.x; i < kCodes; i += kThreads) shared_values[i] = values[i];
  __syncthreads();
  UseValues(shared_values, &from);
  int steps = 0;
  uint8_t zero_code = 0;
  if (kPass != Pass::kAbsmax) {
    Build(shared_values, &table);
    steps = table.steps;
    zero_code = Encode(table.midpoints, 0.0f);
  }

  for (int64_t i = blockIdx.x; i < job.tiles; i += gridDim.x) {
    const Tile tile = TileAt(job, i);
    float* tile_absmax = reinterpret_cast<float*>(absmax + tile.absmax);
    float x[kPerThread];
    from.Load(tile, x);

    float block_absmax;
    if (kPass == Pass::kCodes) {
      block_absmax = *tile_absmax;
    } else {
      uint32_t bits = 0;
      ForEachPart<From::kCount>(tile.elements, [&](int k, int, int count) {
#pragma unroll
        for (int j = 0; j < From::kCount; ++j) {
          if (j < count && MagnitudeBits(x[k + j]) > bits) bits = MagnitudeBits(x[k + j]);
        }
      });
      block_absmax = AbsmaxFromBits(BlockMax(bits, shared_max));
      if (threadIdx.x == 0) {
        if (kPass == Pass::kWhole) {
          *tile_absmax = block_absmax;
        } else {
          atomicMax(reinterpret_cast<unsigned int*>(tile_absmax), ToBits(block_absmax));
        }
      }
    }
    if (kPass == Pass::kAbsmax) continue;

    const bool codable = IsCodable(block_absmax);
    const BlockScale scale = ScaleOf(codable ? block_absmax : 1.0f);
    const bool aligned = IsAligned<From::kCount>(codes + tile.code);
    ForEachPart<From::kCount>(tile.elements, [&](int k, int offset, int count) {
      uint8_t part[From::kCount];
#pragma unroll
      for (int j = 0; j < From::kCount; ++j) {
        part[j] = codable && j < count ? EncodeFast(table, steps, Scaled(x[k + j], scale)) : zero_code;
      }
      StoreSome<From::kCount>(part, count, aligned, codes + tile.code + offset);
    });
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) DecodeKernel(const __grid_constant__ Job job, const float* values,
                                                         const uint8_t* codes, const uint8_t* absmax, float scale) {
  constexpr int kCount = kVector<T>;
  __shared__ float shared_values[kCodes];
  for (int i = threadIdx.x; i < kCodes; i += kThreads) shared_values[i] = values[i];
  __syncthreads();
  for (int64_t i = blockIdx.x; i < job.tiles; i += gridDim.x) {
    const Tile tile = TileAt(job, i);
    const float tile_absmax = *reinterpret_cast<const float*>(absmax + tile.absmax);
    const uint8_t* from = codes + tile.code;
    T* to = static_cast<T*>(tile.run->x) + tile.begin;
    const bool codes_aligned = IsAligned<kCount>(from), aligned = IsAligned<kCount>(to);
    ForEachPart<kCount>(tile.elements, [&](int, int offset, int count) {
      uint8_t part[kCount];
      T decoded[kCount];
      LoadSome<kCount>(from + offset, count, codes_aligned, part);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        if (j < count) FromFloat(Decode(shared_values, part[j], tile_absmax) * scale, &decoded[j]);
      }
      StoreSome<kCount>(decoded, count, aligned, to + offset);
    });
  }
}

// ---- Host side -----------------------------------------------------------------------------------------------------

// Several blocks of threads a processor, each with many tiles, so that a table is built once for all of them.
int Grid(int64_t tiles) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return static_cast<int>(std::min<int64_t>(tiles, static_cast<int64_t>(processors) * kBlocksPerProcessor));
}

// Cuts runs into jobs that fit into kernel parameters, and calls launch(job, grid) for each.
template <typename Launch>
int ForEachJob(const std::vector<Run>& runs, int64_t block_size, const Launch& launch) {
  for (size_t first = 0; first < runs.size(); first += kMaxRuns) {
    Job job;
    job.block_size = block_size;
    job.run_count = static_cast<int>(std::min<size_t>(kMaxRuns, runs.size() - first));
    job.tiles = 0;
    for (int i = 0; i < job.run_count; ++i) {
      Run& run = job.runs[i] = runs[first + i];
      run.first_tile = job.tiles;
      const int64_t block = BlockSize(job, run), whole_blocks = run.elements / block;
      job.tiles += whole_blocks * CeilDiv(block, kTile) + CeilDiv(run.elements % block, kTile);
    }
    launch(job, Grid(job.tiles));
    const int error = static_cast<int>(cudaGetLastError());
    if (error != 0) return error;
  }
  return 0;
}

template <typename From>
int EncodeRuns(const std::vector<Run>& runs, int64_t block_size, const float* values, const From& from, uint8_t* codes,
               uint8_t* absmax, cudaStream_t stream) {
  if (block_size != 0 && block_size <= kTile) {
    return ForEachJob(runs, block_size, [&](const Job& job, int grid) {
      EIGHTBIT_LAUNCH((EncodeKernel<Pass::kWhole, From>), grid, kThreads, stream, job, values, from, codes, absmax);
    });
  }
  return ForEachJob(runs, block_size, [&](const Job& job, int grid) {
    EIGHTBIT_LAUNCH((EncodeKernel<Pass::kAbsmax, From>), grid, kThreads, stream, job, values, from, codes, absmax);
    EIGHTBIT_LAUNCH((EncodeKernel<Pass::kCodes, From>), grid, kThreads, stream, job, values, from, codes, absmax);
  });
}

std::vector<Run> WholeTensor(void* x, int64_t elements) {
  if (elements == 0) return {};
  return {{x, elements, 0, 0, 0}};
}

// Appends the runs of one chunk, whose message begins `message` bytes from the base.
template <typename T>
void AppendChunk(const Layout& layout, int64_t chunk, int64_t message, const void* const* tensors,
                 std::vector<Run>* runs) {
  for (const Segment& segment : layout.chunks[chunk]) {
    T* x = static_cast<T*>(const_cast<void*>(tensors[segment.tensor])) + segment.begin;
    runs->push_back({x, segment.elements, message + segment.code,
                     message + layout.chunk_elements + kAbsmaxBytes * segment.block, 0});
  }
}

// Zeros all of a chunk's message but its codes: absmax values, which may be collected by a maximum, and the unused
// rest.
int ClearMessage(const Layout& layout, int64_t chunk, uint8_t* message, cudaStream_t stream) {
  const std::vector<Segment>& segments = layout.chunks[chunk];
  const int64_t codes = segments.empty() ? 0 : segments.back().code + segments.back().elements;
  return static_cast<int>(cudaMemsetAsync(message + codes, 0, layout.chunk_bytes - codes, stream));
}

// Calls f with a null pointer of the element type.
template <typename F>
int WithType(EightBitKind kind, const F& f) {
  switch (kind) {
    case kEightBitHalf:
      return f(static_cast<Half*>(nullptr));
    case kEightBitBfloat16:
      return f(static_cast<Bfloat16*>(nullptr));
    case kEightBitFloat:
      return f(static_cast<float*>(nullptr));
    case kEightBitDouble:
      return f(static_cast<double*>(nullptr));
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

Layout LayoutOf(const int64_t* sizes, int64_t count, int64_t ranks, int64_t block_size) {
  return Layout(std::vector<int64_t>(sizes, sizes + count), ranks, block_size);
}

}  // namespace
}  // namespace cuda
}  // namespace hvd_eightbit

using namespace hvd_eightbit;        // NOLINT: the launchers have C names
using namespace hvd_eightbit::cuda;  // NOLINT

extern "C" {

int eightbit_cuda_quantize(EightBitKind kind, const float* values, const void* x, int64_t elements, int64_t block_size,
                           uint8_t* codes, float* absmax, cudaStream_t stream) {
  return WithType(kind, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t size = Blocks(elements, block_size) * kAbsmaxBytes;
    const int error = size == 0 ? 0 : static_cast<int>(cudaMemsetAsync(absmax, 0, size, stream));
    if (error != 0) return error;
    return EncodeRuns(WholeTensor(const_cast<void*>(x), elements), block_size, values, FromTensor<T>{}, codes,
                      reinterpret_cast<uint8_t*>(absmax), stream);
  });
}

int eightbit_cuda_dequantize(EightBitKind kind, const float* values, const uint8_t* codes, const float* absmax,
                             int64_t elements, int64_t block_size, void* x, cudaStream_t stream) {
  return WithType(kind, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const uint8_t* absmax_bytes = reinterpret_cast<const uint8_t*>(absmax);
    return ForEachJob(WholeTensor(x, elements), block_size, [&](const Job& job, int grid) {
      EIGHTBIT_LAUNCH((DecodeKernel<T>), grid, kThreads, stream, job, values, codes, absmax_bytes, 1.0f);
    });
  });
}

int eightbit_cuda_pack(EightBitKind kind, const float* values, const void* const* tensors, const int64_t* sizes,
                       int64_t count, int64_t ranks, int64_t rank, int64_t block_size, uint8_t* messages,
                       cudaStream_t stream) {
  return WithType(kind, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Layout layout = LayoutOf(sizes, count, ranks, block_size);
    std::vector<Run> runs;
    for (int64_t chunk = 0; chunk < ranks; ++chunk) {
      uint8_t* message = messages + chunk * layout.chunk_bytes;
      const int error = chunk == rank ? static_cast<int>(cudaMemsetAsync(message, 0, layout.chunk_bytes, stream))
                                      : ClearMessage(layout, chunk, message, stream);
      if (error != 0) return error;
      if (chunk != rank) AppendChunk<T>(layout, chunk, chunk * layout.chunk_bytes, tensors, &runs);
    }
    return EncodeRuns(runs, block_size, values, FromTensor<T>{}, messages, messages, stream);
  });
}

int eightbit_cuda_reduce(EightBitKind kind, const float* values, const void* const* tensors, const int64_t* sizes,
                         int64_t count, int64_t ranks, int64_t rank, int64_t block_size, const uint8_t* received,
                         uint8_t* message, cudaStream_t stream) {
  return WithType(kind, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Layout layout = LayoutOf(sizes, count, ranks, block_size);
    const int error = ClearMessage(layout, rank, message, stream);
    if (error != 0) return error;
    std::vector<Run> runs;
    AppendChunk<T>(layout, rank, 0, tensors, &runs);
    FromRanks<T> from;
    from.received = received;
    from.ranks = ranks;
    from.rank = rank;
    from.chunk_bytes = layout.chunk_bytes;
    from.inverse_ranks = 1.0f / static_cast<float>(ranks);
    from.values = nullptr;
    return EncodeRuns(runs, block_size, values, from, message, message, stream);
  });
}

int eightbit_cuda_unpack(EightBitKind kind, const float* values, void* const* tensors, const int64_t* sizes,
                         int64_t count, int64_t ranks, int64_t block_size, const uint8_t* gathered, float scale,
                         cudaStream_t stream) {
  return WithType(kind, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const Layout layout = LayoutOf(sizes, count, ranks, block_size);
    std::vector<Run> runs;
    for (int64_t chunk = 0; chunk < ranks; ++chunk) {
      AppendChunk<T>(layout, chunk, chunk * layout.chunk_bytes, tensors, &runs);
    }
    return ForEachJob(runs, block_size, [&](const Job& job, int grid) {
      EIGHTBIT_LAUNCH((DecodeKernel<T>), grid, kThreads, stream, job, values, gathered, gathered, scale);
    });
  });
}

}  // extern "C"
