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

constexpr int kProbe = 4;
constexpr int64_t kFingerprints = 1 << 20;
constexpr double kProbeTolerance = 1e-9;

enum class Agreement { kYes, kNotASum, kSettingsDiffer };

// An arbitrary number for each rank, far above all else in the probe, so that reductions that are not linear show.
inline double RankMark(int64_t rank) {
  uint64_t x = static_cast<uint64_t>(rank) * 0x9e3779b97f4a7c15u + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<double>((1u << 29) + ((x ^ (x >> 31)) >> 35));
}

// fingerprint: a hash of the settings, in [0, kFingerprints).
inline void FillProbe(int64_t rank, int64_t fingerprint, double* probe) {
  const double c = static_cast<double>(fingerprint);
  probe[0] = 1;
  probe[1] = RankMark(rank);
  probe[2] = c;
  probe[3] = c * c / kFingerprints;
}

inline bool IsNear(double a, double b) { return std::abs(a - b) <= kProbeTolerance * std::abs(b); }

// Reads a reduced probe. `scale`: what the reduction multiplies the mean by (1 for an average, `ranks` for a sum).
inline Agreement ReadProbe(const double* reduced, int64_t ranks, int64_t fingerprint, double* scale) {
  double mean_mark = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) mean_mark += RankMark(rank) / ranks;
  *scale = reduced[0];
  if (!IsNear(reduced[1], *scale * mean_mark)) return Agreement::kNotASum;
  // Equal fingerprints have zero variance: all ranks see the same, whichever of them differ.
  const bool no_variance = IsNear(reduced[3] * *scale * kFingerprints, reduced[2] * reduced[2]);
  const bool own = IsNear(reduced[2], *scale * fingerprint);
  return no_variance && own ? Agreement::kYes : Agreement::kSettingsDiffer;
}

}  // namespace hvd_eightbit

#endif  // HVD_EIGHTBIT_TF_OPS_AGREEMENT_H_
