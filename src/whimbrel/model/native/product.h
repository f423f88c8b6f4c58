// Products of a block of rows and a panel of columns, from which linear layers and attention are built.
//
// A panel has 2 W columns. Along the inner dimension numbers lie in units of 4 bytes: a float32, two bfloat16 or float16, or four int8. A
// unit of each row is multiplied with the units of all columns of the panel, in order of the inner dimension. So a number of the result
// has the same bits in every number of rows and in every block.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "simd.h"
#ifdef WHIMBREL_TILES
#include "tiles.h"
#endif

namespace whimbrel {

constexpr int LINE = 16;  // units of a cache line
constexpr int NV = 2;
constexpr int PANEL = NV * W;
constexpr int PREFETCH = 1024 / PANEL;  // units ahead: 4 KiB, as the processor does not foresee across pages
#ifdef __AVX512F__
constexpr int MAX_ROWS = 12;
constexpr int UNROLL = 1;  // of the innermost loop: with 24 sums GCC spills otherwise
#else
constexpr int MAX_ROWS = 6;
constexpr int UNROLL = 4;
#endif

// Numbers that products multiply, with vectors.
struct InFloat32 {
    struct Registers {};  // that are taken while products run
    static constexpr i64 block_rows = MAX_ROWS;  // of a tile, to which memory of rows and sums is padded
    static constexpr i64 unit_step = 1;  // of which numbers of units are multiples
    using Sum = float;
    static constexpr Sum least_sum = -std::numeric_limits<float>::infinity();
    using Vector = Floats;
    static constexpr int per_unit = 1;
    static constexpr i64 most_units = i64{1} << 40;  // that one sum may hold
    static constexpr bool scaled = false;  // whether rows and columns are multiplied with powers of 2 of their own
    static constexpr bool rough = false;  // whether sums are less exact than float32
    static Vector none() { return zero(); }
    static Vector dot(Vector sum, const std::uint32_t* row, Vector columns) {
        float x;
        std::memcpy(&x, row, 4);
        return fma(all(x), columns, sum);
    }
    static Vector load_columns(const std::uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
    static Floats total(Vector x) { return x; }
    static Floats load_sums(const float* p) { return load(p); }
    static Floats plus(Floats a, Floats b) { return add(a, b); }
    static void store_sums(float* p, Floats x) { store(p, x); }
    template <class N>
    static void put(float* p, Floats x, N n) { store(p, x, n); }
};

#ifdef __AVX512BF16__
struct InBfloat16 : InFloat32 {
    static constexpr int per_unit = 2;
    static __m256i narrow(Floats x) { return to_bf16(x); }
    template <class N>
    static void put(std::uint16_t* p, Floats x, N n) { store(p, x, n); }
#ifdef WHIMBREL_TILES
    using Registers = Tiles;
    static constexpr i64 block_rows = 2 * TILE_ROWS, unit_step = TILE_UNITS;
    template <int sums, int a, int b>
    static void dot_tiles() { dot_bf16<sums, a, b>(); }
#endif
    static Vector dot(Vector sum, const std::uint32_t* row, Vector columns) {
        const __m512i unit = _mm512_set1_epi32(static_cast<int>(*row));
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(unit), "v"(columns));  // GCC 12 spills with the intrinsic
        return sum;
    }
};
#endif

#ifdef WHIMBREL_FLOAT16
// Sums of up to 64 products are float16, those of more are float32. Of linear layers, both sides are at most 16 after their powers of 2;
// of attention, at most 16 and at most 31.875, so that both sums of a total are at most 32752. So nothing overflows. The instructions
// are written out: GCC 11 does not know them.
struct InFloat16 : InFloat32 {
    using Vector = __m512i;  // for each column a sum of the first numbers of units, and one of the second
    static constexpr int per_unit = 2;
    static constexpr i64 most_units = 64;
    static constexpr bool scaled = true, rough = true;
    static Vector none() { return _mm512_setzero_si512(); }
    static Vector dot(Vector sum, const std::uint32_t* row, Vector columns) {
        const __m512i unit = _mm512_set1_epi32(static_cast<int>(*row));
        asm("vfmadd231ph %2, %1, %0" : "+v"(sum) : "v"(unit), "v"(columns));
        return sum;
    }
    static Vector load_columns(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
    static __m512i plus_halves(__m512i a, __m512i b) {
        asm("vaddph %1, %0, %0" : "+v"(a) : "v"(b));
        return a;
    }
    static __m256i total_halves(Vector x) { return _mm512_cvtepi32_epi16(plus_halves(x, _mm512_srli_epi32(x, 16))); }
    static Floats total(Vector x) { return _mm512_cvtph_ps(total_halves(x)); }
    static __m256i narrow(Floats x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static void put(std::uint16_t* p, Floats x, i64 n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }
    static void put(std::uint16_t* p, Floats x, Whole) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
};

// As InFloat16, for products of up to `most_units`: their sums stay float16.
struct InFloat16Alone : InFloat16 {
    using Sum = std::uint16_t;
    static constexpr Sum least_sum = 0xfc00;
    static Floats load_sums(const Sum* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static void store_totals(Sum* p, const Vector (&sums)[1]) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), total_halves(sums[0])); }
    static void store_totals(Sum* p, const Vector (&sums)[2]) {
        const __m512i first_to_second = _mm512_setr4_epi32(0x01000100, 0x05040504, 0x09080908, 0x0d0c0d0c);
        const __m512i second_to_first = _mm512_setr4_epi32(0x03020302, 0x07060706, 0x0b0a0b0a, 0x0f0e0f0e);
        const __m512i by_vector = _mm512_setr4_epi32(0x05040100, 0x0d0c0908, 0x07060302, 0x0f0e0b0a);
        // Both sums of both vectors by turns, added at once; then the totals of each vector together.
        const __m512i firsts = _mm512_mask_shuffle_epi8(sums[0], 0xcccccccccccccccc, sums[1], first_to_second);
        const __m512i seconds = _mm512_mask_shuffle_epi8(sums[1], 0x3333333333333333, sums[0], second_to_first);
        const __m512i totals = _mm512_shuffle_epi8(plus_halves(firsts, seconds), by_vector);
        _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), totals));
    }
};
#endif

