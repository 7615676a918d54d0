// XXH3 with 64 bits, seed 0, of whole blocks of 1024 bytes, block by block: what the package `xxhash` computes of the same
// bytes, but while they are in the cache. For each instruction set one function that takes in blocks.
//
//     start     eight sums
//     blocks    every stripe of 64 bytes is mixed with the secret into the sums, which are scrambled after each block but the
//               last
//     finish    the sums are folded into one number

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
// gcc 12 warns of variables in its own header that are meant to be undefined
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

namespace xxh3 {

constexpr size_t STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES, SUMS = 8;
constexpr size_t LAST_STRIPE_SECRET = 121, SCRAMBLE_SECRET = 128, FINISH_SECRET = 11;
constexpr uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u;
constexpr uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u, PRIME_FINISH = 0x165667919E3779F9u;

// the algorithm's own constant
alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct State {
    alignas(64) uint64_t sums[SUMS];
};

inline State start() {
    return {{PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1}};
}

inline uint64_t word(const uint8_t* bytes) {
    uint64_t value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

inline uint64_t finish(const State& state, uint64_t num_bytes) {
    uint64_t result = num_bytes * PRIME64_1;
    for (size_t i = 0; i < SUMS; i += 2) {
        const uint8_t* key = SECRET + FINISH_SECRET + 8 * i;
        const auto product = static_cast<unsigned __int128>(state.sums[i] ^ word(key)) * (state.sums[i + 1] ^ word(key + 8));
        result += uint64_t(product) ^ uint64_t(product >> 64);
    }
    result ^= result >> 37;
    result *= PRIME_FINISH;
    return result ^ (result >> 32);
}

// `ends`: the last of these blocks is the last of all.
inline void blocks_base(State& state, const uint8_t* data, size_t num, bool ends) {
    uint64_t* sums = state.sums;
    const auto add = [sums](const uint8_t* stripe, const uint8_t* key) {
        for (size_t i = 0; i < SUMS; i++) {
            const uint64_t value = word(stripe + 8 * i), mixed = value ^ word(key + 8 * i);
            sums[i ^ 1] += value;
            sums[i] += (mixed & 0xffffffffu) * (mixed >> 32);
        }
    };
    for (; num > 0; num--, data += BLOCK) {
        for (size_t i = 0; i < STRIPES - 1; i++) add(data + i * STRIPE, SECRET + 8 * i);
        const uint8_t* last = data + (STRIPES - 1) * STRIPE;
        if (ends && num == 1) return add(last, SECRET + LAST_STRIPE_SECRET);
        add(last, SECRET + 8 * (STRIPES - 1));
        for (size_t i = 0; i < SUMS; i++)
            sums[i] = (sums[i] ^ (sums[i] >> 47) ^ word(SECRET + SCRAMBLE_SECRET + 8 * i)) * PRIME32_1;
    }
}

#if defined(__x86_64__)

// The same with one vector of eight sums, or two of four.
#define XXH3_BLOCKS(ISA, TARGET, VECTOR, NUM, BITS, XOR)                                                                      \
    TARGET inline void add_##ISA(VECTOR* sums, const uint8_t* stripe, const uint8_t* key) {                                   \
        for (size_t i = 0; i < NUM; i++) {                                                                                    \
            const VECTOR value = _mm##BITS##_loadu_si##BITS(reinterpret_cast<const VECTOR*>(stripe) + i);                     \
            const VECTOR mixed = XOR(value, _mm##BITS##_loadu_si##BITS(reinterpret_cast<const VECTOR*>(key) + i));            \
            const VECTOR product = _mm##BITS##_mul_epu32(mixed, _mm##BITS##_srli_epi64(mixed, 32));                           \
            sums[i] = _mm##BITS##_add_epi64(sums[i], _mm##BITS##_add_epi64(product, SWAP_##ISA(value)));                      \
        }                                                                                                                     \
    }                                                                                                                         \
    TARGET inline void blocks_##ISA(State& state, const uint8_t* data, size_t num, bool ends) {                               \
        VECTOR sums[NUM];                                                                                                     \
        std::memcpy(sums, state.sums, sizeof sums);                                                                           \
        const VECTOR prime = _mm##BITS##_set1_epi32(int(PRIME32_1));                                                          \
        for (; num > 0; num--, data += BLOCK) {                                                                               \
            _Pragma("GCC unroll 15") for (size_t i = 0; i < STRIPES - 1; i++)                                                 \
                add_##ISA(sums, data + i * STRIPE, SECRET + 8 * i);                                                           \
            const uint8_t* last = data + (STRIPES - 1) * STRIPE;                                                              \
            if (ends && num == 1) {                                                                                           \
                add_##ISA(sums, last, SECRET + LAST_STRIPE_SECRET);                                                           \
                break;                                                                                                        \
            }                                                                                                                 \
            add_##ISA(sums, last, SECRET + 8 * (STRIPES - 1));                                                                \
            for (size_t i = 0; i < NUM; i++) {                                                                                \
                const VECTOR key = _mm##BITS##_loadu_si##BITS(reinterpret_cast<const VECTOR*>(SECRET + SCRAMBLE_SECRET) + i); \
                const VECTOR mixed = XOR(XOR(sums[i], _mm##BITS##_srli_epi64(sums[i], 47)), key);                             \
                const VECTOR high = _mm##BITS##_mul_epu32(_mm##BITS##_srli_epi64(mixed, 32), prime);                          \
                sums[i] = _mm##BITS##_add_epi64(_mm##BITS##_mul_epu32(mixed, prime), _mm##BITS##_slli_epi64(high, 32));       \
            }                                                                                                                 \
        }                                                                                                                     \
        std::memcpy(state.sums, sums, sizeof sums);                                                                           \
    }

#define SWAP_avx2(value) _mm256_shuffle_epi32(value, 0x4E)
#define SWAP_avx512(value) _mm512_shuffle_epi32(value, _MM_PERM_ENUM(0x4E))
XXH3_BLOCKS(avx2, __attribute__((target("avx2"))), __m256i, 2, 256, _mm256_xor_si256)
XXH3_BLOCKS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), __m512i, 1, 512, _mm512_xor_si512)

#endif

}  // namespace xxh3
