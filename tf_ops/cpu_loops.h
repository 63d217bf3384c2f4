// The inner loops of the CPU kernels, for each instruction set; the library holds all, and asks the CPU which it has.
//
// All give the same bits: those of codec.h, which the plain loops call. Who calls them keeps subnormals.

#ifndef HVD_EIGHTBIT_TF_OPS_CPU_LOOPS_H_
#define HVD_EIGHTBIT_TF_OPS_CPU_LOOPS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "Eigen/Core"
#include "codec.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define EIGHTBIT_X86 1
#include <cpuid.h>
// GCC 12 warns of variables in its own header.
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace hvd_eightbit {
namespace cpu {

// Each has what those before it have.
enum class InstructionSet { kPlain, kAvx2, kAvx512, kAvx512Vbmi };

// A data type in the forms that the loops look things up in.
struct CodingTables {
  static constexpr int kBuckets = 1 << 16;

  float values[kCodes];
  float midpoints[kMidpoints];

  // Plain coding. Keys are integers in the order of the floats; a bucket is the keys that share their upper 16 bits.
  uint32_t borders[kMidpoints + 1];  // keys of the midpoints that differ, then one above all
  uint8_t border_codes[kCodes];      // the code above that many borders
  uint8_t first_border[kBuckets];    // borders below all keys of the bucket
  bool one_border_a_bucket;          // at most

  // Vector coding. Step s of the search in codec.h looks at one of 2^s midpoints: search[2^s + r], where bit i of r is
  // the outcome of step i.
  float search[kCodes];

  // The same for borders, by the upper halves of their keys as signed integers. Where it ends, r has 8 outcomes: b
  // borders have a smaller upper half. Then border_planes are the bytes of the next border's key, code_below and
  // code_above the codes on its two sides.
  int16_t border_search[kCodes];
  uint8_t border_planes[4][kCodes];
  uint8_t code_below[kCodes];
  uint8_t code_above[kCodes];

  // Vector decoding: byte b of values[i] is planes[b][i].
  uint8_t planes[4][kCodes];
};

struct Loops {
  uint32_t (*max_magnitude_bits)(const float* x, int64_t elements);
  void (*encode)(const CodingTables& tables, const float* x, BlockScale scale, int64_t elements, uint8_t* codes);
  // x = decoded * factor
  void (*decode)(const CodingTables& tables, const uint8_t* codes, float absmax, float factor, int64_t elements,
                 float* x);
  // x = (y + decoded) * factor; y may be x.
  void (*add_decoded)(const CodingTables& tables, const float* y, const uint8_t* codes, float absmax, float factor,
                      int64_t elements, float* x);
  // x = (y + z) * factor; y may be x.
  void (*add)(const float* y, const float* z, float factor, int64_t elements, float* x);
  void (*half_to_float)(const Eigen::half* from, int64_t elements, float* to);
  void (*float_to_half)(const float* from, int64_t elements, Eigen::half* to);
  void (*bfloat16_to_float)(const Eigen::bfloat16* from, int64_t elements, float* to);
  void (*float_to_bfloat16)(const float* from, int64_t elements, Eigen::bfloat16* to);
};

// ---- Plain: also the definition of what the others do.

// An integer in the order of the floats, the same for both zeros.
inline uint32_t OrderKey(float x) {
  const uint32_t bits = ToBits(x + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// Those that the compiler vectorises by itself, to be compiled for each instruction set.
namespace loops {

#ifdef __GNUC__
#define EIGHTBIT_INLINE inline __attribute__((always_inline))
#else
#define EIGHTBIT_INLINE inline
#endif

EIGHTBIT_INLINE uint32_t MaxMagnitudeBits(const float* x, int64_t elements) {
  uint32_t result = 0;
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t bits = MagnitudeBits(x[i]);
    result = bits > result ? bits : result;
  }
  return result;
}

EIGHTBIT_INLINE void Add(const float* y, const float* z, float factor, int64_t elements, float* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] = (y[i] + z[i]) * factor;
}

EIGHTBIT_INLINE void BFloat16ToFloat(const Eigen::bfloat16* from, int64_t elements, float* to) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < elements; ++i) to[i] = FromBits(static_cast<uint32_t>(bits[i]) << 16);
}

// To nearest, ties to even.
EIGHTBIT_INLINE void FloatToBFloat16(const float* from, int64_t elements, Eigen::bfloat16* to) {
  uint16_t* bits = reinterpret_cast<uint16_t*>(to);
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t x = ToBits(from[i]);
    const uint32_t rounded = (x + 0x7fffu + (x >> 16 & 1u)) >> 16;
    bits[i] = static_cast<uint16_t>(MagnitudeBits(from[i]) > kInfinityBits ? kNaNBits >> 16 : rounded);
  }
}

