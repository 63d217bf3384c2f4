// For test_cpu_codings.py: coding by each of the ways that cpu_kernels.h names.

#include "cpu_kernels.h"

using hvd_eightbit::cpu::Coding;
using hvd_eightbit::cpu::Table;

// Returns the way that was used.
extern "C" int encode(int coding, const float* values, const float* x, int64_t elements, float absmax, uint8_t* codes) {
  const Table table(values, static_cast<Coding>(coding));
  table.EncodeBlock(x, elements, absmax, codes);
  return static_cast<int>(table.coding());
}
