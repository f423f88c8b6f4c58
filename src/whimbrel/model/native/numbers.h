// Numbers that products multiply, and what a backend says of them.
//
// Along the inner dimension of a product numbers lie in units of 4 bytes: a float32, two bfloat16 or float16, or four
// int8. The structs are tags: a backend overloads the operations of products for those that its instruction set
// multiplies.
#pragma once

#include <cstdint>
#include <limits>

namespace whimbrel {

using i32 = std::int32_t;
using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;

// The bits of a bfloat16 and of a float16.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

constexpr i64 up_to(i64 n, i64 step) { return (n + step - 1) / step * step; }

enum Kind : int { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, FLOAT16 = 3 };

struct InFloat32 {
    using Number = float;  // as it lies in a unit
    using Sum = float;     // as it lies in memory
    static constexpr Sum least_sum = -std::numeric_limits<float>::infinity();
    static constexpr Kind kind = FLOAT32;
    static constexpr int per_unit = 1;
    static constexpr i64 most_units = i64{1} << 40;  // that one sum may hold
    static constexpr bool scaled = false;  // whether rows and columns are multiplied with powers of 2 of their own
    static constexpr bool rough = false;   // whether sums are less exact than float32
};

struct InBfloat16 : InFloat32 {
    using Number = bf16;
    static constexpr Kind kind = BFLOAT16;
    static constexpr int per_unit = 2;
};

// Sums of up to 64 products are float16, those of more are float32. Nothing overflows. Both sides of linear layers are
// at most 16 after their powers of 2. The sides of attention are at most 16 and at most 31.875, so that both sums of a
// total are at most 32752.
struct InFloat16 : InFloat32 {
    using Number = f16;
    static constexpr Kind kind = FLOAT16;
    static constexpr int per_unit = 2;
    static constexpr i64 most_units = 64;
    static constexpr bool scaled = true, rough = true;
};

// InFloat16 for products of up to `most_units`: their sums stay float16.
struct InFloat16Alone : InFloat16 {
    using Sum = f16;
    static constexpr Sum least_sum{0xfc00};
};

struct InInt8 : InFloat32 {
    using Number = std::int8_t;
    using Sum = i32;
    static constexpr Kind kind = INT8;
    static constexpr int per_unit = 4;
    static constexpr bool rough = true;
};

// True if the instruction set multiplies these numbers. A backend says so where it has `Dot` for them.
template <class D>
constexpr bool HAS = false;
template <>
inline constexpr bool HAS<InFloat32> = true;

// Blocks in which an instruction multiplies these numbers, where it multiplies more than vectors (amx.h).
template <class D>
struct Tiling {
    struct Registers {};                       // that are taken while products run
    static constexpr i64 rows = 0, units = 1;  // of a block; rows and sums are padded to whole blocks in memory
};

constexpr int LINE = 16;  // units of a cache line
constexpr int NV = 2;     // vectors of a panel
constexpr int FETCH_AHEAD =
    1024;  // units of a panel ahead that are fetched: 4 KiB, as the processor does not foresee across pages

// Stands for W where a number of elements is asked for: no mask is made.
struct Whole {};

}  // namespace whimbrel