EIGHTBIT_INLINE void Encode(const CodingTables& tables, const float* x, BlockScale scale, int64_t elements,
                            uint8_t* codes) {
  if (!tables.one_border_a_bucket) {
    for (int64_t i = 0; i < elements; ++i) codes[i] = hvd_eightbit::Encode(tables.midpoints, Scaled(x[i], scale));
    return;
  }
  constexpr int64_t kKeys = 512;
  uint32_t keys[kKeys];
  for (int64_t begin = 0; begin < elements; begin += kKeys) {
    const int64_t count = std::min(kKeys, elements - begin);
    for (int64_t i = 0; i < count; ++i) keys[i] = OrderKey(Scaled(x[begin + i], scale));
    for (int64_t i = 0; i < count; ++i) {
      uint32_t border = tables.first_border[keys[i] >> 16];
      border += tables.borders[border] < keys[i];
      codes[begin + i] = tables.border_codes[border];
    }
  }
}

}  // namespace loops

// Compiled once: more than SSE2 would make gathers of these, which are slow on many CPUs.
inline void DecodePlain(const CodingTables& tables, const uint8_t* codes, float absmax, float factor, int64_t elements,
                        float* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] = Decode(tables.values, codes[i], absmax) * factor;
}

inline void AddDecodedPlain(const CodingTables& tables, const float* y, const uint8_t* codes, float absmax,
                            float factor, int64_t elements, float* x) {
  for (int64_t i = 0; i < elements; ++i) x[i] = (y[i] + Decode(tables.values, codes[i], absmax)) * factor;
}

inline void HalfToFloatPlain(const Eigen::half* from, int64_t elements, float* to) {
  for (int64_t i = 0; i < elements; ++i) to[i] = static_cast<float>(from[i]);
}

inline void FloatToHalfPlain(const float* from, int64_t elements, Eigen::half* to) {
  for (int64_t i = 0; i < elements; ++i) to[i] = static_cast<Eigen::half>(from[i]);
}

#define EIGHTBIT_COMPILE_LOOPS(suffix, target)                                                                      \
  target inline uint32_t MaxMagnitudeBits##suffix(const float* x, int64_t elements) {                               \
    return loops::MaxMagnitudeBits(x, elements);                                                                    \
  }                                                                                                                 \
  target inline void Add##suffix(const float* y, const float* z, float factor, int64_t elements, float* x) {        \
    loops::Add(y, z, factor, elements, x);                                                                          \
  }                                                                                                                 \
  target inline void BFloat16ToFloat##suffix(const Eigen::bfloat16* from, int64_t elements, float* to) {            \
    loops::BFloat16ToFloat(from, elements, to);                                                                     \
  }                                                                                                                 \
  target inline void FloatToBFloat16##suffix(const float* from, int64_t elements, Eigen::bfloat16* to) {            \
    loops::FloatToBFloat16(from, elements, to);                                                                     \
  }                                                                                                                 \
  target inline void Encode##suffix(const CodingTables& tables, const float* x, BlockScale scale, int64_t elements, \
                                    uint8_t* codes) {                                                               \
    loops::Encode(tables, x, scale, elements, codes);                                                               \
  }

EIGHTBIT_COMPILE_LOOPS(Plain, )

