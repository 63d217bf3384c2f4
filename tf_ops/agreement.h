// Whether all ranks mean the same 8-bit allreduce, and what scalar their reduction stands for.
//
// Horovod sums what a compressor returns with the user's op and factors, in the user's process set; the compressor is
// told none of these. So it returns a probe. From what becomes of it, the op, the factors, the process set and the
// settings of all ranks are known before any 8-bit message leaves: a mistake is an error on every rank, not a hang.

#ifndef HVD_EIGHTBIT_TF_OPS_AGREEMENT_H_
#define HVD_EIGHTBIT_TF_OPS_AGREEMENT_H_

#include <cmath>
#include <cstdint>

namespace hvd_eightbit {

constexpr int kMarks = 4;
constexpr int kFingerprintBits = 20;
constexpr int kProbe = 1 + kMarks + kFingerprintBits;
constexpr double kTolerance = 1e-5;  // far above float32's rounding, below the share of one rank in 10,000

enum class Agreement { kYes, kNotASum, kSettingsDiffer };

// Arbitrary numbers for each rank, so that a reduction that is not linear, or leaves ranks out, shows. From 512 to
// 1023: sums are exact in float32, and they outweigh the rest, so that no two probes are alike for Adasum.
inline int RankMark(int64_t rank, int mark) {
  uint64_t x = static_cast<uint64_t>(rank * kMarks + mark + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return 512 + static_cast<int>((x ^ (x >> 31)) % 512);
}

inline int FingerprintBit(int64_t fingerprint, int bit) { return fingerprint >> bit & 1; }

// probe: one, the rank's marks, the bits of the fingerprint (a hash of the settings).
template <typename T>
void FillProbe(int64_t rank, int64_t fingerprint, T* probe) {
  *probe++ = 1;
  for (int mark = 0; mark < kMarks; ++mark) *probe++ = RankMark(rank, mark);
  for (int bit = 0; bit < kFingerprintBits; ++bit) *probe++ = FingerprintBit(fingerprint, bit);
}

// Reads a reduced probe. scale: what the reduction multiplies the mean by (1 for an average, `ranks` for a sum).
template <typename T>
Agreement ReadProbe(const T* reduced, int64_t ranks, int64_t fingerprint, double* scale) {
  *scale = *reduced++;
  for (int mark = 0; mark < kMarks; ++mark) {
    double mean = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) mean += RankMark(rank, mark) / static_cast<double>(ranks);
    const double difference = *reduced++ - *scale * mean;
    if (!(std::abs(difference) <= kTolerance * std::abs(*scale) * mean)) return Agreement::kNotASum;
  }
  // Where fingerprints differ, some bit is neither scale nor 0 for any rank: all of them see it.
  for (int bit = 0; bit < kFingerprintBits; ++bit) {
    const double difference = *reduced++ - *scale * FingerprintBit(fingerprint, bit);
    if (!(std::abs(difference) <= kTolerance * std::abs(*scale))) return Agreement::kSettingsDiffer;
  }
  return Agreement::kYes;
}

}  // namespace hvd_eightbit

#endif  // HVD_EIGHTBIT_TF_OPS_AGREEMENT_H_