// Store pairs of numbers of 2 bytes, the first of which comes first in memory. Only AVX-512 has kinds of such numbers.
template <class D>
void store_pairs(std::uint32_t* p, Floats first, Floats second);
#ifdef __AVX512F__
template <class D>
inline void store_pairs(std::uint32_t* p, Floats first, Floats second) {
    const __m512i low = _mm512_cvtepu16_epi32(D::narrow(first)), high = _mm512_cvtepu16_epi32(D::narrow(second));
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
#endif

// Exponent of a positive normal number. Smaller ones have -127, infinity 128.
inline int exponent_of(float x) {
    std::int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (bits >> 23) - 127;
}

// 2^n, for n from -126 to 127.
inline float power_of_2(int n) {
    const std::int32_t bits = (n + 127) << 23;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float inverse_of_power(float power_of_two) { return power_of_2(-exponent_of(power_of_two)); }

// Power of 2 that makes a number of this magnitude at least 2^exponent and less than twice that. 1 for 0.
inline float power_to_reach(int exponent, float magnitude) {
    if (magnitude == 0.0f) return 1.0f;
    return power_of_2(exponent - std::max(-100, std::min(127, exponent_of(magnitude))));
}

// The largest magnitude among n numbers. NaN is passed over.
template <class T>
inline float largest_magnitude(const T* x, i64 n) {
    Floats most = zero();
    for_vectors(n, [&](i64 k, auto some) { most = greatest(magnitude(load(x + k, some)), most); });
    return largest(most);
}
#ifdef WHIMBREL_FLOAT16
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
    const std::uint32_t bits = ~static_cast<std::uint32_t>(_mm_cvtsi128_si32(least_of_inverted)) << 16;
    float found;
    std::memcpy(&found, &bits, sizeof bits);
    return found;
}
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define WHIMBREL_INT8
struct InInt8 {
#ifdef WHIMBREL_TILES
    using Registers = Tiles;
    static constexpr i64 block_rows = 2 * TILE_ROWS, unit_step = TILE_UNITS;
    template <int sums, int a, int b>
    static void dot_tiles() { dot_int8<sums, a, b>(); }
#else
    struct Registers {};
    static constexpr i64 block_rows = MAX_ROWS, unit_step = 1;
#endif
    using Sum = std::int32_t;
    using Vector = Ints;
    static constexpr int per_unit = 4;
    static constexpr i64 most_units = i64{1} << 40;
    static constexpr bool scaled = false, rough = true;
    static Vector none() { return all_ints(0); }
    static Vector dot(Vector sum, const std::uint32_t* row, Vector columns) {
#ifdef __AVX512VNNI__
        const __m512i unit = _mm512_set1_epi32(static_cast<int>(*row));
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unit), "v"(columns));
        return sum;
#else
        return _mm256_dpbusd_avx_epi32(sum, _mm256_set1_epi32(static_cast<int>(*row)), columns);
#endif
    }
    static Vector load_columns(const std::uint32_t* p) { return load_ints(reinterpret_cast<const std::int32_t*>(p)); }
    static Ints total(Vector x) { return x; }
    static Vector load_sums(const std::int32_t* p) { return load_ints(p); }
    static Vector plus(Vector a, Vector b) { return add(a, b); }