#ifdef EIGHTBIT_X86

#define EIGHTBIT_AVX2 __attribute__((target("avx2,f16c")))
#define EIGHTBIT_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#define EIGHTBIT_VBMI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,f16c")))

EIGHTBIT_COMPILE_LOOPS(Avx2, EIGHTBIT_AVX2)
EIGHTBIT_COMPILE_LOOPS(Avx512, EIGHTBIT_AVX512)

// ---- AVX2

EIGHTBIT_AVX2 inline void HalfToFloatAvx2(const Eigen::half* from, int64_t elements, float* to) {
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  HalfToFloatPlain(from + i, elements - i, to + i);
}

EIGHTBIT_AVX2 inline void FloatToHalfAvx2(const float* from, int64_t elements, Eigen::half* to) {
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  FloatToHalfPlain(from + i, elements - i, to + i);
}

// ---- AVX-512: tables are held in registers, and looked up by permutations. 64 elements a step.

constexpr int kStep = 64;

EIGHTBIT_AVX512 EIGHTBIT_INLINE __m512i LoadBytes(const void* from) { return _mm512_loadu_si512(from); }

// The search of codec.h for kVectors times 16 scaled elements. A step needs the outcome of the one before, and so
// waits: the vectors take turns. Bit i of a result is the outcome of step i: a code, read backwards.
constexpr int kVectors = kStep / 16;

class SearchAvx512 {
 public:
  EIGHTBIT_AVX512 EIGHTBIT_INLINE explicit SearchAvx512(const float* search) {
    step0_ = _mm512_set1_ps(search[1]);
    for (int i = 0; i < 2; ++i) step1_[i] = _mm512_set1_ps(search[2 + i]);
    step2_ = _mm512_loadu_ps(search + 4);
    step3_ = _mm512_loadu_ps(search + 8);
    step4_ = _mm512_loadu_ps(search + 16);
    for (int i = 0; i < 2; ++i) step5_[i] = _mm512_loadu_ps(search + 32 + 16 * i);
    for (int i = 0; i < 4; ++i) step6_[i] = _mm512_loadu_ps(search + 64 + 16 * i);
    for (int i = 0; i < 8; ++i) step7_[i] = _mm512_loadu_ps(search + 128 + 16 * i);
  }

  EIGHTBIT_AVX512 EIGHTBIT_INLINE void operator()(const __m512* x, __m512i* r) const {
    __mmask16 last[kVectors], outcome5[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      last[i] = _mm512_cmp_ps_mask(step0_, x[i], _CMP_LT_OQ);
      r[i] = _mm512_maskz_set1_epi32(last[i], 1);
    }
    for (int i = 0; i < kVectors; ++i) Compare<1>(_mm512_mask_blend_ps(last[i], step1_[0], step1_[1]), x[i], &r[i]);
    // A permutation looks at no more bits of r than it needs: 4, or 5 with two tables.
    for (int i = 0; i < kVectors; ++i) Compare<2>(_mm512_permutexvar_ps(r[i], step2_), x[i], &r[i]);
    for (int i = 0; i < kVectors; ++i) Compare<3>(_mm512_permutexvar_ps(r[i], step3_), x[i], &r[i]);
    for (int i = 0; i < kVectors; ++i) Compare<4>(_mm512_permutexvar_ps(r[i], step4_), x[i], &r[i]);
    for (int i = 0; i < kVectors; ++i) outcome5[i] = Compare<5>(Pair(step5_, r[i]), x[i], &r[i]);
    for (int i = 0; i < kVectors; ++i) {
      last[i] = Compare<6>(Pairs(step6_, outcome5[i], r[i]), x[i], &r[i]);
    }
    for (int i = 0; i < kVectors; ++i) {
      Compare<7>(_mm512_mask_blend_ps(last[i], Pairs(step7_, outcome5[i], r[i]), Pairs(step7_ + 4, outcome5[i], r[i])),
                 x[i], &r[i]);
    }
  }

