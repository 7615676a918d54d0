// The arithmetic that runs on every parameter: optimizer updates with the checksums of what they read and write, the split of a
// master weight, sums of squares.
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

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "xxh3.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

namespace {

// All structures are mirrored by ctypes structures in update.py.

// What an update works on: arrays of as many elements as the caller has.
struct Arrays {
    void* weight;              // bf16, or fp32
    int16_t* rest;             // of split masters
    const void* gradient;      // of the weight's type
    float* state[2];
};

// The scalars of an update, already rounded to fp32.
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

    INLINE Plain at(const Arrays& a, size_t start) { return {static_cast<float*>(a.weight) + start}; }
    INLINE float load(const Plain& p, size_t i) { return p.weight[i]; }
    INLINE void store(const Plain& p, size_t i, float value) { p.weight[i] = value; }
};

struct Split {
    using Gradient = uint16_t;
    uint16_t* __restrict weight;
    int16_t* __restrict rest;

    INLINE Split at(const Arrays& a, size_t start) { return {static_cast<uint16_t*>(a.weight) + start, a.rest + start}; }
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

// An update of elements [start, stop) with its own scalars.
using Rule = void (*)(const Arrays&, const void* scalars, size_t start, size_t num);
struct Part {
    size_t start;
    size_t stop;
    const void* scalars;
};

// One array, and the checksums of its grains before and after an update; null where nobody wants them.
struct Plane {
    const uint8_t* data;
    size_t element_bytes;
    uint64_t* before;
    uint64_t* after;
};
struct Checked {
    size_t num;
    size_t grain;    // elements; the last grain may be shorter. Both are multiples of TILE
    size_t num_planes;
    const Plane* planes;
};
constexpr size_t MAX_PLANES = 4;
constexpr size_t TILE = 512;    // elements: with 1024 an update takes 1.4 times as long, with 4096 1.8 times

// Tile by tile: sum what is there, update it, sum what is there now. Memory is read once for all three.
template <class Blocks>
INLINE void update_checked(Blocks blocks, Rule rule, const Arrays& arrays, const Part* parts, size_t num_parts,
                           const Checked& checked) {
    size_t next = 0;    // the first part that does not end before this tile
    for (size_t first = 0, grain = 0; first < checked.num; first += checked.grain, grain++) {
        const size_t end = std::min(first + checked.grain, checked.num);
        xxh3::State before[MAX_PLANES], after[MAX_PLANES];
        for (size_t i = 0; i < checked.num_planes; i++) before[i] = after[i] = xxh3::start();
        for (size_t start = first; start < end; start += TILE) {
            const size_t stop = start + TILE;
            const auto sum = [&](xxh3::State& state, const Plane& plane) {
                blocks(state, plane.data + start * plane.element_bytes, TILE * plane.element_bytes / xxh3::BLOCK, stop == end);
            };
            for (size_t i = 0; i < checked.num_planes; i++)
                if (checked.planes[i].before) sum(before[i], checked.planes[i]);
            while (next < num_parts && parts[next].stop <= start) next++;
            for (size_t i = next; i < num_parts && parts[i].start < stop; i++) {
                const size_t from = std::max(parts[i].start, start), to = std::min(parts[i].stop, stop);
                rule(arrays, parts[i].scalars, from, to - from);
            }
            for (size_t i = 0; i < checked.num_planes; i++)
                if (checked.planes[i].after) sum(after[i], checked.planes[i]);
        }
        for (size_t i = 0; i < checked.num_planes; i++) {
            const Plane& plane = checked.planes[i];
            if (plane.before) plane.before[grain] = xxh3::finish(before[i], (end - first) * plane.element_bytes);
            if (plane.after) plane.after[grain] = xxh3::finish(after[i], (end - first) * plane.element_bytes);
        }
    }
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

#define KERNELS(ISA, TARGET)                                                                                                   \
    EXPORT TARGET void lohan_adamw_split_##ISA(const Arrays& a, const void* scalars, size_t start, size_t num) {               \
        adamw(Split::at(a, start), static_cast<const uint16_t*>(a.gradient) + start, a.state[0] + start, a.state[1] + start,   \
              *static_cast<const AdamW*>(scalars), num);                                                                       \
    }                                                                                                                          \
    EXPORT TARGET void lohan_adamw_plain_##ISA(const Arrays& a, const void* scalars, size_t start, size_t num) {               \
        adamw(Plain::at(a, start), static_cast<const float*>(a.gradient) + start, a.state[0] + start, a.state[1] + start,      \
              *static_cast<const AdamW*>(scalars), num);                                                                       \
    }                                                                                                                          \
    EXPORT TARGET void lohan_sgd_split_##ISA(const Arrays& a, const void* scalars, size_t start, size_t num) {                 \
        sgd(Split::at(a, start), static_cast<const uint16_t*>(a.gradient) + start, a.state[0] + start,                         \
            *static_cast<const Sgd*>(scalars), num);                                                                           \
    }                                                                                                                          \
    EXPORT TARGET void lohan_sgd_plain_##ISA(const Arrays& a, const void* scalars, size_t start, size_t num) {                 \
        sgd(Plain::at(a, start), static_cast<const float*>(a.gradient) + start, a.state[0] + start,                            \
            *static_cast<const Sgd*>(scalars), num);                                                                           \
    }                                                                                                                          \
    EXPORT TARGET void lohan_update_checked_##ISA(Rule rule, const Arrays& arrays, const Part* parts, size_t num_parts,        \
                                                  const Checked& checked) {                                                    \
        update_checked(xxh3::blocks_##ISA, rule, arrays, parts, num_parts, checked);                                           \
    }                                                                                                                          \
    EXPORT TARGET void lohan_join_##ISA(uint16_t* weight, int16_t* rest, float* value, size_t num) {                           \
        join(Split{weight, rest}, value, num);                                                                                 \
    }                                                                                                                          \
    EXPORT TARGET void lohan_split_##ISA(const float* value, uint16_t* weight, int16_t* rest, size_t num) {                    \
        split(value, Split{weight, rest}, num);                                                                                \
    }                                                                                                                          \
    EXPORT TARGET double lohan_sum_of_squares_bf16_##ISA(const uint16_t* values, size_t num) {                                 \
        return sum_of_squares(values, num);                                                                                    \
    }                                                                                                                          \
    EXPORT TARGET double lohan_sum_of_squares_fp32_##ISA(const float* values, size_t num) {                                    \
        return sum_of_squares(values, num);                                                                                    \
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
