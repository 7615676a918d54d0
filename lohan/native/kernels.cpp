// The arithmetic that runs on every parameter: optimizer updates, the split of a master weight, sums of squares.
//
// Each function works on contiguous arrays, single-threaded: the caller runs several of them at once on its own threads.
// The same input gives the same bits on every instruction set. For that, all operations are elementwise IEEE fp32 in the
// order written here, compiled without FMA contraction and without fast-math, and sums have a fixed order of additions.
//
// A split master is an fp32 weight stored as the bf16 weight that the model computes with and 16 remaining bits:
//     hi = (bits + 0x8000) >> 16        bf16, the fp32 value rounded half up in magnitude
//     lo = bits - (hi << 16)            int16, so that bits = (hi << 16) + lo, modulo 2^32, for every pattern of bits
//
// Every kernel is compiled once per instruction set, as lohan_<kernel>_<isa>; the caller picks one by lohan_best_isa.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

namespace {

// The scalars of an update, already rounded to fp32. The fields are mirrored by ctypes structures in __init__.py.
struct AdamW {
    float clip;                     // the gradient is multiplied by this first
    float keep;                     // 1 - lr * weight_decay
    float gradient_weight;          // 1 - beta1
    float beta2;
    float square_weight;            // 1 - beta2
    float root_bias_correction2;    // sqrt(1 - beta2^step)
    float eps;
    float step_size;                // lr / (1 - beta1^step)
};

struct Sgd {
    float clip;
    float weight_decay;
    float momentum;
    float lr;
};

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE float widen(uint16_t bf16) { return float_of(uint32_t(bf16) << 16); }
INLINE float widen(float value) { return value; }

// Master weights in their two forms: one array of fp32, or two of 16 bits.
struct Plain {
    using Gradient = float;
    float* __restrict weight;

    INLINE float load(const Plain& p, size_t i) { return p.weight[i]; }
    INLINE void store(const Plain& p, size_t i, float value) { p.weight[i] = value; }
};

struct Split {
    using Gradient = uint16_t;
    uint16_t* __restrict weight;
    int16_t* __restrict rest;