 private:
  template <int kBit>
  EIGHTBIT_AVX512 static EIGHTBIT_INLINE __mmask16 Compare(__m512 midpoint, __m512 x, __m512i* r) {
    const __mmask16 outcome = _mm512_cmp_ps_mask(midpoint, x, _CMP_LT_OQ);
    *r = _mm512_mask_or_epi32(*r, outcome, *r, _mm512_set1_epi32(1 << kBit));
    return outcome;
  }

  EIGHTBIT_AVX512 static EIGHTBIT_INLINE __m512 Pair(const __m512* tables, __m512i r) {
    return _mm512_permutex2var_ps(tables[0], r, tables[1]);
  }

  EIGHTBIT_AVX512 static EIGHTBIT_INLINE __m512 Pairs(const __m512* tables, __mmask16 second, __m512i r) {
    return _mm512_mask_blend_ps(second, Pair(tables, r), Pair(tables + 2, r));
  }

  __m512 step0_, step1_[2], step2_, step3_, step4_, step5_[2], step6_[4], step7_[8];
};

EIGHTBIT_AVX512 EIGHTBIT_INLINE __m512i ReverseBitsOfBytes(__m512i x) {
  const __m512i low = _mm512_set1_epi8(0x0f);
  const __m512i reversed = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15));
  const __m512i from_low = _mm512_shuffle_epi8(reversed, _mm512_and_si512(x, low));
  const __m512i from_high = _mm512_shuffle_epi8(reversed, _mm512_and_si512(_mm512_srli_epi16(x, 4), low));
  return _mm512_or_si512(_mm512_slli_epi16(from_low, 4), from_high);
}

EIGHTBIT_AVX512 EIGHTBIT_INLINE void EncodeStep(const SearchAvx512& search, const float* x, __m512 raise,
                                                __m512 inverse, uint8_t* codes) {
  __m512 scaled[kVectors];
  __m512i r[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    scaled[i] = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), raise), inverse);
  }
  search(scaled, r);
  __m512i reversed = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(r[0]));
  reversed = _mm512_inserti32x4(reversed, _mm512_cvtepi32_epi8(r[1]), 1);
  reversed = _mm512_inserti32x4(reversed, _mm512_cvtepi32_epi8(r[2]), 2);
  reversed = _mm512_inserti32x4(reversed, _mm512_cvtepi32_epi8(r[3]), 3);
  _mm512_storeu_si512(codes, ReverseBitsOfBytes(reversed));
}

EIGHTBIT_AVX512 inline void EncodeSearchAvx512(const CodingTables& tables, const float* x, BlockScale scale,
                                               int64_t elements, uint8_t* codes) {
  const SearchAvx512 search(tables.search);
  const __m512 raise = _mm512_set1_ps(scale.raise), inverse = _mm512_set1_ps(scale.inverse);
  int64_t i = 0;
  for (; i + kStep <= elements; i += kStep) EncodeStep(search, x + i, raise, inverse, codes + i);
  if (i < elements) {
    float rest[kStep] = {};
    uint8_t rest_codes[kStep];
    memcpy(rest, x + i, (elements - i) * sizeof(float));
    EncodeStep(search, rest, raise, inverse, rest_codes);
    memcpy(codes + i, rest_codes, elements - i);
  }
}

// With keys as in plain coding, but signed: 32 upper halves to a vector are searched, to which bytes of VBMI then give
// the one border that may share a key's upper half, and its codes.
class BorderSearchVbmi {
 public:
  EIGHTBIT_VBMI EIGHTBIT_INLINE explicit BorderSearchVbmi(const CodingTables& tables) : tables_(tables) {
    const int16_t* search = tables.border_search;
    step0_ = _mm512_set1_epi16(search[1]);
    for (int i = 0; i < 5; ++i) step1_to_5_[i] = LoadBytes(search + (2 << i));
    for (int i = 0; i < 2; ++i) step6_[i] = LoadBytes(search + 64 + 32 * i);
    for (int i = 0; i < 4; ++i) step7_[i] = LoadBytes(search + 128 + 32 * i);
  }

