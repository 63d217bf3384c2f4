// TensorFlow kernels for the CPU: check, allocate, call. And what those for the GPU share with them.

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "agreement.h"
#include "cpu_kernels.h"
#include "op_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "wire.h"

namespace hvd_eightbit {

namespace errors = tensorflow::errors;

int64_t GetInteger(tensorflow::OpKernelContext* context, const char* name, int64_t least, int64_t limit) {
  const tensorflow::Tensor* value;
  tensorflow::Status status = context->input(name, &value);
  if (status.ok() && !tensorflow::TensorShapeUtils::IsScalar(value->shape())) {
    status = errors::InvalidArgument(name, " has shape ", value->shape().DebugString(), "; a scalar is needed");
  }
  if (status.ok()) {
    const int64_t integer = value->scalar<tensorflow::int32>()();
    if (integer >= least && integer < limit) return integer;
    status = errors::InvalidArgument(name, "=", integer, " must be at least ", least, " and below ", limit);
  }
  context->CtxFailure(status);
  return -1;
}

CodecKernel::CodecKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
  OP_REQUIRES_OK(context, context->GetAttr("block_size", &block_size_));
}

const float* CodecKernel::GetValues(tensorflow::OpKernelContext* context) {
  const tensorflow::Tensor* values;
  tensorflow::Status status = context->input("values", &values);
  if (status.ok() && (values->dims() != 1 || values->NumElements() != kCodes)) {
    status = errors::InvalidArgument("values has shape ", values->shape().DebugString(), "; a data type has ", kCodes,
                                     " values");
  }
  if (status.ok()) return values->flat<float>().data();
  context->CtxFailure(status);
  return nullptr;
}

bool CodecKernel::CheckAbsmax(tensorflow::OpKernelContext* context, const tensorflow::Tensor& codes,
                              const tensorflow::Tensor& absmax) {
  const int64_t blocks = Blocks(codes.NumElements(), block_size_);
  if (absmax.dims() == 1 && absmax.NumElements() == blocks) return true;
  context->CtxFailure(errors::InvalidArgument("absmax has shape ", absmax.shape().DebugString(), "; ",
                                              codes.NumElements(), " codes with block_size=", block_size_, " have ",
                                              blocks, " blocks"));
  return false;
}

bool CodecKernel::CheckMessages(tensorflow::OpKernelContext* context, const char* name,
                                const tensorflow::Tensor& messages, const std::vector<int64_t>& sizes) {
  if (messages.dims() != 2 || messages.dim_size(0) == 0) {
    context->CtxFailure(errors::InvalidArgument(name, " has shape ", messages.shape().DebugString(),
                                                "; a row of bytes for each rank is needed"));
    return false;
  }
  const Layout layout(sizes, messages.dim_size(0), block_size_);
  if (messages.dim_size(1) == layout.chunk_bytes) return true;
  context->CtxFailure(errors::InvalidArgument(
      name, " has ", messages.dim_size(1), " bytes a rank; for these tensors, block_size=", block_size_, " and ",
      layout.ranks, " ranks a message has ", layout.chunk_bytes, ": do all ranks use the same shapes and settings?"));
  return false;
}

namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::TensorShapeUtils;

cpu::ParallelFor ThreadPoolOf(OpKernelContext* context) {
  auto* workers = context->device()->tensorflow_cpu_worker_threads()->workers;
  return [workers](int64_t total, int64_t cost, const std::function<void(int64_t, int64_t)>& work) {
    workers->ParallelFor(total, cost, work);
  };
}

template <typename T>
std::vector<const T*> DataOf(const OpInputList& tensors) {
  std::vector<const T*> data;
  for (const Tensor& tensor : tensors) data.push_back(tensor.flat<T>().data());
  return data;
}

// A codec kernel with a table that is built once, for as long as the values stay the same.
class TableKernel : public CodecKernel {
 public:
  using CodecKernel::CodecKernel;

 protected:
  // The table of the values; null, with the context's status set, if there is none.
  std::shared_ptr<const cpu::Table> GetTable(OpKernelContext* context) {
    const float* values = GetValues(context);
    if (values == nullptr) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    if (table_ == nullptr || !table_->Holds(values)) table_ = std::make_shared<cpu::Table>(values);
    return table_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<const cpu::Table> table_;
};

template <typename T>
class QuantizeKernel : public TableKernel {
 public:
  using TableKernel::TableKernel;

