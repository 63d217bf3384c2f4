// The layout of a message; hvd_eightbit/wire.py is the same arithmetic and says why.

#ifndef HVD_EIGHTBIT_TF_OPS_WIRE_H_
#define HVD_EIGHTBIT_TF_OPS_WIRE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hvd_eightbit {

constexpr int64_t kAlignment = 16;
constexpr int64_t kAbsmaxBytes = 4;

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t AlignUp(int64_t a) { return CeilDiv(a, kAlignment) * kAlignment; }

// Blocks that `elements` consecutive elements of one tensor take; block_size 0 is one block for all.
inline int64_t Blocks(int64_t elements, int64_t block_size) {
  return block_size == 0 ? (elements > 0) : CeilDiv(elements, block_size);
}

// The part of one tensor that lies in one chunk.
struct Segment {
  int64_t tensor;    // index of the tensor in the bucket
  int64_t begin;     // its first element within the flattened tensor
  int64_t elements;  // at least 1
  int64_t code;      // offset of its first code within the chunk's message, bytes
  int64_t block;     // index of its first block within the chunk
};

struct Layout {
  int64_t ranks;
  int64_t block_size;  // 0: a tensor's whole part of a chunk
  int64_t chunk_elements;
  int64_t chunk_blocks;
  int64_t chunk_bytes;
  std::vector<std::vector<Segment>> chunks;  // of each rank's chunk, in order

  Layout(const std::vector<int64_t>& sizes, int64_t ranks, int64_t block_size)
      : ranks(ranks), block_size(block_size), chunk_blocks(0), chunks(ranks) {
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    chunk_elements = std::max(kAlignment, AlignUp(CeilDiv(total, ranks)));
    int64_t chunk = 0, code = 0, block = 0;
    for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
      for (int64_t begin = 0; begin < sizes[tensor];) {
        if (code == chunk_elements) {
          ++chunk;
          code = block = 0;
        }
        const int64_t elements = std::min(sizes[tensor] - begin, chunk_elements - code);
        chunks[chunk].push_back({static_cast<int64_t>(tensor), begin, elements, code, block});
        begin += elements;
        code += elements;
        block += Blocks(elements, block_size);
        chunk_blocks = std::max(chunk_blocks, block);
      }
    }
    chunk_bytes = AlignUp(chunk_elements + kAbsmaxBytes * chunk_blocks);
  }
};

}  // namespace hvd_eightbit

#endif  // HVD_EIGHTBIT_TF_OPS_WIRE_H_