  // kVectors times 32 elements. A step of the search waits for the one before: the vectors take turns.
  template <int kVectors>
  EIGHTBIT_VBMI EIGHTBIT_INLINE void Encode(const float* x, __m512 raise, __m512 inverse, uint8_t* codes) const {
    __m512i high[kVectors], low[kVectors], r[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      SplitKeys(Scaled(x + 32 * i, raise, inverse), Scaled(x + 32 * i + 16, raise, inverse), &high[i], &low[i]);
    }
    Search<kVectors>(high, r);
    for (int i = 0; i < kVectors; i += 2) Finish(high + i, low + i, r + i, codes + 32 * i);
  }

 private:
  EIGHTBIT_VBMI static EIGHTBIT_INLINE __m512i Scaled(const float* x, __m512 raise, __m512 inverse) {
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x), raise), inverse));
  }

  // The halves of the keys of 32 floats, given as bits.
  EIGHTBIT_VBMI static EIGHTBIT_INLINE void SplitKeys(__m512i a, __m512i b, __m512i* high, __m512i* low) {
    // The words 0, 2, 4, ... and 1, 3, 5, ... of both.
    const __m512i pairs = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
    const __m512i even = _mm512_or_si512(pairs, _mm512_slli_epi32(_mm512_add_epi32(pairs, _mm512_set1_epi32(2)), 16));
    const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
    *high = _mm512_permutex2var_epi16(a, odd, b);
    const __m512i sign = _mm512_srai_epi16(*high, 15);
    *high = _mm512_xor_si512(*high, _mm512_and_si512(sign, _mm512_set1_epi16(0x7fff)));
    *low = _mm512_xor_si512(_mm512_permutex2var_epi16(a, even, b), sign);
  }

  template <int kVectors>
  EIGHTBIT_VBMI EIGHTBIT_INLINE void Search(const __m512i* x, __m512i* r) const {
    __mmask32 outcome[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      r[i] = _mm512_srli_epi16(_mm512_movm_epi16(_mm512_cmpgt_epi16_mask(x[i], step0_)), 15);
    }
    for (int step = 1; step < 6; ++step) {
      for (int i = 0; i < kVectors; ++i) {
        Compare(_mm512_permutexvar_epi16(r[i], step1_to_5_[step - 1]), x[i], step, &r[i]);
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      outcome[i] = Compare(_mm512_permutex2var_epi16(step6_[0], r[i], step6_[1]), x[i], 6, &r[i]);
    }
    for (int i = 0; i < kVectors; ++i) {
      Compare(_mm512_mask_blend_epi16(outcome[i], _mm512_permutex2var_epi16(step7_[0], r[i], step7_[1]),
                                      _mm512_permutex2var_epi16(step7_[2], r[i], step7_[3])),
              x[i], 7, &r[i]);
    }
  }

  // The codes of 64 elements, from two vectors of each.
  EIGHTBIT_VBMI EIGHTBIT_INLINE void Finish(const __m512i* high, const __m512i* low, const __m512i* r,
                                            uint8_t* codes) const {
    // Packing and unpacking work within lanes of 16 bytes: the one undoes the other, and `order` what is left.
    const __m512i index = _mm512_packus_epi16(r[0], r[1]);
    const __mmask64 bit7 = _mm512_movepi8_mask(index);
    const __m512i byte0 = Lookup(tables_.border_planes[0], index, bit7);
    const __m512i byte1 = Lookup(tables_.border_planes[1], index, bit7);
    const __m512i byte2 = Lookup(tables_.border_planes[2], index, bit7);
    const __m512i byte3 = Lookup(tables_.border_planes[3], index, bit7);
    const __m512i above = _mm512_packs_epi16(
        IsAbove(_mm512_unpacklo_epi8(byte2, byte3), _mm512_unpacklo_epi8(byte0, byte1), high[0], low[0]),
        IsAbove(_mm512_unpackhi_epi8(byte2, byte3), _mm512_unpackhi_epi8(byte0, byte1), high[1], low[1]));
    const __m512i result = _mm512_mask_blend_epi8(_mm512_movepi8_mask(above), Lookup(tables_.code_below, index, bit7),
                                                  Lookup(tables_.code_above, index, bit7));
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512(codes, _mm512_permutexvar_epi64(order, result));
  }

  EIGHTBIT_VBMI static EIGHTBIT_INLINE __mmask32 Compare(__m512i border, __m512i x, int step, __m512i* r) {
    const __mmask32 outcome = _mm512_cmpgt_epi16_mask(x, border);
    *r = _mm512_mask_add_epi16(*r, outcome, *r, _mm512_set1_epi16(static_cast<int16_t>(1 << step)));
    return outcome;
  }

  // 0xffff where the border with these halves is below the key, and has its upper half.
  EIGHTBIT_VBMI static EIGHTBIT_INLINE __m512i IsAbove(__m512i border_high, __m512i border_low, __m512i high,
                                                       __m512i low) {
    const __mmask32 same = _mm512_cmpeq_epi16_mask(border_high, high);
    return _mm512_movm_epi16(_mm512_mask_cmplt_epu16_mask(same, border_low, low));
  }

  EIGHTBIT_VBMI static EIGHTBIT_INLINE __m512i Lookup(const uint8_t* table, __m512i index, __mmask64 bit7) {
    return _mm512_mask_blend_epi8(bit7, _mm512_permutex2var_epi8(LoadBytes(table), index, LoadBytes(table + 64)),
                                  _mm512_permutex2var_epi8(LoadBytes(table + 128), index, LoadBytes(table + 192)));
  }

  const CodingTables& tables_;
  __m512i step0_, step1_to_5_[5], step6_[2], step7_[4];
};

