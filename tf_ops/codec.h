// The scalar codec, one definition for host and device; hvd_eightbit/reference.py is the same in NumPy.
//
// Every product and sum here must be a single float32 operation: compile with contraction off (-ffp-contract=off,
// nvcc --fmad=false) and subnormals kept.

#ifndef HVD_EIGHTBIT_TF_OPS_CODEC_H_
#define HVD_EIGHTBIT_TF_OPS_CODEC_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define EIGHTBIT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EIGHTBIT_HOST_DEVICE inline
#endif

namespace hvd_eightbit {

constexpr int kCodes = 256;
constexpr int kMidpoints = kCodes - 1;

// 1 / absmax is infinite for the smallest numbers: below kSmall, absmax and elements are raised by kRaise first
// (exact).
constexpr float kSmall = 0x1p-100f;
constexpr float kRaise = 0x1p100f;

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNaNBits = 0x7fc00000u;

EIGHTBIT_HOST_DEVICE uint32_t ToBits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

EIGHTBIT_HOST_DEVICE float FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// |x| as an integer: ordered like |x|, with infinities and NaNs above all else. A maximum over these does not depend on
// the order in which it is taken.
EIGHTBIT_HOST_DEVICE uint32_t MagnitudeBits(float x) { return ToBits(x) & 0x7fffffffu; }

// A block's absmax from the maximum of its MagnitudeBits: NaN if the block has a NaN or an infinity.
EIGHTBIT_HOST_DEVICE float AbsmaxFromBits(uint32_t max_bits) {
  return FromBits(max_bits >= kInfinityBits ? kNaNBits : max_bits);
}

// Whether a block of this absmax is coded; if not (0, NaN), all its codes are that of zero.
EIGHTBIT_HOST_DEVICE bool IsCodable(float absmax) { return absmax > 0.0f; }

// x * raise * inverse is x / absmax.
struct BlockScale {
  float raise;
  float inverse;
};

EIGHTBIT_HOST_DEVICE BlockScale ScaleOf(float absmax) {
  BlockScale scale;
  scale.raise = absmax < kSmall ? kRaise : 1.0f;
  scale.inverse = 1.0f / (absmax * scale.raise);
  return scale;
}

EIGHTBIT_HOST_DEVICE float Scaled(float x, BlockScale scale) { return x * scale.raise * scale.inverse; }

// The border between code i and code i + 1.
EIGHTBIT_HOST_DEVICE float Midpoint(const float* values, int i) { return (values[i] + values[i + 1]) * 0.5f; }

// The code of a scaled element: how many midpoints are below it.
EIGHTBIT_HOST_DEVICE uint8_t Encode(const float* midpoints, float scaled) {
  int code = 0;
  for (int step = kCodes / 2; step > 0; step /= 2) {
    if (midpoints[code + step - 1] < scaled) code += step;
  }
  return static_cast<uint8_t>(code);
}

EIGHTBIT_HOST_DEVICE float Decode(const float* values, uint8_t code, float absmax) { return values[code] * absmax; }

// The mean of a sum over ranks; inverse_ranks is 1.0f / ranks.
EIGHTBIT_HOST_DEVICE float Mean(float sum, float inverse_ranks) { return sum * inverse_ranks; }

}  // namespace hvd_eightbit

#endif  // HVD_EIGHTBIT_TF_OPS_CODEC_H_