#ifdef __AVX512F__
    static void store_sums(std::int32_t* p, Vector x) { _mm512_storeu_si512(p, x); }
#else
    static void store_sums(std::int32_t* p, Vector x) { _mm256_storeu_si256((__m256i*)p, x); }
#endif
};
#endif

// Units of n numbers, with those that fill the last tile.
template <class D>
constexpr i64 units_for(i64 n) { return up_to((n + D::per_unit - 1) / D::per_unit, D::unit_step); }

// `ahead`: units from those that are multiplied to those that are fetched.
template <class D, int ROWS, int VECTORS>
inline void tile(const std::uint32_t* a, i64 a_stride, const std::uint32_t* panel, i64 units, typename D::Sum* c, i64 c_stride, bool begin, i64 ahead) {
    typename D::Vector sums[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) sums[i][j] = D::none();
#pragma GCC unroll UNROLL
    for (i64 k = 0; k < units; k++) {
        for (int j = 0; j < VECTORS; j += LINE / W) _mm_prefetch(reinterpret_cast<const char*>(panel + (k + ahead) * PANEL + j * W), _MM_HINT_T0);
        typename D::Vector columns[VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < VECTORS; j++) columns[j] = D::load_columns(panel + k * PANEL + j * W);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++) sums[i][j] = D::dot(sums[i][j], a + i * a_stride + k, columns[j]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        auto* to = c + i * c_stride;
        if constexpr (sizeof(typename D::Sum) == 2) {
            D::store_totals(to, sums[i]);
        } else {
#pragma GCC unroll 2
            for (int j = 0; j < VECTORS; j++) {
                const auto total = D::total(sums[i][j]);
                D::store_sums(to + j * W, begin ? total : D::plus(D::load_sums(to + j * W), total));  // a sum per block: less is lost
            }
        }
    }
}

template <class D, int VECTORS, int ROWS = MAX_ROWS>
inline void tile_of(int rows, const std::uint32_t* a, i64 a_stride, const std::uint32_t* panel, i64 units, typename D::Sum* c, i64 c_stride, bool begin, i64 ahead) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<D, ROWS, VECTORS>(a, a_stride, panel, units, c, c_stride, begin, ahead);
        else
            tile_of<D, VECTORS, ROWS - 1>(rows, a, a_stride, panel, units, c, c_stride, begin, ahead);
    }
}