EIGHTBIT_VBMI inline void EncodeVbmi(const CodingTables& tables, const float* x, BlockScale scale, int64_t elements,
                                     uint8_t* codes) {
  if (!tables.one_border_a_bucket) return EncodeSearchAvx512(tables, x, scale, elements, codes);
  const BorderSearchVbmi search(tables);
  const __m512 raise = _mm512_set1_ps(scale.raise), inverse = _mm512_set1_ps(scale.inverse);
  int64_t i = 0;
  for (; i + 2 * kStep <= elements; i += 2 * kStep) search.Encode<4>(x + i, raise, inverse, codes + i);
  while (i < elements) {
    const int64_t count = std::min<int64_t>(kStep, elements - i);
    float rest[kStep] = {};
    uint8_t rest_codes[kStep];
    memcpy(rest, x + i, count * sizeof(float));
    search.Encode<2>(rest, raise, inverse, rest_codes);
    memcpy(codes + i, rest_codes, count);
    i += count;
  }
}

// What becomes of decoded elements.
struct Times {
  __m512 factor;
  EIGHTBIT_AVX512 EIGHTBIT_INLINE void operator()(__m512 decoded, const float*, float* x) const {
    _mm512_storeu_ps(x, _mm512_mul_ps(decoded, factor));
  }
};

struct PlusTimes {
  __m512 factor;
  EIGHTBIT_AVX512 EIGHTBIT_INLINE void operator()(__m512 decoded, const float* y, float* x) const {
    _mm512_storeu_ps(x, _mm512_mul_ps(_mm512_add_ps(_mm512_loadu_ps(y), decoded), factor));
  }
};

// Values of 16 codes at a time, from 8 pairs of registers.
class DecodeAvx512 {
 public:
  EIGHTBIT_AVX512 EIGHTBIT_INLINE explicit DecodeAvx512(const CodingTables& tables) {
    for (int i = 0; i < 16; ++i) values_[i] = _mm512_loadu_ps(tables.values + 16 * i);
  }