  void Compute(OpKernelContext* context) override {
    const auto table = GetTable(context);
    if (table == nullptr) return;
    const Tensor& x = context->input(0);
    Tensor *codes, *absmax;
    OP_REQUIRES_OK(context, context->allocate_output(0, x.shape(), &codes));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({Blocks(x.NumElements(), block_size_)}), &absmax));
    cpu::Quantize(*table, x.flat<T>().data(), x.NumElements(), block_size_, Bytes(codes), absmax->flat<float>().data(),
                  ThreadPoolOf(context));
  }
};

template <typename T>
class DequantizeKernel : public TableKernel {
 public:
  using TableKernel::TableKernel;

  void Compute(OpKernelContext* context) override {
    const auto table = GetTable(context);
    if (table == nullptr) return;
    const Tensor& codes = context->input(0);
    const Tensor& absmax = context->input(1);
    if (!CheckAbsmax(context, codes, absmax)) return;
    Tensor* x;
    OP_REQUIRES_OK(context, context->allocate_output(0, codes.shape(), &x));
    cpu::Dequantize(*table, Bytes(codes), absmax.flat<float>().data(), codes.NumElements(), block_size_,
                    x->flat<T>().data(), ThreadPoolOf(context));
  }
};

template <typename T>
class PackKernel : public TableKernel {
 public:
  using TableKernel::TableKernel;

  void Compute(OpKernelContext* context) override {
    const auto table = GetTable(context);
    if (table == nullptr) return;
    const int64_t ranks = GetInteger(context, "ranks", 1, kMaxRanks);
    if (ranks < 0) return;
    const int64_t rank = GetInteger(context, "rank", 0, ranks);
    if (rank < 0) return;
    OpInputList tensors;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    const Layout layout(SizesOf(tensors), ranks, block_size_);
    Tensor* messages;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({ranks, layout.chunk_bytes}), &messages));
    cpu::Pack(*table, layout, DataOf<T>(tensors), rank, Bytes(messages), ThreadPoolOf(context));
  }
};

template <typename T>
class ReduceKernel : public TableKernel {
 public:
  using TableKernel::TableKernel;

  void Compute(OpKernelContext* context) override {
    const auto table = GetTable(context);
    if (table == nullptr) return;
    OpInputList tensors;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    const Tensor& received = context->input(0);
    if (!CheckMessages(context, "received", received, SizesOf(tensors))) return;
    const Layout layout(SizesOf(tensors), received.dim_size(0), block_size_);
    const int64_t rank = GetInteger(context, "rank", 0, layout.ranks);
    if (rank < 0) return;
    Tensor* message;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({layout.chunk_bytes}), &message));
    cpu::Reduce(*table, layout, DataOf<T>(tensors), rank, Bytes(received), Bytes(message), ThreadPoolOf(context));
  }
};

template <typename T>
class UnpackKernel : public TableKernel {
 public:
  using TableKernel::TableKernel;

  void Compute(OpKernelContext* context) override {
    const auto table = GetTable(context);
    if (table == nullptr) return;
    OpInputList like;
    OP_REQUIRES_OK(context, context->input_list("like", &like));
    const Tensor& gathered = context->input(0);
    if (!CheckMessages(context, "gathered", gathered, SizesOf(like))) return;
    const Tensor* scale;
    OP_REQUIRES_OK(context, context->input("scale", &scale));
    OP_REQUIRES(context, TensorShapeUtils::IsScalar(scale->shape()),
                errors::InvalidArgument("scale has shape ", scale->shape().DebugString(), "; a scalar is needed"));
    OpOutputList outputs;
    OP_REQUIRES_OK(context, context->output_list("outputs", &outputs));
    const Layout layout(SizesOf(like), gathered.dim_size(0), block_size_);
    std::vector<T*> data;
    for (int i = 0; i < like.size(); ++i) {
      // A gradient that nobody else needs makes room for its mean.
      Tensor* output;
      OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({1 + i}, i, like[i].shape(), &output));
      data.push_back(output->flat<T>().data());
    }
    cpu::Unpack(*table, layout, Bytes(gathered), scale->scalar<float>()(), data, ThreadPoolOf(context));
  }
};

