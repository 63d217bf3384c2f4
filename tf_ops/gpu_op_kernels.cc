// TensorFlow kernels for the GPU: check, allocate, and enqueue on TensorFlow's own stream. Compiled only with CUDA.

#define EIGEN_USE_GPU

#include <string>
#include <vector>

#include "cuda_kernels.h"
#include "op_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "unsupported/Eigen/CXX11/Tensor"
#include "wire.h"

namespace hvd_eightbit {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename T>
constexpr EightBitKind kKind = kEightBitFloat;
template <>
constexpr EightBitKind kKind<Eigen::half> = kEightBitHalf;
template <>
constexpr EightBitKind kKind<Eigen::bfloat16> = kEightBitBfloat16;
template <>
constexpr EightBitKind kKind<double> = kEightBitDouble;

cudaStream_t StreamOf(OpKernelContext* context) { return context->eigen_device<Eigen::GpuDevice>().stream(); }

std::vector<const void*> DataOf(const OpInputList& tensors) {
  std::vector<const void*> data;
  for (const Tensor& tensor : tensors) data.push_back(tensor.data());
  return data;
}

void Check(OpKernelContext* context, int error) {
  OP_REQUIRES(context, error == 0, tensorflow::errors::Internal("a CUDA kernel of hvd_eightbit failed: error ", error));
}

template <typename T>
class GpuQuantizeKernel : public CodecKernel {
 public:
  using CodecKernel::CodecKernel;

  void Compute(OpKernelContext* context) override {
    const float* values = GetValues(context);
    if (values == nullptr) return;
    const Tensor& x = context->input(0);
    Tensor *codes, *absmax;
    OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &codes));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({Blocks(x.NumElements(), block_size_)}), &absmax));
    Check(context, eightbit_cuda_quantize(kKind<T>, values, x.data(), x.NumElements(), block_size_, Bytes(codes),
                                          absmax->flat<float>().data(), StreamOf(context)));
  }
};

template <typename T>
class GpuDequantizeKernel : public CodecKernel {
 public:
  using CodecKernel::CodecKernel;

  void Compute(OpKernelContext* context) override {
    const float* values = GetValues(context);
    if (values == nullptr) return;
    const Tensor& codes = context->input(0);
    const Tensor& absmax = context->input(1);
    if (!CheckAbsmax(context, codes, absmax)) return;
    Tensor* x;
    OP_REQUIRES_OK(context, context->allocate_output(0, codes.shape(), &x));
    Check(context, eightbit_cuda_dequantize(kKind<T>, values, Bytes(codes), absmax.flat<float>().data(),
                                            codes.NumElements(), block_size_, x->data(), StreamOf(context)));
  }
};

template <typename T>
class GpuPackKernel : public CodecKernel {
 public:
  using CodecKernel::CodecKernel;

  void Compute(OpKernelContext* context) override {
    const float* values = GetValues(context);
    if (values == nullptr) return;
    const int64_t ranks = GetInteger(context, "ranks", 1, kMaxRanks);
    if (ranks < 0) return;
    const int64_t rank = GetInteger(context, "rank", 0, ranks);
    if (rank < 0) return;
    OpInputList tensors;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    const std::vector<int64_t> sizes = SizesOf(tensors);
    const Layout layout(sizes, ranks, block_size_);
    Tensor* messages;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({ranks, layout.chunk_bytes}), &messages));
    Check(context, eightbit_cuda_pack(kKind<T>, values, DataOf(tensors).data(), sizes.data(), sizes.size(), ranks, rank,
                                      block_size_, Bytes(messages), StreamOf(context)));
  }
};

template <typename T>
class GpuReduceKernel : public CodecKernel {
 public:
  using CodecKernel::CodecKernel;

  void Compute(OpKernelContext* context) override {
    const float* values = GetValues(context);
    if (values == nullptr) return;
    OpInputList tensors;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    const std::vector<int64_t> sizes = SizesOf(tensors);
    const Tensor& received = context->input(0);
    if (!CheckMessages(context, "received", received, sizes)) return;
    const int64_t ranks = received.dim_size(0), rank = GetInteger(context, "rank", 0, ranks);
    if (rank < 0) return;
    Tensor* message;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({received.dim_size(1)}), &message));
    Check(context, eightbit_cuda_reduce(kKind<T>, values, DataOf(tensors).data(), sizes.data(), sizes.size(), ranks,
                                        rank, block_size_, Bytes(received), Bytes(message), StreamOf(context)));
  }
};

template <typename T>
class GpuUnpackKernel : public CodecKernel {
 public:
  using CodecKernel::CodecKernel;

  void Compute(OpKernelContext* context) override {
    const float* values = GetValues(context);
    if (values == nullptr) return;
    OpInputList like;
    OP_REQUIRES_OK(context, context->input_list("like", &like));
    const std::vector<int64_t> sizes = SizesOf(like);
    const Tensor& gathered = context->input(0);
    if (!CheckMessages(context, "gathered", gathered, sizes)) return;
    const Tensor* scale;
    OP_REQUIRES_OK(context, context->input("scale", &scale));
    OP_REQUIRES(context, scale->dims() == 0, tensorflow::errors::InvalidArgument("scale must be a scalar"));
    OpOutputList outputs;
    OP_REQUIRES_OK(context, context->output_list("outputs", &outputs));
    std::vector<void*> data;
    for (int i = 0; i < like.size(); ++i) {
      Tensor* output;
      OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({1 + i}, i, like[i].shape(), &output));
      data.push_back(output->data());
    }
    Check(context, eightbit_cuda_unpack(kKind<T>, values, data.data(), sizes.data(), sizes.size(), gathered.dim_size(0),
                                        block_size_, Bytes(gathered), scale->scalar<float>()(), StreamOf(context)));
  }
};

#define EIGHTBIT_REGISTER(T)                                                                                \
  REGISTER_KERNEL_BUILDER(Name("EightBitQuantize").Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T"),   \
                          GpuQuantizeKernel<T>);                                                            \
  REGISTER_KERNEL_BUILDER(Name("EightBitDequantize").Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T"), \
                          GpuDequantizeKernel<T>);                                                          \
  REGISTER_KERNEL_BUILDER(Name("EightBitPack")                                                              \
                              .Device(tensorflow::DEVICE_GPU)                                               \
                              .TypeConstraint<T>("T")                                                       \
                              .HostMemory("ranks")                                                          \
                              .HostMemory("rank"),                                                          \
                          GpuPackKernel<T>);                                                                \
  REGISTER_KERNEL_BUILDER(                                                                                  \
      Name("EightBitReduce").Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T").HostMemory("rank"),      \
      GpuReduceKernel<T>);                                                                                  \
  REGISTER_KERNEL_BUILDER(                                                                                  \
      Name("EightBitUnpack").Device(tensorflow::DEVICE_GPU).TypeConstraint<T>("T").HostMemory("scale"),     \
      GpuUnpackKernel<T>);

EIGHTBIT_REGISTER(Eigen::half)
EIGHTBIT_REGISTER(Eigen::bfloat16)
EIGHTBIT_REGISTER(float)
EIGHTBIT_REGISTER(double)

}  // namespace
}  // namespace hvd_eightbit
