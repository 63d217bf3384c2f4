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
#include "cpu_loops.h"
#include "wire.h"

namespace hvd_eightbit {
namespace cpu {

// Runs work(begin, end) over [0, total) on several threads; cost is that of one unit, in nanoseconds.
using ParallelFor = std::function<void(int64_t total, int64_t cost, const std::function<void(int64_t, int64_t)>& work)>;

// A data type, and the loops that code it.
class Table {
 public:
  // values: kCodes ascending floats. set: for tests, another than the best; one that this CPU has.
  explicit Table(const float* values, InstructionSet set = BestInstructionSet());

  bool Holds(const float* values) const;
  const Loops& loops() const { return loops_; }
  const CodingTables& tables() const { return tables_; }

  // codes[i] = the code of x[i] / absmax.
  void EncodeBlock(const float* x, int64_t elements, float absmax, uint8_t* codes) const;

 private:
  void FillBuckets();
  void FillSearch();
  void FillPlanes();

  Loops loops_;
  CodingTables tables_;
  uint8_t zero_code_;
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

// The name of the instruction set that the kernels use on this CPU; for programs that say what they measure.
extern "C" const char* eightbit_cpu_instruction_set();

#endif  // HVD_EIGHTBIT_TF_OPS_CPU_KERNELS_H_