template <typename T>
class ProbeKernel : public OpKernel {
 public:
  explicit ProbeKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
  }

  void Compute(OpKernelContext* context) override {
    const int64_t rank = GetInteger(context, "rank", 0, kMaxRanks);
    if (rank < 0) return;
    Tensor* probe;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({kProbe}), &probe));
    FillProbe(rank, fingerprint_, probe->flat<T>().data());
  }

 private:
  int64_t fingerprint_;
};

template <typename T>
class AgreedScaleKernel : public OpKernel {
 public:
  explicit AgreedScaleKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("fingerprint", &fingerprint_));
    OP_REQUIRES_OK(context, context->GetAttr("what", &what_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& reduced = context->input(0);
    OP_REQUIRES(context, reduced.NumElements() == kProbe,
                errors::InvalidArgument("8-bit compression of ", what_, ": the collective returned ",
                                        reduced.NumElements(), " of ", kProbe,
                                        " numbers. Only an allreduce can be compressed; hvd.reducescatter cannot"));
    const int64_t ranks = GetInteger(context, "ranks", 1, kMaxRanks);
    if (ranks < 0) return;
    double scale;
    const Agreement agreement = ReadProbe(reduced.flat<T>().data(), ranks, fingerprint_, &scale);
    OP_REQUIRES(context, agreement != Agreement::kNotASum,
                errors::InvalidArgument(
                    "8-bit compression of ", what_, ": the reduction was not a sum or an average over the ", ranks,
                    " ranks of the compressor's process set. Use op=hvd.Average or op=hvd.Sum (Min, Max, Product and "
                    "Adasum cannot be computed from 8-bit codes), and for a process set of your own give the same one "
                    "to the call and to EightBitCompressor(process_set=...)"));
    OP_REQUIRES(context, agreement != Agreement::kSettingsDiffer,
                errors::InvalidArgument("8-bit compression of ", what_,
                                        ": the ranks disagree on data_type, block_size, or the tensor's name, dtype or "
                                        "shape. All ranks must use the same"));
    Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    output->scalar<float>()() = static_cast<float>(scale);
  }

 private:
  int64_t fingerprint_;
  std::string what_;
};

// On a GPU too, with everything in host memory, so that a graph can be placed there as a whole.
#define EIGHTBIT_REGISTER_AGREEMENT(T)                                                                       \
  REGISTER_KERNEL_BUILDER(Name("EightBitProbe").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),       \
                          ProbeKernel<T>);                                                                   \
  REGISTER_KERNEL_BUILDER(Name("EightBitAgreedScale").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), \
                          AgreedScaleKernel<T>);                                                             \
  REGISTER_KERNEL_BUILDER(Name("EightBitProbe")                                                              \
                              .Device(tensorflow::DEVICE_GPU)                                                \
                              .TypeConstraint<T>("T")                                                        \
                              .HostMemory("rank")                                                            \
                              .HostMemory("probe"),                                                          \
                          ProbeKernel<T>);                                                                   \
  REGISTER_KERNEL_BUILDER(Name("EightBitAgreedScale")                                                        \
                              .Device(tensorflow::DEVICE_GPU)                                                \
                              .TypeConstraint<T>("T")                                                        \
                              .HostMemory("reduced")                                                         \
                              .HostMemory("ranks")                                                           \
                              .HostMemory("scale"),                                                          \
                          AgreedScaleKernel<T>);

EIGHTBIT_REGISTER_AGREEMENT(float)
EIGHTBIT_REGISTER_AGREEMENT(double)

#define EIGHTBIT_REGISTER(T)                                                                                          \
  REGISTER_KERNEL_BUILDER(Name("EightBitQuantize").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),             \
                          QuantizeKernel<T>);                                                                         \
  REGISTER_KERNEL_BUILDER(Name("EightBitDequantize").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),           \
                          DequantizeKernel<T>);                                                                       \
  REGISTER_KERNEL_BUILDER(Name("EightBitPack").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), PackKernel<T>); \
  REGISTER_KERNEL_BUILDER(Name("EightBitReduce").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),               \
                          ReduceKernel<T>);                                                                           \
  REGISTER_KERNEL_BUILDER(Name("EightBitUnpack").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"),               \
                          UnpackKernel<T>);

EIGHTBIT_REGISTER(Eigen::half)
EIGHTBIT_REGISTER(Eigen::bfloat16)
EIGHTBIT_REGISTER(float)
EIGHTBIT_REGISTER(double)

}  // namespace
}  // namespace hvd_eightbit
