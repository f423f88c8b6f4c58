// Backend for AVX2: vectors of 8 floats.
//
// Operations have the names and meanings of Highway's (google/highway). Functions that choose between two values keep
// NaN: an operand that is NaN is the second one of Min and Max.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "numbers.h"

namespace whimbrel {

constexpr int W = 8;           // floats of a vector
constexpr int PANEL = NV * W;  // columns of a panel
constexpr int MAX_ROWS = 6;    // of a product, whose sums fill the registers
constexpr int UNROLL = 4;      // of its innermost loop
constexpr i64 L1_UNITS = 192;  // units of a panel that stay in the L1 cache

using Floats = __m256;
using Ints = __m256i;
using Mask = __m256i;

inline Floats Zero() { return _mm256_setzero_ps(); }
inline Floats Set(float x) { return _mm256_set1_ps(x); }
inline Ints Set(i32 x) { return _mm256_set1_epi32(x); }
inline Mask FirstN(i64 n) {
    return _mm256_cmpgt_epi32(Set(static_cast<i32>(n > W ? W : n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats IfThenElse(Mask mask, Floats yes, Floats no) {
    return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(mask));
}
inline Floats IfThenElseZero(Mask mask, Floats yes) { return _mm256_and_ps(yes, _mm256_castsi256_ps(mask)); }

inline Floats LoadU(const float* p) { return _mm256_loadu_ps(p); }
inline Floats LoadN(const float* p, i64 n) { return _mm256_maskload_ps(p, FirstN(n)); }
inline void StoreU(Floats x, float* p) { _mm256_storeu_ps(p, x); }
inline void StoreN(Floats x, float* p, i64 n) { _mm256_maskstore_ps(p, FirstN(n), x); }
inline Ints LoadU(const i32* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void StoreU(Ints x, i32* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }

inline Floats PromoteTo(bf16, __m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline __m128i DemoteTo(bf16, Floats x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline Floats LoadN(const bf16* p, i64 n) {
    alignas(16) bf16 part[W] = {};
    std::memcpy(part, p, sizeof(bf16) * static_cast<std::size_t>(n > W ? W : n));
    return PromoteTo(bf16{}, _mm_load_si128(reinterpret_cast<const __m128i*>(part)));
}
inline void StoreN(Floats x, bf16* p, i64 n) {
    alignas(16) bf16 part[W];
    _mm_store_si128(reinterpret_cast<__m128i*>(part), DemoteTo(bf16{}, x));
    std::memcpy(p, part, sizeof(bf16) * static_cast<std::size_t>(n > W ? W : n));
}

inline Floats Add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats Sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats Mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats Div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats MulAdd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats Min(Floats limit, Floats x) { return _mm256_min_ps(limit, x); }
inline Floats Max(Floats limit, Floats x) { return _mm256_max_ps(limit, x); }
inline Floats Abs(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Floats Round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats ApproximateReciprocal(Floats x) {  // a Newton step after an estimate of 12 bits
    const Floats r = _mm256_rcp_ps(x);
    return _mm256_mul_ps(r, _mm256_fnmadd_ps(x, r, _mm256_set1_ps(2.0f)));
}
template <int count>
inline Floats ShiftBitsLeft(Floats x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), count));
}
// x * 2^n of whole n; x * 2^floor(n) of any n that `ClampExponent` has given; and the rest above the floor.
inline Floats MulByPow2(Floats x, Floats n) {  // in two halves, so that results below the normal numbers are right
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1),
                  rest = _mm256_sub_epi32(whole, half);
    const auto power = [](__m256i e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    return Mul(Mul(x, power(half)), power(rest));
}
inline Floats MulByFloorPow2(Floats x, Floats n) { return MulByPow2(x, _mm256_floor_ps(n)); }
inline Floats ClampExponent(Floats n) { return Min(Set(127.0f), Max(Set(-200.0f), n)); }
inline Floats AboveFloor(Floats n) { return Sub(n, _mm256_floor_ps(n)); }

inline float ReduceSum(Floats x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float ReduceMax(Floats x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline float ReduceMin(Floats x) { return -ReduceMax(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f))); }

inline Ints Add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints Sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints Mul(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Floats ConvertToFloats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints NearestInts(Floats x) { return _mm256_cvtps_epi32(x); }
inline __m128i LowestBytes(Ints x) {
    const __m256i bytes = _mm256_shuffle_epi8(x, _mm256_set1_epi32(0x0c080400));  // the four of each half
    return _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}
// Store the lowest byte of each number.
inline void TruncateStoreN(Ints x, u8* p, i64 n) {
    alignas(16) u8 part[2 * W];
    _mm_store_si128(reinterpret_cast<__m128i*>(part), LowestBytes(x));
    std::memcpy(p, part, static_cast<std::size_t>(n > W ? W : n));
}
inline void TruncateStoreN(Ints x, u8* p, Whole) { _mm_storel_epi64(reinterpret_cast<__m128i*>(p), LowestBytes(x)); }

inline void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void Pause() { _mm_pause(); }

// Write unit u of row r, of W rows, to out[u * stride + r].
inline void Transpose(const u32 (*rows)[W], i64 num_units, u32* out, i64 stride) {
    __m256 x[W], y[W];
    for (int r = 0; r < W; r++) x[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[r]));
    for (int r = 0; r < W; r += 2) {
        y[r] = _mm256_unpacklo_ps(x[r], x[r + 1]);
        y[r + 1] = _mm256_unpackhi_ps(x[r], x[r + 1]);
    }
    for (int r = 0; r < W; r += 4)
        for (int c = 0; c < 2; c++) {
            x[r + 2 * c] = _mm256_shuffle_ps(y[r + c], y[r + 2 + c], 0x44);
            x[r + 2 * c + 1] = _mm256_shuffle_ps(y[r + c], y[r + 2 + c], 0xee);
        }
    for (int c = 0; c < 4; c++) {
        y[c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x20);
        y[4 + c] = _mm256_permute2f128_ps(x[c], x[4 + c], 0x31);
    }
    for (i64 u = 0; u < num_units; u++) _mm256_storeu_ps(reinterpret_cast<float*>(out + u * stride), y[u]);
}

#ifdef __AVXVNNI__
template <>
inline constexpr bool HAS<InInt8> = true;

inline Ints Dot(InInt8, Ints sum, const u32* row, Ints columns) {
    return _mm256_dpbusd_avx_epi32(sum, Set(static_cast<i32>(*row)), columns);
}
#endif

}  // namespace whimbrel
