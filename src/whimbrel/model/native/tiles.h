// Tiles of AMX: eight registers of 16 rows of 64 bytes, for products of whole blocks.
//
// The instructions are written out: compilers order their own intrinsics freely among stores to memory. WHIMBREL_IMITATED_TILES, for tests,
// does the same without AMX, as Intel's manual (volume 2, chapter on AMX) describes each instruction, but that subnormal results are not 0.
#pragma once

#include "simd.h"

namespace whimbrel {

constexpr i64 TILE_ROWS = 16;
constexpr i64 TILE_UNITS = 16;  // of 4 bytes, in a row

#ifndef WHIMBREL_IMITATED_TILES

// This thread has tiles, all of 16 rows of 64 bytes, until the end of the scope. Other libraries may have left other shapes.
class Tiles {
  public:
    Tiles() {
        struct {
            std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
            std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        static_assert(sizeof shapes == 64);
        asm volatile("ldtilecfg %0" ::"m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int tile>
inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }

template <int tile>
inline void load_tile(const void* p, i64 stride) { asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory"); }

template <int tile>
inline void store_tile(void* p, i64 stride) { asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(tile) : "memory"); }

// sums += a x b, of pairs of bfloat16.
template <int sums, int a, int b>
inline void dot_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b)); }

// sums += a x b, of four bytes: those of a have no sign.
template <int sums, int a, int b>
inline void dot_int8() { asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b)); }

#else

inline thread_local struct {
    bool configured;
    std::uint32_t of[8][TILE_ROWS][TILE_UNITS];
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
inline void clear_tile() { std::memset(imitated_tile<tile>(), 0, 1024); }

template <int tile>
inline void load_tile(const void* p, i64 stride) {
    for (i64 row = 0; row < TILE_ROWS; row++) std::memcpy(imitated_tile<tile>()[row], static_cast<const char*>(p) + row * stride, 64);
}

template <int tile>
inline void store_tile(void* p, i64 stride) {
    for (i64 row = 0; row < TILE_ROWS; row++) std::memcpy(static_cast<char*>(p) + row * stride, imitated_tile<tile>()[row], 64);
}

// A bfloat16 as float32. Subnormal numbers are read as 0.
inline float widened(std::uint32_t bits) {
    bits <<= 16;
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <int sums, int a, int b>
inline void dot_bf16() {
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
inline void dot_int8() {
    auto &to = imitated_tile<sums>(), &rows = imitated_tile<a>(), &columns = imitated_tile<b>();
    for (i64 m = 0; m < TILE_ROWS; m++)
        for (i64 k = 0; k < TILE_UNITS; k++)
            for (i64 n = 0; n < TILE_UNITS; n++)
                for (int byte = 0; byte < 32; byte += 8)
                    to[m][n] += static_cast<std::uint32_t>(static_cast<std::int32_t>(rows[m][k] >> byte & 255) * static_cast<std::int8_t>(columns[k][n] >> byte));
}

#endif

}  // namespace whimbrel