#ifdef WHIMBREL_TILES
// As `tile`, of ROWS * 16 rows. `fetch`: the panel is not yet in the L1 cache.
template <class D, int ROWS, int VECTORS>
inline void block_of_tiles(const std::uint32_t* a, i64 a_stride, const std::uint32_t* panel, i64 units, typename D::Sum* c, i64 c_stride, bool begin, bool fetch) {
    constexpr i64 unit = sizeof(std::uint32_t);
    const auto for_sums = [&](auto f) {  // f(number of a tile, its numbers in memory)
        const auto call = [&](auto number, int i, int j) { f(number, c + i * TILE_ROWS * c_stride + j * W); };
        call(std::integral_constant<int, 0>{}, 0, 0);
        if constexpr (VECTORS == 2) call(std::integral_constant<int, 1>{}, 0, 1);
        if constexpr (ROWS == 2) call(std::integral_constant<int, 2>{}, 1, 0);
        if constexpr (ROWS == 2 && VECTORS == 2) call(std::integral_constant<int, 3>{}, 1, 1);
    };
    for_sums([&](auto number, auto* sums) {
        if (begin) clear_tile<decltype(number)::value>();
        else load_tile<decltype(number)::value>(sums, c_stride * unit);
    });
    for (i64 k = 0; k < units; k += TILE_UNITS) {
        if (fetch)
            for (i64 line = 0; line < TILE_UNITS * PANEL; line += LINE) _mm_prefetch(reinterpret_cast<const char*>(panel + (k + PREFETCH) * PANEL + line), _MM_HINT_T0);
        load_tile<6>(panel + k * PANEL, PANEL * unit);
        load_tile<4>(a + k, a_stride * unit);
        D::template dot_tiles<0, 4, 6>();
        if constexpr (VECTORS == 2) {
            load_tile<7>(panel + k * PANEL + W, PANEL * unit);
            D::template dot_tiles<1, 4, 7>();
        }
        if constexpr (ROWS == 2) {
            load_tile<5>(a + TILE_ROWS * a_stride + k, a_stride * unit);
            D::template dot_tiles<2, 5, 6>();
            if constexpr (VECTORS == 2) D::template dot_tiles<3, 5, 7>();
        }
    }
    for_sums([&](auto number, auto* sums) { store_tile<decltype(number)::value>(sums, c_stride * unit); });
}

// As `product`, of whole tiles: all of their rows are read and written, whatever they hold.
template <class D>
void product_of_tiles(i64 rows, const std::uint32_t* a, i64 a_stride, const std::uint32_t* panel, i64 units, typename D::Sum* c, i64 c_stride, bool begin, bool half) {
    for (i64 row = 0; row < rows; row += 2 * TILE_ROWS) {
        const bool both = rows - row > TILE_ROWS;
        const auto run = both ? (half ? block_of_tiles<D, 2, 1> : block_of_tiles<D, 2, 2>) : (half ? block_of_tiles<D, 1, 1> : block_of_tiles<D, 1, 2>);
        run(a + row * a_stride, a_stride, panel, units, c + row * c_stride, c_stride, begin, row == 0);
    }
}
#endif

// c = a x panel, or c += a x panel unless `begin`; with `half`, of the panel's first W columns. Rows are shared evenly among tiles, as small
// tiles are slow.
template <class D>
__attribute__((noinline)) void product(i64 rows, const std::uint32_t* a, i64 a_stride, const std::uint32_t* panel, i64 units, typename D::Sum* c, i64 c_stride, bool begin, bool half = false) {
#ifdef WHIMBREL_TILES
    if constexpr (D::unit_step > 1) return product_of_tiles<D>(rows, a, a_stride, panel, units, c, c_stride, begin, half);
#endif
    const i64 tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, least_rows = rows / std::max<i64>(1, tiles), larger = rows - tiles * least_rows;
    for (i64 k = 0; k < units; k += D::most_units, begin = false) {
        const i64 some = std::min(D::most_units, units - k);
        for (i64 t = 0, row = 0; t < tiles; t++) {
            const int count = static_cast<int>(least_rows + (t < larger));
            const i64 ahead = t == 1 ? some : PREFETCH;  // the second tile, whose panel is in the L1 cache, fetches the next one
            if (half)
                tile_of<D, 1>(count, a + row * a_stride + k, a_stride, panel + k * PANEL, some, c + row * c_stride, c_stride, begin, ahead);
            else
                tile_of<D, 2>(count, a + row * a_stride + k, a_stride, panel + k * PANEL, some, c + row * c_stride, c_stride, begin, ahead);
            row += count;
        }
    }
}

}  // namespace whimbrel
