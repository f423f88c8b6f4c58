// Backend for AVX-512: vectors of 16 floats.
//
// Operations have the names and meanings of Highway's (google/highway). Functions that choose between two values keep
// NaN: an operand that is NaN is the second one of Min and Max.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace whimbrel {

constexpr int W = 16;          // floats of a vector
constexpr int PANEL = NV * W;  // columns of a panel
constexpr int MAX_ROWS = 12;   // of a product, whose sums fill the registers
constexpr int UNROLL = 1;      // of its innermost loop: with 24 sums GCC spills otherwise
constexpr i64 L1_UNITS = 128;  // units of a panel that stay in the L1 cache

using Floats = __m512;
using Ints = __m512i;
using Mask = __mmask16;

inline Floats Zero() { return _mm512_setzero_ps(); }
inline Floats Set(float x) { return _mm512_set1_ps(x); }
inline Ints Set(i32 x) { return _mm512_set1_epi32(x); }
inline Mask FirstN(i64 n) { return static_cast<Mask>(n >= W ? 0xffff : (1u << n) - 1); }
inline Floats IfThenElse(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }
inline Floats IfThenElseZero(Mask mask, Floats yes) { return _mm512_maskz_mov_ps(mask, yes); }

inline Floats LoadU(const float* p) { return _mm512_loadu_ps(p); }
inline Floats LoadN(const float* p, i64 n) { return _mm512_maskz_loadu_ps(FirstN(n), p); }
inline void StoreU(Floats x, float* p) { _mm512_storeu_ps(p, x); }
inline void StoreN(Floats x, float* p, i64 n) { _mm512_mask_storeu_ps(p, FirstN(n), x); }
inline Ints LoadU(const i32* p) { return _mm512_loadu_si512(p); }
inline void StoreU(Ints x, i32* p) { _mm512_storeu_si512(p, x); }

inline Floats PromoteTo(bf16, __m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline __m256i DemoteTo(bf16, Floats x) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline Floats LoadN(const bf16* p, i64 n) { return PromoteTo(bf16{}, _mm256_maskz_loadu_epi16(FirstN(n), p)); }
inline void StoreN(Floats x, bf16* p, i64 n) { _mm256_mask_storeu_epi16(p, FirstN(n), DemoteTo(bf16{}, x)); }
// Store pairs of numbers of 2 bytes, of which that of `first` comes first in memory.
template <class T>
inline void StoreInterleaved2(Floats first, Floats second, T* p) {
    const __m512i low = _mm512_cvtepu16_epi32(DemoteTo(T{}, first)),
                  high = _mm512_cvtepu16_epi32(DemoteTo(T{}, second));
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

inline Floats Add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats Sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats Mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats Div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats MulAdd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats Min(Floats limit, Floats x) { return _mm512_min_ps(limit, x); }
inline Floats Max(Floats limit, Floats x) { return _mm512_max_ps(limit, x); }
inline Floats Abs(Floats x) { return _mm512_abs_ps(x); }
inline Floats Round(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats ApproximateReciprocal(Floats x) { return _mm512_rcp14_ps(x); }
template <int count>
inline Floats ShiftBitsLeft(Floats x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), count));
}
// x * 2^n of whole n; x * 2^floor(n) of any n that `ClampExponent` has given; and the rest above the floor.
inline Floats MulByPow2(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline Floats MulByFloorPow2(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
inline Floats ClampExponent(Floats n) { return n; }
inline Floats AboveFloor(Floats n) { return _mm512_reduce_ps(n, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }

inline float ReduceSum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float ReduceMax(Floats x) { return _mm512_reduce_max_ps(x); }
inline float ReduceMin(Floats x) { return _mm512_reduce_min_ps(x); }

inline Ints Add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints Sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints Mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Floats ConvertToFloats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints NearestInts(Floats x) { return _mm512_cvtps_epi32(x); }
// Store the lowest byte of each number.
inline void TruncateStoreN(Ints x, u8* p, i64 n) { _mm512_mask_cvtepi32_storeu_epi8(p, FirstN(n), x); }
inline void TruncateStoreN(Ints x, u8* p, Whole) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

inline void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void Pause() { _mm_pause(); }

// Write unit u of row r, of W rows, to out[u * stride + r]. All are aligned to vectors.
inline void Transpose(const u32 (*rows)[W], i64 num_units, u32* out, i64 stride) {
    __m512i x[W], y[W];
    for (int r = 0; r < W; r++) x[r] = _mm512_load_si512(rows[r]);
    for (int r = 0; r < W; r += 2) {
        y[r] = _mm512_unpacklo_epi32(x[r], x[r + 1]);
        y[r + 1] = _mm512_unpackhi_epi32(x[r], x[r + 1]);
    }
    for (int r = 0; r < W; r += 4)
        for (int c = 0; c < 2; c++) {
            x[r + 2 * c] = _mm512_unpacklo_epi64(y[r + c], y[r + 2 + c]);
            x[r + 2 * c + 1] = _mm512_unpackhi_epi64(y[r + c], y[r + 2 + c]);
        }
    for (int r = 0; r < W; r += 8)
        for (int c = 0; c < 4; c++) {
            y[r + c] = _mm512_shuffle_i32x4(x[r + c], x[r + 4 + c], 0x88);
            y[r + 4 + c] = _mm512_shuffle_i32x4(x[r + c], x[r + 4 + c], 0xdd);
        }
    for (int c = 0; c < 8; c++) {
        x[c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0x88);
        x[8 + c] = _mm512_shuffle_i32x4(y[c], y[8 + c], 0xdd);
    }
    for (i64 u = 0; u < num_units; u++) _mm512_store_si512(out + u * stride, x[u]);
}

#ifdef __AVX512BF16__
template <>
inline constexpr bool HAS<InBfloat16> = true;

inline Floats Dot(InBfloat16, Floats sum, const u32* row, Floats columns) {
    const Ints unit = Set(static_cast<i32>(*row));
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(unit), "v"(columns));  // GCC 12 spills with the intrinsic
    return sum;
}
#endif

#ifdef __AVX512VNNI__
template <>
inline constexpr bool HAS<InInt8> = true;

inline Ints Dot(InInt8, Ints sum, const u32* row, Ints columns) {
    const Ints unit = Set(static_cast<i32>(*row));
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unit), "v"(columns));
    return sum;
}
#endif

}  // namespace whimbrel
