// Backend for AMX, on top of AVX-512: eight registers (tiles) of 16 rows of 64 bytes, for products of whole blocks.
//
// The instructions are written out: compilers order their own intrinsics freely among stores to memory.
// WHIMBREL_IMITATED_TILES, for tests, does the same without AMX, as Intel's manual (volume 2, chapter on AMX) describes
// each instruction, but that subnormal results are not 0.
#pragma once

#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "backend_avx512.h"

namespace whimbrel {

constexpr i64 TILE_ROWS = 16;
constexpr i64 TILE_UNITS = 16;  // of 4 bytes, in a row

#ifndef WHIMBREL_IMITATED_TILES

// This thread has tiles, all of 16 rows of 64 bytes, until the end of the scope. Other libraries may have left other
// shapes.
class Tiles {
  public:
    Tiles() {
        struct {
            u8 palette = 1, start_row = 0, reserved[14] = {};
            u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        static_assert(sizeof shapes == 64);
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int tile>
inline void ClearTile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
inline void LoadTile(const void* p, i64 stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void StoreTile(void* p, i64 stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory");
}

// Add a x b to sums, for pairs of bfloat16.
template <int sums, int a, int b>
inline void DotTiles(InBfloat16) {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

// Add a x b to sums, for four bytes: those of a have no sign.
template <int sums, int a, int b>
inline void DotTiles(InInt8) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

#else

inline thread_local struct {
    bool configured;
    u32 of[8][TILE_ROWS][TILE_UNITS];
} imitated_tiles;

class Tiles {
  public:
    Tiles() {
        if (imitated_tiles.configured) std::abort();
        std::memset(&imitated_tiles.of, 0, sizeof imitated_tiles.of);
        imitated_tiles.configured = true;
    }
    ~Tiles() { imitated_tiles.configured = false; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int number>
inline auto& imitated_tile() {
    if (!imitated_tiles.configured) std::abort();
    return imitated_tiles.of[number];
}

template <int tile>
inline void ClearTile() {
    std::memset(imitated_tile<tile>(), 0, 1024);
}

template <int tile>
inline void LoadTile(const void* p, i64 stride) {
    for (i64 row = 0; row < TILE_ROWS; row++)
        std::memcpy(imitated_tile<tile>()[row], static_cast<const char*>(p) + row * stride, 64);
}

template <int tile>
inline void StoreTile(void* p, i64 stride) {
    for (i64 row = 0; row < TILE_ROWS; row++)
        std::memcpy(static_cast<char*>(p) + row * stride, imitated_tile<tile>()[row], 64);
}

// A bfloat16 as float32. Subnormal numbers are read as 0.
inline float widened(u32 bits) {
    bits <<= 16;
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <int sums, int a, int b>
inline void DotTiles(InBfloat16) {
    auto &to = imitated_tile<sums>(), &rows = imitated_tile<a>(), &columns = imitated_tile<b>();
    for (i64 m = 0; m < TILE_ROWS; m++) {
        float first[TILE_UNITS] = {}, second[TILE_UNITS] = {}, total[TILE_UNITS];
        for (i64 k = 0; k < TILE_UNITS; k++)
            for (i64 n = 0; n < TILE_UNITS; n++) {
                first[n] += widened(rows[m][k] & 0xffff) * widened(columns[k][n] & 0xffff);
                second[n] += widened(rows[m][k] >> 16) * widened(columns[k][n] >> 16);
            }
        std::memcpy(total, to[m], sizeof total);
        for (i64 n = 0; n < TILE_UNITS; n++) total[n] += first[n] + second[n];
        std::memcpy(to[m], total, sizeof total);
    }
}

template <int sums, int a, int b>
inline void DotTiles(InInt8) {
    auto &to = imitated_tile<sums>(), &rows = imitated_tile<a>(), &columns = imitated_tile<b>();
    for (i64 m = 0; m < TILE_ROWS; m++)
        for (i64 k = 0; k < TILE_UNITS; k++)
            for (i64 n = 0; n < TILE_UNITS; n++)
                for (int byte = 0; byte < 32; byte += 8)
                    to[m][n] += static_cast<u32>(static_cast<i32>(rows[m][k] >> byte & 255) *
                                                 static_cast<std::int8_t>(columns[k][n] >> byte));
}

#endif

// The block of rows is two tiles, so that a tile of columns is multiplied twice.
struct TilesOfRows {
    using Registers = Tiles;
    static constexpr i64 rows = 2 * TILE_ROWS, units = TILE_UNITS;
};
template <>
struct Tiling<InBfloat16> : TilesOfRows {};
template <>
struct Tiling<InInt8> : TilesOfRows {};

// The product of ROWS * 16 rows with VECTORS * 16 columns. `fetch`: the panel is not yet in the L1 cache.
template <class D, int ROWS, int VECTORS>
inline void BlockOfTiles(const u32* a, i64 a_stride, const u32* panel, i64 units, typename D::Sum* c, i64 c_stride,
                         bool begin, bool fetch) {
    constexpr i64 unit = sizeof(u32);
    const auto for_sums = [&](auto f) {  // f(number of a tile, its numbers in memory)
        const auto call = [&](auto number, int i, int j) { f(number, c + i * TILE_ROWS * c_stride + j * W); };
        call(std::integral_constant<int, 0>{}, 0, 0);
        if constexpr (VECTORS == 2) call(std::integral_constant<int, 1>{}, 0, 1);
        if constexpr (ROWS == 2) call(std::integral_constant<int, 2>{}, 1, 0);
        if constexpr (ROWS == 2 && VECTORS == 2) call(std::integral_constant<int, 3>{}, 1, 1);
    };
    for_sums([&](auto number, auto* sums) {
        if (begin) ClearTile<decltype(number)::value>();
        else LoadTile<decltype(number)::value>(sums, c_stride * unit);
    });
    for (i64 k = 0; k < units; k += TILE_UNITS) {
        if (fetch)
            for (i64 line = 0; line < TILE_UNITS * PANEL; line += LINE)
                Prefetch(panel + k * PANEL + FETCH_AHEAD + line);
        LoadTile<6>(panel + k * PANEL, PANEL * unit);
        LoadTile<4>(a + k, a_stride * unit);
        DotTiles<0, 4, 6>(D{});
        if constexpr (VECTORS == 2) {
            LoadTile<7>(panel + k * PANEL + W, PANEL * unit);
            DotTiles<1, 4, 7>(D{});
        }
        if constexpr (ROWS == 2) {
            LoadTile<5>(a + TILE_ROWS * a_stride + k, a_stride * unit);
            DotTiles<2, 5, 6>(D{});
            if constexpr (VECTORS == 2) DotTiles<3, 5, 7>(D{});
        }
    }
    for_sums([&](auto number, auto* sums) { StoreTile<decltype(number)::value>(sums, c_stride * unit); });
}

// `product` of whole tiles: all of their rows are read and written, whatever they hold.
template <class D>
void ProductOfTiles(D, i64 rows, const u32* a, i64 a_stride, const u32* panel, i64 units, typename D::Sum* c,
                    i64 c_stride, bool begin, bool half) {
    for (i64 row = 0; row < rows; row += 2 * TILE_ROWS) {
        const bool both = rows - row > TILE_ROWS;
        const auto run = both ? (half ? BlockOfTiles<D, 2, 1> : BlockOfTiles<D, 2, 2>)
                              : (half ? BlockOfTiles<D, 1, 1> : BlockOfTiles<D, 1, 2>);
        run(a + row * a_stride, a_stride, panel, units, c + row * c_stride, c_stride, begin, row == 0);
    }
}

}  // namespace whimbrel
