// The CPU kernels as plain C functions, for every instruction set that this CPU has; see test_cpu_kernels.py.

#include "../tf_ops/cpu_kernels.h"

#include <algorithm>

#include "Eigen/Core"

namespace {

using hvd_eightbit::Layout;
using hvd_eightbit::cpu::InstructionSet;
using hvd_eightbit::cpu::Table;

// Ranges of several sizes, last first: no kernel may depend on how its work is shared out.
void InUnevenParts(int64_t total, int64_t, const std::function<void(int64_t, int64_t)>& work) {
  int64_t part = 1;
  for (int64_t end = total; end > 0; part = part * 3 % 7) {
    const int64_t begin = std::max<int64_t>(0, end - part);
    work(begin, end);
    end = begin;
  }
}

// Calls work(a pointer of the element type) for the types in the order of DTYPES in numbers_of_all_kinds.py.
template <typename Work>
void OfType(int type, const Work& work) {
  switch (type) {
    case 0:
      return work(static_cast<Eigen::half*>(nullptr));
    case 1:
      return work(static_cast<Eigen::bfloat16*>(nullptr));
    case 2:
      return work(static_cast<float*>(nullptr));
    default:
      return work(static_cast<double*>(nullptr));
  }
}

template <typename T>
std::vector<T*> Cast(void* const* tensors, int64_t count) {
  std::vector<T*> result;
  for (int64_t i = 0; i < count; ++i) result.push_back(static_cast<T*>(tensors[i]));
  return result;
}

}  // namespace

extern "C" {

// Null after the last instruction set, or where the CPU does not have this one.
const char* cpu_instruction_set(int set) {
  if (set > static_cast<int>(InstructionSet::kAvx512Vbmi)) return nullptr;
  const auto s = static_cast<InstructionSet>(set);
  return hvd_eightbit::cpu::Has(s) ? hvd_eightbit::cpu::NameOf(s) : nullptr;
}

void* cpu_table(const float* values, int set) { return new Table(values, static_cast<InstructionSet>(set)); }

void cpu_free_table(void* table) { delete static_cast<Table*>(table); }

void cpu_quantize(const void* table, int type, const void* x, int64_t elements, int64_t block_size, uint8_t* codes,
                  float* absmax) {
  OfType(type, [&](auto* t) {
    hvd_eightbit::cpu::Quantize(*static_cast<const Table*>(table), static_cast<decltype(t)>(const_cast<void*>(x)),
                                elements, block_size, codes, absmax, InUnevenParts);
  });
}

void cpu_dequantize(const void* table, int type, const uint8_t* codes, const float* absmax, int64_t elements,
                    int64_t block_size, void* x) {
  OfType(type, [&](auto* t) {
    hvd_eightbit::cpu::Dequantize(*static_cast<const Table*>(table), codes, absmax, elements, block_size,
                                  static_cast<decltype(t)>(x), InUnevenParts);
  });
}

void cpu_pack(const void* table, int type, void* const* tensors, const int64_t* sizes, int64_t count, int64_t ranks,
              int64_t rank, int64_t block_size, uint8_t* messages) {
  OfType(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const Layout layout({sizes, sizes + count}, ranks, block_size);
    hvd_eightbit::cpu::Pack<T>(*static_cast<const Table*>(table), layout, Cast<const T>(tensors, count), rank, messages,
                               InUnevenParts);
  });
}

void cpu_reduce(const void* table, int type, void* const* tensors, const int64_t* sizes, int64_t count, int64_t ranks,
                int64_t rank, int64_t block_size, const uint8_t* received, uint8_t* message) {
  OfType(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const Layout layout({sizes, sizes + count}, ranks, block_size);
    hvd_eightbit::cpu::Reduce<T>(*static_cast<const Table*>(table), layout, Cast<const T>(tensors, count), rank,
                                 received, message, InUnevenParts);
  });
}

void cpu_unpack(const void* table, int type, void* const* tensors, const int64_t* sizes, int64_t count, int64_t ranks,
                int64_t block_size, const uint8_t* gathered, float scale) {
  OfType(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const Layout layout({sizes, sizes + count}, ranks, block_size);
    hvd_eightbit::cpu::Unpack<T>(*static_cast<const Table*>(table), layout, gathered, scale, Cast<T>(tensors, count),
                                 InUnevenParts);
  });
}

}  // extern "C"
