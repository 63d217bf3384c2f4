// The five kernels on the GPU: plain C launchers that take a stream. No TensorFlow headers.
//
// A launcher only enqueues work: no synchronisation, no allocation, no copy from the host. What the kernels need to
// know of the tensors travels in their parameters, so that nothing has to outlive the call. It returns the first CUDA
// error, 0 for none.

#ifndef HVD_EIGHTBIT_TF_OPS_CUDA_KERNELS_H_
#define HVD_EIGHTBIT_TF_OPS_CUDA_KERNELS_H_

#include <stdint.h>

typedef struct CUstream_st* cudaStream_t;

#ifdef __cplusplus
extern "C" {
#endif

enum EightBitKind { kEightBitHalf, kEightBitBfloat16, kEightBitFloat, kEightBitDouble };

// values: 256 floats. x, codes, absmax, values, messages and what tensors[i] points to are in device memory; the arrays
// tensors and sizes themselves, of `count` elements, in host memory. block_size 0: one block for a tensor's whole part
// of a chunk. Messages are laid out as wire.h says.

int eightbit_cuda_quantize(enum EightBitKind kind, const float* values, const void* x, int64_t elements,
                           int64_t block_size, uint8_t* codes, float* absmax, cudaStream_t stream);

int eightbit_cuda_dequantize(enum EightBitKind kind, const float* values, const uint8_t* codes, const float* absmax,
                             int64_t elements, int64_t block_size, void* x, cudaStream_t stream);

int eightbit_cuda_pack(enum EightBitKind kind, const float* values, const void* const* tensors, const int64_t* sizes,
                       int64_t count, int64_t ranks, int64_t rank, int64_t block_size, uint8_t* messages,
                       cudaStream_t stream);

int eightbit_cuda_reduce(enum EightBitKind kind, const float* values, const void* const* tensors, const int64_t* sizes,
                         int64_t count, int64_t ranks, int64_t rank, int64_t block_size, const uint8_t* received,
                         uint8_t* message, cudaStream_t stream);

int eightbit_cuda_unpack(enum EightBitKind kind, const float* values, void* const* tensors, const int64_t* sizes,
                         int64_t count, int64_t ranks, int64_t block_size, const uint8_t* gathered, float scale,
                         cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif  // HVD_EIGHTBIT_TF_OPS_CUDA_KERNELS_H_
