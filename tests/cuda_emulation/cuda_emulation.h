// A stand-in for CUDA's thread model, so that tf_ops/cuda_kernels.cu can be compiled by g++ and executed without a GPU.
//
// The threads of a block are fibers. One runs until it comes to a barrier or a shuffle, and then another: which one,
// the order says, so that a kernel that forgets a barrier gives another result in some order. Blocks run one after
// another. What no GPU would forgive is an error of the launch: a barrier that not all threads come to, and a wide
// access to an address that is not aligned for it.

#ifndef HVD_EIGHTBIT_TESTS_CUDA_EMULATION_H_
#define HVD_EIGHTBIT_TESTS_CUDA_EMULATION_H_

#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <random>
#include <set>
#include <vector>

#include "Eigen/Core"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__
#define __shared__ static  // blocks run one after another

namespace emulation {

enum Error { kNone = 0, kInvalidValue = 1, kBarrierNotReached = 1001, kMisaligned = 1002 };
enum Order { kLowestFirst, kHighestFirst, kRandom };

struct Index {
  unsigned x;
};

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 128 * 1024;

class Machine {
 public:
  Order order = kLowestFirst;
  Error error = kNone;
  Index thread, block, grid;

  void Launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
    grid.x = blocks;
    kernel_ = &kernel;
    fibers_.resize(threads);
    for (block.x = 0; block.x < blocks && error == kNone; ++block.x) RunBlock();
  }

  void WaitForBlock() { Wait(fibers_.size()); }

  // Waits until all threads of the group that this one belongs to, of that many, are here.
  void Wait(unsigned group_size) {
    Fiber& fiber = fibers_[thread.x];
    fiber.waits_for = group_size;
    if (_setjmp(fiber.resume) == 0) _longjmp(scheduler_resume_, 1);
  }

  uint32_t Exchange(uint32_t value, unsigned lane_mask) {
    Fiber& fiber = fibers_[thread.x];
    fiber.value = value;
    Wait(kWarp);
    const uint32_t other = fibers_[thread.x ^ lane_mask].value;
    Wait(kWarp);
    return other;
  }

  void Fail(Error what) {
    if (error == kNone) error = what;
  }

 private:
  struct Fiber {
    ucontext_t context;  // to start with; then setjmp and longjmp, which do without system calls
    jmp_buf resume;
    std::vector<char> stack = std::vector<char>(kStack);
    bool started, ended;
    unsigned waits_for;  // size of the group, 0 if it can run
    uint32_t value;
  };

  static void Enter();

  void RunBlock() {
    ready_.clear();
    for (unsigned i = 0; i < fibers_.size(); ++i) {
      fibers_[i].started = fibers_[i].ended = false;
      fibers_[i].waits_for = 0;
      ready_.insert(ready_.end(), i);
    }
    while (!ready_.empty()) {
      thread.x = Next();
      Fiber& fiber = fibers_[thread.x];
      if (_setjmp(scheduler_resume_) == 0) {
        if (fiber.started) _longjmp(fiber.resume, 1);
        Start(&fiber);
      }
      ready_.erase(thread.x);
      Release(thread.x);
    }
    for (const Fiber& fiber : fibers_) {
      if (!fiber.ended) Fail(kBarrierNotReached);
    }
  }

  void Start(Fiber* fiber) {
    fiber->started = true;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.data();
    fiber->context.uc_stack.ss_size = fiber->stack.size();
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, Enter, 0);
    setcontext(&fiber->context);
  }

  unsigned Next() {
    if (order == kLowestFirst) return *ready_.begin();
    if (order == kHighestFirst) return *ready_.rbegin();
    const auto at = ready_.lower_bound(random_() % fibers_.size());
    return at == ready_.end() ? *ready_.begin() : *at;
  }

  // Lets the group of this thread go on if all of it waits.
  void Release(unsigned i) {
    const unsigned size = fibers_[i].waits_for;
    if (size == 0) return;
    const unsigned first = i / size * size;
    for (unsigned k = first; k < first + size; ++k) {
      if (fibers_[k].ended || fibers_[k].waits_for != size) return;
    }
    for (unsigned k = first; k < first + size; ++k) {
      fibers_[k].waits_for = 0;
      ready_.insert(k);
    }
  }

  std::vector<Fiber> fibers_;
  std::set<unsigned> ready_;
  jmp_buf scheduler_resume_;
  const std::function<void()>* kernel_;
  std::mt19937 random_{1};
};

inline Machine machine;

inline void Machine::Enter() {
  (*machine.kernel_)();
  machine.fibers_[machine.thread.x].ended = true;
  _longjmp(machine.scheduler_resume_, 1);
}

}  // namespace emulation

#define threadIdx emulation::machine.thread
#define blockIdx emulation::machine.block
#define gridDim emulation::machine.grid
#define EIGHTBIT_LAUNCH(kernel, grid, threads, stream, ...) \
  emulation::machine.Launch(grid, threads, [&] { (kernel)(__VA_ARGS__); })
#define EIGHTBIT_CHECK_ALIGNED(pointer, bytes) \
  if (reinterpret_cast<uintptr_t>(pointer) % (bytes) != 0) emulation::machine.Fail(emulation::kMisaligned)

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

template <typename T>
void __stcg(T* to, T value) {
  *to = value;
}

inline void __syncthreads() { emulation::machine.WaitForBlock(); }

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int lane_mask) {
  return emulation::machine.Exchange(value, lane_mask);
}

template <typename T>
T atomicMax(T* address, T value) {
  const T old = *address;
  if (value > old) *address = value;
  return old;
}

using __half = Eigen::half;
inline __half __ushort_as_half(uint16_t bits) { return Eigen::numext::bit_cast<Eigen::half>(bits); }
inline uint16_t __half_as_ushort(__half x) { return Eigen::numext::bit_cast<uint16_t>(x); }
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return static_cast<Eigen::half>(x); }

constexpr int cudaErrorInvalidValue = emulation::kInvalidValue;
constexpr int cudaDevAttrMultiProcessorCount = 0;
inline int cudaGetDevice(int*) { return 0; }
inline int cudaDeviceGetAttribute(int* value, int, int) { return *value = 1, 0; }
inline int cudaGetLastError() {
  const int error = emulation::machine.error;
  emulation::machine.error = emulation::kNone;
  return error;
}
template <typename Stream>
int cudaMemsetAsync(void* to, int value, size_t size, Stream) {
  memset(to, value, size);
  return 0;
}

extern "C" inline void emulation_set_order(int order) __attribute__((used));
extern "C" inline void emulation_set_order(int order) {
  emulation::machine.order = static_cast<emulation::Order>(order);
}

#endif  // HVD_EIGHTBIT_TESTS_CUDA_EMULATION_H_
