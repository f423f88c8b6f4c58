// Vectors of the instruction set that this file is compiled for: 16 floats with AVX-512, 8 with AVX2.
//
// Functions that choose between two values keep NaN: an operand that is NaN is the second one of min and max.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace whimbrel {

using i64 = std::int64_t;
using bf16 = std::uint16_t;

constexpr float LOG_OF_E = 1.44269504f;  // of base 2

constexpr i64 up_to(i64 n, i64 step) { return (n + step - 1) / step * step; }

#ifdef __AVX512F__

constexpr int W = 16;
using Floats = __m512;
using Ints = __m512i;

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline __mmask16 first(i64 n) { return static_cast<__mmask16>(n >= W ? 0xffff : (1u << n) - 1); }
inline Floats load(const float* p, i64 n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, Floats x, i64 n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline Floats load(const bf16* p, i64 n) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline __m256i to_bf16(Floats x) {
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
inline void store(bf16* p, Floats x, i64 n) { _mm256_mask_storeu_epi16(p, first(n), to_bf16(x)); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats rough_reciprocal(Floats x) { return _mm512_rcp14_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats least(Floats limit, Floats x) { return _mm512_min_ps(limit, x); }
inline Floats greatest(Floats limit, Floats x) { return _mm512_max_ps(limit, x); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_2(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }  // x * 2^floor(n)
// The power of 2 whose exponent, with its bias, is in the lowest bits.
inline Floats power_of_2(Floats bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(bits), 23)); }
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Floats keep(Floats x, i64 n) { return _mm512_maskz_mov_ps(first(n), x); }
inline Floats keep_or(Floats x, i64 n, Floats other) { return _mm512_mask_mov_ps(other, first(n), x); }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float smallest(Floats x) { return _mm512_reduce_min_ps(x); }
inline Floats from_ints(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline Ints load_ints(const std::int32_t* p) { return _mm512_loadu_si512(p); }
inline Ints all_ints(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints mul(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
// Store the lowest byte of each number.
inline void store_bytes(std::uint8_t* p, Ints x, i64 n) { _mm512_mask_cvtepi32_storeu_epi8(p, first(n), x); }

#else

constexpr int W = 8;
using Floats = __m256;
using Ints = __m256i;

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline __m256i first(i64 n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n > W ? W : n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats load(const float* p, i64 n) { return _mm256_maskload_ps(p, first(n)); }
inline void store(float* p, Floats x, i64 n) { _mm256_maskstore_ps(p, first(n), x); }
inline Floats load(const bf16* p, i64 n) {
    alignas(16) bf16 part[W] = {};
    std::memcpy(part, p, sizeof(bf16) * static_cast<std::size_t>(n > W ? W : n));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_load_si128((const __m128i*)part)), 16));
}
inline __m128i to_bf16(Floats x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 chosen =
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
inline void store(bf16* p, Floats x, i64 n) {
    alignas(16) bf16 part[W];
    _mm_store_si128((__m128i*)part, to_bf16(x));
    std::memcpy(p, part, sizeof(bf16) * static_cast<std::size_t>(n > W ? W : n));
}
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats rough_reciprocal(Floats x) {  // a Newton step after an estimate of 12 bits
    const Floats r = _mm256_rcp_ps(x);
    return _mm256_mul_ps(r, _mm256_fnmadd_ps(x, r, _mm256_set1_ps(2.0f)));
}
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats least(Floats limit, Floats x) { return _mm256_min_ps(limit, x); }
inline Floats greatest(Floats limit, Floats x) { return _mm256_max_ps(limit, x); }
inline Floats nearest(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// n is whole. Multiplied in two halves, so that results below the normal numbers are right.
inline Floats times_power_of_2(Floats x, Floats n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const auto power = [](__m256i e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    return mul(mul(x, power(half)), power(rest));
}
inline Floats power_of_2(Floats bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(bits), 23)); }
inline Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline Floats keep(Floats x, i64 n) { return _mm256_and_ps(x, _mm256_castsi256_ps(first(n))); }
inline Floats keep_or(Floats x, i64 n, Floats other) { return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(first(n))); }
inline float sum(Floats x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(Floats x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline float smallest(Floats x) { return -largest(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f))); }
inline Floats from_ints(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
inline Ints load_ints(const std::int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Ints all_ints(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints sub(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints mul(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline __m128i lowest_bytes(Ints x) {
    const __m256i bytes = _mm256_shuffle_epi8(x, _mm256_set1_epi32(0x0c080400));  // the four of each half
    return _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
}
inline void store_bytes(std::uint8_t* p, Ints x, i64 n) {
    alignas(16) std::uint8_t part[2 * W];
    _mm_store_si128((__m128i*)part, lowest_bytes(x));
    std::memcpy(p, part, static_cast<std::size_t>(n > W ? W : n));
}

#endif

inline Floats load(const bf16* p) { return load(p, W); }
inline void store(bf16* p, Floats x) { store(p, x, W); }

// Stands for W where a number of elements is asked for: no mask is made.
struct Whole {};
template <class T>
inline Floats load(const T* p, Whole) { return load(p); }
template <class T>
inline void store(T* p, Floats x, Whole) { store(p, x); }
#ifdef __AVX512F__
inline void store_bytes(std::uint8_t* p, Ints x, Whole) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
#else
inline void store_bytes(std::uint8_t* p, Ints x, Whole) { _mm_storel_epi64((__m128i*)p, lowest_bytes(x)); }
#endif
inline Floats keep(Floats x, Whole) { return x; }
inline Floats keep_or(Floats x, Whole, Floats) { return x; }

// Call f(k, elements) for each vector of n elements; only the last may have fewer than W.
template <class F>
inline void for_vectors(i64 n, F f) {
    i64 k = 0;
    for (; k + W <= n; k += W) f(k, Whole{});
    if (k < n) f(k, n - k);
}

// e^x to about one unit in the last place. Below -104 it is 0, above 88.7 infinity.
inline Floats exponential(Floats x) {
    x = greatest(all(-120.0f), least(all(89.0f), x));
    const Floats n = nearest(mul(x, all(LOG_OF_E)));
    Floats r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    return times_power_of_2(add(fma(mul(p, r), r, r), all(1.0f)), n);
}

// 2^x of x up to 0, to about one unit in the last place. Below -126.5 it is 0.
inline Floats decay(Floats x) {
    constexpr float WHOLE = 0x1.8p23f + 127.0f;  // a sum with it is whole, and its lowest bits are those of a power's exponent
    x = greatest(all(-127.0f), x);
    const Floats shifted = add(x, all(WHOLE)), f = sub(x, sub(shifted, all(WHOLE)));
    Floats p = fma(f, all(1.535336196e-4f), all(1.339887502e-3f));
    p = fma(p, f, all(9.618436918e-3f));
    p = fma(p, f, all(5.550332367e-2f));
    p = fma(p, f, all(2.402264774e-1f));
    p = fma(p, f, all(6.931471825e-1f));
    p = fma(p, f, all(1.0f));
    return mul(p, power_of_2(shifted));
}

// factor * 2^x within 3e-6 of its size. Below -200 it is 0. From 128 it is infinity with AVX-512; with AVX2 it stays factor * 2^127.
inline Floats rough_power_of_2(Floats x, float factor = 1.0f) {
#ifdef __AVX512F__
    const Floats f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less the next whole number below
#else
    x = least(all(127.0f), greatest(all(-200.0f), x));
    const Floats n = _mm256_floor_ps(x), f = sub(x, n);
#endif
    Floats p = fma(f, all(factor * 1.353416778e-2f), all(factor * 5.201146007e-2f));
    p = fma(p, f, all(factor * 2.414427549e-1f));
    p = fma(p, f, all(factor * 6.930038333e-1f));
    p = fma(p, f, all(factor * 1.000002623f));
#ifdef __AVX512F__
    return times_power_of_2(p, x);
#else
    return times_power_of_2(p, n);
#endif
}

// Memory of a thread that is kept between calls. It grows to the largest size asked for. Throws std::bad_alloc.
template <int slot>
inline void* scratch(std::size_t bytes) {
    struct Block {
        void* memory = nullptr;
        std::size_t size = 0;
        ~Block() { std::free(memory); }
    };
    thread_local Block block;
    if (bytes > block.size) {
        std::free(block.memory);
        block.size = (bytes + 4095) / 4096 * 4096;
        block.memory = std::aligned_alloc(64, block.size);
        if (block.memory == nullptr) {
            block.size = 0;
            throw std::bad_alloc();
        }
    }
    return block.memory;
}

}  // namespace whimbrel
