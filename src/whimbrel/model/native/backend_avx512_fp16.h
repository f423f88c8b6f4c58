// Backend for AVX-512 with float16: products of twice as many numbers. The instructions are written out: GCC 11 does
// not know them.
#pragma once

#include <cstring>

#include "backend_avx512.h"

namespace whimbrel {

template <>
inline constexpr bool HAS<InFloat16> = true;

inline Floats PromoteTo(f16, __m256i x) { return _mm512_cvtph_ps(x); }
inline __m256i DemoteTo(f16, Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats LoadU(const f16* p) { return PromoteTo(f16{}, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void StoreU(Floats x, f16* p) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), DemoteTo(f16{}, x)); }
inline void StoreN(Floats x, f16* p, i64 n) { _mm256_mask_storeu_epi16(p, FirstN(n), DemoteTo(f16{}, x)); }

// For each column a sum of the first numbers of units, and one of the second.
using Halves = __m512i;

inline Halves ZeroSums(InFloat16) { return _mm512_setzero_si512(); }
inline Halves LoadColumns(InFloat16, const u32* p) { return _mm512_loadu_si512(p); }
inline Halves Dot(InFloat16, Halves sum, const u32* row, Halves columns) {
    const Ints unit = Set(static_cast<i32>(*row));
    asm("vfmadd231ph %2, %1, %0" : "+v"(sum) : "v"(unit), "v"(columns));
    return sum;
}
inline Halves AddHalves(Halves a, Halves b) {
    asm("vaddph %1, %0, %0" : "+v"(a) : "v"(b));
    return a;
}
inline __m256i TotalHalves(Halves x) { return _mm512_cvtepi32_epi16(AddHalves(x, _mm512_srli_epi32(x, 16))); }
inline Floats Total(InFloat16, Halves x) { return PromoteTo(f16{}, TotalHalves(x)); }

inline void StoreTotals(const Halves (&sums)[1], f16* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), TotalHalves(sums[0]));
}
inline void StoreTotals(const Halves (&sums)[2], f16* p) {
    const __m512i first_to_second = _mm512_setr4_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c);
    const __m512i second_to_first = _mm512_setr4_epi32(0x03020302, 0x07060706, 0x0b0a0b0a, 0x0f0e0f0e);
    const __m512i by_vector = _mm512_setr4_epi32(0x05040100, 0x0d0c0908, 0x07060302, 0x0f0e0b0a);
    // Both sums of both vectors by turns, added at once; then the totals of each vector together.
    const __m512i firsts = _mm512_mask_shuffle_epi8(sums[0], 0xcccccccccccccccc, sums[1], first_to_second);
    const __m512i seconds = _mm512_mask_shuffle_epi8(sums[1], 0x3333333333333333, sums[0], second_to_first);
    const __m512i totals = _mm512_shuffle_epi8(AddHalves(firsts, seconds), by_vector);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), totals));
}

// The largest magnitude among n numbers. NaN is passed over.
inline float largest_magnitude(const bf16* x, i64 n) {
    __m512i most = _mm512_setzero_si512();
    for (i64 k = 0; k < n; k += 2 * W) {
        const __mmask32 some = n - k < 2 * W ? (__mmask32{1} << (n - k)) - 1 : ~__mmask32{0};
        const __m512i bits = _mm512_and_si512(_mm512_maskz_loadu_epi16(some, x + k), _mm512_set1_epi16(0x7fff));
        most = _mm512_mask_max_epu16(most, _mm512_cmple_epu16_mask(bits, _mm512_set1_epi16(0x7f80)), most, bits);
    }
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i part = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i least_of_inverted = _mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi16(-1)));
    const u32 bits = ~static_cast<u32>(_mm_cvtsi128_si32(least_of_inverted)) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof bits);
    return found;
}

}  // namespace whimbrel