  template <typename Sink>
  EIGHTBIT_AVX512 EIGHTBIT_INLINE void operator()(const uint8_t* codes, __m512 absmax, const Sink& sink, const float* y,
                                                  float* x) const {
    for (int i = 0; i < kStep; i += 16) {
      const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
      const __mmask16 bit5 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(32));
      const __mmask16 bit6 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(64));
      const __mmask16 bit7 = _mm512_test_epi32_mask(code, _mm512_set1_epi32(128));
      const __m512 low = Quarters(values_, code, bit5, bit6), high = Quarters(values_ + 8, code, bit5, bit6);
      sink(_mm512_mul_ps(_mm512_mask_blend_ps(bit7, low, high), absmax), y + i, x + i);
    }
  }

 private:
  EIGHTBIT_AVX512 static EIGHTBIT_INLINE __m512 Quarters(const __m512* v, __m512i code, __mmask16 bit5,
                                                         __mmask16 bit6) {
    return _mm512_mask_blend_ps(
        bit6,
        _mm512_mask_blend_ps(bit5, _mm512_permutex2var_ps(v[0], code, v[1]), _mm512_permutex2var_ps(v[2], code, v[3])),
        _mm512_mask_blend_ps(bit5, _mm512_permutex2var_ps(v[4], code, v[5]), _mm512_permutex2var_ps(v[6], code, v[7])));
  }

  __m512 values_[16];
};

// Values of 64 codes at a time, byte by byte.
class DecodeVbmi {
 public:
  EIGHTBIT_VBMI EIGHTBIT_INLINE explicit DecodeVbmi(const CodingTables& tables) {
    for (int byte = 0; byte < 4; ++byte) {
      for (int i = 0; i < 4; ++i) planes_[byte][i] = LoadBytes(tables.planes[byte] + 64 * i);
    }
  }

  template <typename Sink>
  EIGHTBIT_VBMI EIGHTBIT_INLINE void operator()(const uint8_t* codes, __m512 absmax, const Sink& sink, const float* y,
                                                float* x) const {
    // Unpacking works within lanes of 16 bytes: with the codes in this order, its results are in theirs.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i code = _mm512_permutexvar_epi32(order, LoadBytes(codes));
    const __mmask64 bit7 = _mm512_movepi8_mask(code);
    const __m512i byte0 = Lookup(0, code, bit7), byte1 = Lookup(1, code, bit7);
    const __m512i byte2 = Lookup(2, code, bit7), byte3 = Lookup(3, code, bit7);
    const __m512i low01 = _mm512_unpacklo_epi8(byte0, byte1), high01 = _mm512_unpackhi_epi8(byte0, byte1);
    const __m512i low23 = _mm512_unpacklo_epi8(byte2, byte3), high23 = _mm512_unpackhi_epi8(byte2, byte3);
    sink(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi16(low01, low23)), absmax), y, x);
    sink(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpackhi_epi16(low01, low23)), absmax), y + 16, x + 16);
    sink(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi16(high01, high23)), absmax), y + 32, x + 32);
    sink(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpackhi_epi16(high01, high23)), absmax), y + 48, x + 48);
  }

 private:
  EIGHTBIT_VBMI EIGHTBIT_INLINE __m512i Lookup(int byte, __m512i code, __mmask64 bit7) const {
    const __m512i* plane = planes_[byte];
    return _mm512_mask_blend_epi8(bit7, _mm512_permutex2var_epi8(plane[0], code, plane[1]),
                                  _mm512_permutex2var_epi8(plane[2], code, plane[3]));
  }

  __m512i planes_[4][4];
};

