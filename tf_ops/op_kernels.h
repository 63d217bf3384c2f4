// What the TensorFlow kernels of all devices share: checks of their inputs.

#ifndef HVD_EIGHTBIT_TF_OPS_OP_KERNELS_H_
#define HVD_EIGHTBIT_TF_OPS_OP_KERNELS_H_

#include <cstdint>
#include <vector>

#include "codec.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "wire.h"

namespace hvd_eightbit {

constexpr int64_t kMaxRanks = 1 << 20;

inline const uint8_t* Bytes(const tensorflow::Tensor& tensor) { return tensor.flat<tensorflow::uint8>().data(); }
inline uint8_t* Bytes(tensorflow::Tensor* tensor) { return tensor->flat<tensorflow::uint8>().data(); }

inline std::vector<int64_t> SizesOf(const tensorflow::OpInputList& tensors) {
  std::vector<int64_t> sizes;
  for (const tensorflow::Tensor& tensor : tensors) sizes.push_back(tensor.NumElements());
  return sizes;
}

// The scalar integer input of that name, in host memory, at least `least` and below `limit`; -1, with the context's
// status set, if it is not.
int64_t GetInteger(tensorflow::OpKernelContext* context, const char* name, int64_t least, int64_t limit);

// What all codec kernels have: a block size, and the values of a data type.
class CodecKernel : public tensorflow::OpKernel {
 public:
  explicit CodecKernel(tensorflow::OpKernelConstruction* context);

 protected:
  // The kCodes values of the data type, where the kernel's device has them; null, with the context's status set, if the
  // input is of another shape.
  const float* GetValues(tensorflow::OpKernelContext* context);

  // Whether there are as many absmax values as blocks; sets the context's status if not.
  bool CheckAbsmax(tensorflow::OpKernelContext* context, const tensorflow::Tensor& codes,
                   const tensorflow::Tensor& absmax);

  // Whether `messages` has as many bytes as the layout of tensors of these sizes says; sets the context's status if
  // not.
  bool CheckMessages(tensorflow::OpKernelContext* context, const char* name, const tensorflow::Tensor& messages,
                     const std::vector<int64_t>& sizes);

  int64_t block_size_;
};

}  // namespace hvd_eightbit

#endif  // HVD_EIGHTBIT_TF_OPS_OP_KERNELS_H_