    INLINE float load(const Split& p, size_t i) {
        return float_of((uint32_t(p.weight[i]) << 16) + uint32_t(int32_t(p.rest[i])));
    }
    INLINE void store(const Split& p, size_t i, float value) {
        const uint32_t bits = bits_of(value);
        p.weight[i] = uint16_t((bits + 0x8000u) >> 16);
        p.rest[i] = int16_t(uint16_t(bits));    // the low half of bits - (hi << 16) is the low half of bits
    }
};

// torch.optim.AdamW, operation by operation; see lohan/optim/reference.py for the same in torch.
template <class Master>
INLINE void adamw(Master master, const typename Master::Gradient* __restrict gradient, float* __restrict mean,
                  float* __restrict square, const AdamW& scalars, size_t num) {
    const AdamW s = scalars;
    // lerp from the nearer end, as torch does: exact at both ends
    const bool near_mean = s.gradient_weight < 0.5f;
    const float pull = near_mean ? s.gradient_weight : s.gradient_weight - 1.0f;
    for (size_t i = 0; i < num; i++) {
        const float g = widen(gradient[i]) * s.clip;
        float p = Master::load(master, i) * s.keep;
        const float m = (near_mean ? mean[i] : g) + pull * (g - mean[i]);
        const float v = square[i] * s.beta2 + (s.square_weight * g) * g;
        const float denominator = std::sqrt(v) / s.root_bias_correction2 + s.eps;
        p = p - (s.step_size * m) / denominator;
        mean[i] = m;
        square[i] = v;
        Master::store(master, i, p);
    }
}

// torch.optim.SGD without dampening and Nesterov; a velocity of zeros makes the first step's velocity its gradient.
template <class Master>
INLINE void sgd(Master master, const typename Master::Gradient* __restrict gradient, float* __restrict velocity,
                const Sgd& scalars, size_t num) {
    const Sgd s = scalars;
    for (size_t i = 0; i < num; i++) {
        const float p = Master::load(master, i);
        const float g = widen(gradient[i]) * s.clip + s.weight_decay * p;
        const float v = velocity[i] * s.momentum + g;
        velocity[i] = v;
        Master::store(master, i, p - s.lr * v);
    }
}

INLINE void join(Split parts, float* __restrict value, size_t num) {
    for (size_t i = 0; i < num; i++) value[i] = Split::load(parts, i);
}

INLINE void split(const float* __restrict value, Split parts, size_t num) {
    for (size_t i = 0; i < num; i++) Split::store(parts, i, value[i]);
}

// Element i is added to lane i % LANES; then the upper half of the lanes is folded onto the lower until one is left.
// A square of two fp32 values is exact in fp64, so that only the additions round.
constexpr size_t LANES = 32;

template <class Value>
INLINE double sum_of_squares(const Value* __restrict values, size_t num) {
    double lanes[LANES] = {};
    const size_t whole = num - num % LANES;
    for (size_t i = 0; i < whole; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) {
            const double x = widen(values[i + lane]);
            lanes[lane] += x * x;
        }
    for (size_t lane = 0; lane < num - whole; lane++) {
        const double x = widen(values[whole + lane]);
        lanes[lane] += x * x;
    }
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

}  // namespace

#define KERNELS(ISA, TARGET)                                                                                              \
    EXPORT TARGET void lohan_adamw_split_##ISA(uint16_t* weight, int16_t* rest, const uint16_t* gradient, float* mean,    \
                                               float* square, const AdamW* scalars, size_t num) {                         \
        adamw(Split{weight, rest}, gradient, mean, square, *scalars, num);                                                \
    }                                                                                                                     \
    EXPORT TARGET void lohan_adamw_plain_##ISA(float* weight, const float* gradient, float* mean, float* square,          \
                                               const AdamW* scalars, size_t num) {                                        \
        adamw(Plain{weight}, gradient, mean, square, *scalars, num);                                                      \
    }                                                                                                                     \
    EXPORT TARGET void lohan_sgd_split_##ISA(uint16_t* weight, int16_t* rest, const uint16_t* gradient, float* velocity,  \
                                             const Sgd* scalars, size_t num) {                                            \
        sgd(Split{weight, rest}, gradient, velocity, *scalars, num);                                                      \
    }                                                                                                                     \
    EXPORT TARGET void lohan_sgd_plain_##ISA(float* weight, const float* gradient, float* velocity, const Sgd* scalars,   \
                                             size_t num) {                                                                \
        sgd(Plain{weight}, gradient, velocity, *scalars, num);                                                            \
    }                                                                                                                     \
    EXPORT TARGET void lohan_join_##ISA(uint16_t* weight, int16_t* rest, float* value, size_t num) {                      \
        join(Split{weight, rest}, value, num);                                                                            \
    }                                                                                                                     \
    EXPORT TARGET void lohan_split_##ISA(const float* value, uint16_t* weight, int16_t* rest, size_t num) {               \
        split(value, Split{weight, rest}, num);                                                                           \
    }                                                                                                                     \
    EXPORT TARGET double lohan_sum_of_squares_bf16_##ISA(const uint16_t* values, size_t num) {                            \
        return sum_of_squares(values, num);                                                                               \
    }                                                                                                                     \
    EXPORT TARGET double lohan_sum_of_squares_fp32_##ISA(const float* values, size_t num) {                               \
        return sum_of_squares(values, num);                                                                               \
    }

KERNELS(base, )
#if defined(__x86_64__)
KERNELS(avx2, __attribute__((target("avx2"))))
KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))))
#endif

// The names of the instruction sets that this processor can run, separated by spaces, the fastest last.
EXPORT const char* lohan_instruction_sets() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512) return "base avx2 avx512";
    if (avx2) return "base avx2";
#endif
    return "base";
}