#define EIGHTBIT_DECODE_LOOPS(suffix, target)                                                                       \
  template <typename Sink>                                                                                          \
  target EIGHTBIT_INLINE void DecodeSteps##suffix(const CodingTables& tables, const uint8_t* codes, float absmax,   \
                                                  const Sink& sink, const float* y, int64_t elements, float* x) {   \
    const Decode##suffix decode(tables);                                                                            \
    const __m512 absmaxes = _mm512_set1_ps(absmax);                                                                 \
    int64_t i = 0;                                                                                                  \
    for (; i + kStep <= elements; i += kStep) decode(codes + i, absmaxes, sink, y + i, x + i);                      \
    if (i < elements) {                                                                                             \
      uint8_t rest_codes[kStep] = {};                                                                               \
      float rest[kStep] = {};                                                                                       \
      memcpy(rest_codes, codes + i, elements - i);                                                                  \
      memcpy(rest, y + i, (elements - i) * sizeof(float));                                                          \
      decode(rest_codes, absmaxes, sink, rest, rest);                                                               \
      memcpy(x + i, rest, (elements - i) * sizeof(float));                                                          \
    }                                                                                                               \
  }                                                                                                                 \
  target inline void DecodeTo##suffix(const CodingTables& tables, const uint8_t* codes, float absmax, float factor, \
                                      int64_t elements, float* x) {                                                 \
    DecodeSteps##suffix(tables, codes, absmax, Times{_mm512_set1_ps(factor)}, x, elements, x);                      \
  }                                                                                                                 \
  target inline void AddDecoded##suffix(const CodingTables& tables, const float* y, const uint8_t* codes,           \
                                        float absmax, float factor, int64_t elements, float* x) {                   \
    DecodeSteps##suffix(tables, codes, absmax, PlusTimes{_mm512_set1_ps(factor)}, y, elements, x);                  \
  }

EIGHTBIT_DECODE_LOOPS(Avx512, EIGHTBIT_AVX512)
EIGHTBIT_DECODE_LOOPS(Vbmi, EIGHTBIT_VBMI)

#endif  // EIGHTBIT_X86

// ---- The choice.

inline bool Has(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPlain:
      return true;
#ifdef EIGHTBIT_X86
    case InstructionSet::kAvx2: {
      // Not every compiler knows f16c by name.
      unsigned a, b, c, d;
      return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
    }
    case InstructionSet::kAvx512:
      return Has(InstructionSet::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case InstructionSet::kAvx512Vbmi:
      return Has(InstructionSet::kAvx512) && __builtin_cpu_supports("avx512vbmi");
#endif
    default:
      return false;
  }
}

inline InstructionSet BestInstructionSet() {
  InstructionSet best = InstructionSet::kPlain;
  for (InstructionSet set : {InstructionSet::kAvx2, InstructionSet::kAvx512, InstructionSet::kAvx512Vbmi}) {
    if (Has(set)) best = set;
  }
  return best;
}

inline const char* NameOf(InstructionSet set) {
  constexpr const char* kNames[] = {"plain", "AVX2", "AVX-512", "AVX-512 VBMI"};
  return kNames[static_cast<int>(set)];
}

// set: one that this CPU has.
inline Loops LoopsFor(InstructionSet set) {
  Loops loops = {MaxMagnitudeBitsPlain, EncodePlain,      DecodePlain,          AddDecodedPlain,     AddPlain,
                 HalfToFloatPlain,      FloatToHalfPlain, BFloat16ToFloatPlain, FloatToBFloat16Plain};
#ifdef EIGHTBIT_X86
  if (set >= InstructionSet::kAvx2) {
    loops.max_magnitude_bits = MaxMagnitudeBitsAvx2;
    loops.encode = EncodeAvx2;
    loops.add = AddAvx2;
    loops.half_to_float = HalfToFloatAvx2;
    loops.float_to_half = FloatToHalfAvx2;
    loops.bfloat16_to_float = BFloat16ToFloatAvx2;
    loops.float_to_bfloat16 = FloatToBFloat16Avx2;
  }
  if (set >= InstructionSet::kAvx512) {
    loops.encode = EncodeSearchAvx512;
    loops.decode = DecodeToAvx512;
    loops.add_decoded = AddDecodedAvx512;
  }
  if (set >= InstructionSet::kAvx512Vbmi) {
    loops.encode = EncodeVbmi;
    loops.decode = DecodeToVbmi;
    loops.add_decoded = AddDecodedVbmi;
  }
#endif
  return loops;
}

}  // namespace cpu
}  // namespace hvd_eightbit

#endif  // HVD_EIGHTBIT_TF_OPS_CPU_LOOPS_H_
