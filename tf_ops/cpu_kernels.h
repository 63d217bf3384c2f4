// The five kernels on the CPU: threaded, no TensorFlow headers.
//
// T is one of Eigen::half, Eigen::bfloat16, float, double. Subnormals are kept whatever the calling thread's mode is
// (TensorFlow's threads flush them to zero).

#ifndef HVD_EIGHTBIT_TF_OPS_CPU_KERNELS_H_
#define HVD_EIGHTBIT_TF_OPS_CPU_KERNELS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "codec.h"
#include "wire.h"

namespace hvd_eightbit {
namespace cpu {

// Runs work(begin, end) over [0, total) on several threads; cost is that of one unit, in nanoseconds.
using ParallelFor = std::function<void(int64_t total, int64_t cost, const std::function<void(int64_t, int64_t)>& work)>;

// Ways to find a code, all with the same result. kSearch is the definition (codec.h); kBuckets goes by the upper 16
// bits of the scaled element to the one midpoint that shares them, where a data type has no two that do; kAvx512 is the
// search with the midpoints in registers.
enum class Coding { kBest, kSearch, kBuckets, kAvx512 };

// A data type, prepared for coding.
class Table {
 public:
  // values: kCodes ascending floats. coding: kBest, unless a test asks for another.
  explicit Table(const float* values, Coding coding = Coding::kBest);

  bool Holds(const float* values) const;
  const float* values() const { return values_; }
  Coding coding() const { return coding_; }  // what is used: that asked for, or kSearch where it is not to be had

  // codes[i] = the code of x[i] / absmax.
  void EncodeBlock(const float* x, int64_t elements, float absmax, uint8_t* codes) const;

 private:
  static constexpr int kBuckets = 1 << 16;
  static constexpr int kLevels = 8;

  bool FillBuckets();
  void FillLevels();

  Coding coding_;
  float values_[kCodes];
  float midpoints_[kMidpoints];
  uint8_t zero_code_;

  // kBuckets
  float borders_[kMidpoints + 1];   // the midpoints that differ, and infinity
  uint8_t border_codes_[kCodes];    // the code above that many borders
  uint8_t first_border_[kBuckets];  // borders below all of the bucket's numbers

  // kAvx512: the midpoints by the step of the search that looks at them
  alignas(64) float levels_[kLevels][kCodes / 2];
};

// x: elements of type T. codes: as many. absmax: Blocks(elements, block_size).
template <typename T>
void Quantize(const Table& table, const T* x, int64_t elements, int64_t block_size, uint8_t* codes, float* absmax,
              const ParallelFor& parallel_for);

template <typename T>
void Dequantize(const Table& table, const uint8_t* codes, const float* absmax, int64_t elements, int64_t block_size,
                T* x, const ParallelFor& parallel_for);

// messages: ranks rows of chunk_bytes; row `rank` is filled with zeros.
template <typename T>
void Pack(const Table& table, const Layout& layout, const std::vector<const T*>& tensors, int64_t rank,
          uint8_t* messages, const ParallelFor& parallel_for);

// received: ranks rows of chunk_bytes, row `rank` not read. message: chunk_bytes.
template <typename T>
void Reduce(const Table& table, const Layout& layout, const std::vector<const T*>& tensors, int64_t rank,
            const uint8_t* received, uint8_t* message, const ParallelFor& parallel_for);

// gathered: ranks rows of chunk_bytes.
template <typename T>
void Unpack(const Table& table, const Layout& layout, const uint8_t* gathered, float scale,
            const std::vector<T*>& tensors, const ParallelFor& parallel_for);

}  // namespace cpu
}  // namespace hvd_eightbit

#endif  // HVD_EIGHTBIT_TF_OPS_CPU_KERNELS_H_
