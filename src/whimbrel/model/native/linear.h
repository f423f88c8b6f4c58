// Linear layers: activation(x @ weight.T + bias), with weights packed once.
#pragma once

#include <algorithm>
#include <cmath>

#include "product.h"
#include "team.h"

namespace whimbrel {

enum Kind : int { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, FLOAT16 = 3 };
enum Activation : int { IDENTITY = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SILU = 4 };

constexpr i64 BLOCK_ROWS = 240;  // the most rows that run at once
constexpr i64 BLOCK_BYTES = 3 << 18;  // their units stay in the L2 cache
// Units of a panel that stay in the L1 cache while all rows are multiplied with them. Bits depend on it, as sums of blocks are added. So it
// is not chosen by the cache at run time: cores of one machine may have caches of two sizes.
#ifdef WHIMBREL_TILES
constexpr i64 BLOCK_UNITS = 256;  // where there are tiles, that cache is larger
#elif defined(__AVX512F__)
constexpr i64 BLOCK_UNITS = 128;
#else
constexpr i64 BLOCK_UNITS = 192;
#endif

inline i64 per_unit(int kind) { return kind == INT8 ? 4 : kind == FLOAT32 ? 1 : 2; }

// Units of a packed row: whole tiles are multiplied, where there are any.
inline i64 packed_units(i64 inner, int kind) {
    const i64 units = (inner + per_unit(kind) - 1) / per_unit(kind);
#ifdef WHIMBREL_TILES
    if (kind == BFLOAT16 || kind == INT8) return up_to(units, TILE_UNITS);
#endif
    return units;
}
inline i64 panels_of(i64 columns) { return (columns + PANEL - 1) / PANEL; }

template <bool rough>
inline Floats inverse(Floats x) { return rough ? rough_reciprocal(x) : div(all(1.0f), x); }

template <bool rough>
inline Floats power_of_e(Floats x) { return rough ? rough_power_of_2(mul(x, all(LOG_OF_E))) : exponential(x); }

template <bool rough>
inline Floats logistic(Floats x) { return inverse<rough>(add(all(1.0f), power_of_e<rough>(sub(zero(), x)))); }

// Coefficients of erf(x / sqrt(2)) / 2 = x (c0 + c1 x^2 + c2 x^4 ...) up to 4.27, fitted for the least error of GELU. Beyond, it is above 1/2 and is cut.
constexpr float ERF[] = {3.988192081e-1f, -6.619027257e-2f, 9.718773887e-3f, -1.079076319e-3f, 8.848884318e-5f, -5.147482625e-6f, 1.986139893e-7f, -4.515241958e-9f, 4.546989868e-11f};

inline Floats rough_gelu(Floats x) {
    const Floats square = mul(x, x);
    Floats p = all(ERF[8]);
    for (int i = 7; i >= 0; i--) p = fma(p, square, all(ERF[i]));
    const Floats half_erf = greatest(all(-0.5f), least(all(0.5f), mul(x, p)));
    return mul(x, add(all(0.5f), half_erf));
}

// Coefficients of erf(x / sqrt(2)) / 2 = x (p0 + p1 x^2 + p2 x^4 ...) / (1 + q1 x^2 + q2 x^4 ...), within 3e-7. From 5.3 on it is above 1/2 and is cut.
constexpr float ERF_P[] = {3.989422619e-1f, 3.509965539e-2f, 4.742892925e-3f, 1.796341821e-4f, 6.255896551e-6f, 2.076765071e-8f};
constexpr float ERF_Q[] = {1.0f, 2.546479702e-1f, 2.933116257e-2f, 1.947605633e-3f, 7.617542724e-5f, 1.132025545e-6f};

inline Floats gelu(Floats x) {
    const Floats some = greatest(all(-16.0f), least(all(16.0f), x)), square = mul(some, some);
    Floats p = all(ERF_P[5]), q = all(ERF_Q[5]);
    for (int i = 4; i >= 0; i--) p = fma(p, square, all(ERF_P[i])), q = fma(q, square, all(ERF_Q[i]));
    const Floats half_erf = greatest(all(-0.5f), least(all(0.5f), div(mul(some, p), q)));
    return mul(x, add(all(0.5f), half_erf));
}

// `rough` is for sums or results of 11 bits or fewer: the result is within 1e-4 of its size, and of 1e-4 near 0.
template <int activation, bool rough>
inline Floats activate(Floats x) {
    if constexpr (activation == RELU) return greatest(zero(), x);
    if constexpr (activation == SILU) return mul(x, logistic<rough>(x));
    if constexpr (activation == GELU_TANH) {  // 1 + tanh(z) is twice the logistic function of 2 z
        const Floats inner = mul(x, fma(mul(x, x), all(2.0f * 0.7978845608f * 0.044715f), all(2.0f * 0.7978845608f)));
        return mul(x, logistic<rough>(inner));
    }
    if constexpr (activation == GELU && rough) return rough_gelu(x);
    if constexpr (activation == GELU) return gelu(x);
    return x;
}

// A weight of (columns, inner) numbers. All its arrays are padded to whole panels of columns.
struct Weight {
    const std::uint32_t* units;
    const float* bias;  // or null
    const float* scales;  // int8 and float16: of each column
    const std::int32_t* column_sums;  // int8: of each column
    const float* factors;  // int8: of each inner number, by which x is multiplied first
    i64 inner, columns;
};

template <class D>
inline Floats read_sums(const typename D::Sum* c, const Weight& weight, i64 column, float row_scale, std::int32_t row_zero) {
    if constexpr (D::per_unit == 4) {
        const Ints exact = sub(load_ints(c), mul(all_ints(row_zero), load_ints(weight.column_sums + column)));
        return mul(from_ints(exact), mul(all(row_scale), load(weight.scales + column)));
    } else if constexpr (D::scaled) {
        return mul(load(c), mul(all(row_scale), load(weight.scales + column)));  // either alone may overflow
    } else {
        return load(reinterpret_cast<const float*>(c));
    }
}

template <class D, int activation, class Out>
inline void finish(const typename D::Sum* sums, i64 rows, const Weight& weight, i64 column, const float* row_scales, const std::int32_t* row_zeros, Out* out, i64 out_stride) {
    const i64 width = weight.columns - column < PANEL ? weight.columns - column : PANEL;
    for (i64 r = 0; r < rows; r++) {
        const float scale = D::per_unit == 4 || D::scaled ? row_scales[r] : 0.0f;
        const std::int32_t zero_point = D::per_unit == 4 ? row_zeros[r] : 0;
        for (int j = 0; j < NV; j++) {
            const i64 left = width - j * W;
            if (left <= 0) break;
            Floats x = read_sums<D>(sums + r * PANEL + j * W, weight, column + j * W, scale, zero_point);
            if (weight.bias != nullptr) x = add(x, load(weight.bias + column + j * W));
            x = activate<activation, D::rough || sizeof(Out) == 2>(x);
            if (left >= W) store(out + r * out_stride + j * W, x);
            else store(out + r * out_stride + j * W, x, left);
        }
    }
}

// Write a row as units of float32, bfloat16, float16 or int8. What is beyond its numbers stays.
inline void write_units(InFloat32, const float* x, const Weight& weight, std::uint32_t* units, float*, std::int32_t*) {
    std::memcpy(units, x, sizeof(float) * static_cast<std::size_t>(weight.inner));
}
inline void write_units(InFloat32, const bf16* x, const Weight& weight, std::uint32_t* units, float*, std::int32_t*) {
    for_vectors(weight.inner, [&](i64 k, auto some) { store(reinterpret_cast<float*>(units) + k, load(x + k, some), some); });
}
#ifdef __AVX512BF16__
inline void write_units(InBfloat16, const float* x, const Weight& weight, std::uint32_t* units, float*, std::int32_t*) {
    for_vectors(weight.inner, [&](i64 k, auto some) { store(reinterpret_cast<bf16*>(units) + k, load(x + k, some), some); });
}
inline void write_units(InBfloat16, const bf16* x, const Weight& weight, std::uint32_t* units, float*, std::int32_t*) {
    std::memcpy(units, x, sizeof(bf16) * static_cast<std::size_t>(weight.inner));
}
#endif
#ifdef WHIMBREL_FLOAT16
template <class In>
inline void write_units(InFloat16, const In* x, const Weight& weight, std::uint32_t* units, float* scale, std::int32_t*) {
    const i64 n = weight.inner;
    const float factor = power_to_reach(3, largest_magnitude(x, n));
    *scale = inverse_of_power(factor);
    for_vectors(n, [&](i64 k, auto some) { InFloat16::put(reinterpret_cast<std::uint16_t*>(units) + k, mul(load(x + k, some), all(factor)), some); });
}
#endif
#ifdef WHIMBREL_INT8
// x * factor = scale * (byte - zero point). The row's own scale and zero point make its least number 0 and its largest 255.
template <class In>
inline void write_units(InInt8, const In* x, const Weight& weight, std::uint32_t* units, float* scale, std::int32_t* zero_point) {
    const i64 n = weight.inner;
    const auto scaled = [&](i64 k, auto some) { return mul(load(x + k, some), load(weight.factors + k, some)); };
    Floats low = zero(), high = zero(), total = zero();
    for_vectors(n, [&](i64 k, auto some) {
        const Floats v = scaled(k, some);
        low = least(low, v), high = greatest(high, v);
        total = fma(v, zero(), total);  // NaN if a number is no finite one
    });
    const float least_x = smallest(low), most_x = largest(high), spoiled = sum(total);
    const float step = most_x > least_x ? (most_x - least_x) / 255.0f : 1.0f;
    const float first_byte = std::nearbyint(-least_x / step);
    *scale = step + spoiled;
    *zero_point = static_cast<std::int32_t>(first_byte);
    const Floats inverse = all(1.0f / step), offset = all(first_byte);
    for_vectors(n, [&](i64 k, auto some) {
        const Floats byte = greatest(zero(), least(all(255.0f), add(mul(scaled(k, some), inverse), offset)));
        store_bytes(reinterpret_cast<std::uint8_t*>(units) + k, to_ints(byte), some);
    });
}
#endif

// Function that turns sums into results: `finish` for an activation.
template <class D, class Out>
using Finish = void (*)(const typename D::Sum*, i64, const Weight&, i64, const float*, const std::int32_t*, Out*, i64);

template <class D, class In, class Out>
void linear(Finish<D, Out> finish, const In* x, i64 x_stride, i64 rows, const Weight& weight, Out* out, i64 out_stride) {
    const i64 units = units_for<D>(weight.inner);
    const bool in_place = std::is_same_v<D, InFloat32> && std::is_same_v<In, float> && x_stride % 1024 != 0;
    const i64 packed_stride = up_to(units, 16) + 16, stride = in_place ? x_stride : packed_stride;  // rows that are no multiple of 4 KiB apart share no cache set
    const i64 most = std::clamp(BLOCK_BYTES / 4 / packed_stride / D::block_rows, i64{4}, BLOCK_ROWS / D::block_rows) * D::block_rows;
    const i64 blocks = std::max<i64>(1, (rows + most - 1) / most);  // of even size: each reads all weights
    const i64 block = up_to((rows + blocks - 1) / blocks, D::block_rows);
    auto* packed = static_cast<std::uint32_t*>(scratch<0>(sizeof(std::uint32_t) * static_cast<std::size_t>(in_place ? 0 : stride * block)));
    const std::uint32_t* a = packed;
    float row_scales[BLOCK_ROWS];
    std::int32_t row_zeros[BLOCK_ROWS];
    for (i64 start = 0; start < rows; start += block) {
        const i64 count = std::min(block, rows - start);
        if (in_place) {
            a = reinterpret_cast<const std::uint32_t*>(x + start * x_stride);
        } else {
            for (i64 r = 0; r < count; r++) {
                std::uint32_t* row = packed + r * stride;
                std::fill(row + weight.inner / D::per_unit, row + units, 0u);  // its last unit, and those that fill the last tile
                write_units(D{}, x + (start + r) * x_stride, weight, row, row_scales + r, row_zeros + r);
            }
        }
        auto run_panels = [&](i64 first, i64 last) {
            [[maybe_unused]] typename D::Registers registers;
            auto* sums = static_cast<typename D::Sum*>(scratch<1>(sizeof(typename D::Sum) * PANEL * BLOCK_ROWS));
            for (i64 number = first; number < last; number++) {
                const std::uint32_t* panel = weight.units + number * units * PANEL;
                for (i64 k = 0; k < units; k += BLOCK_UNITS)
                    product<D>(count, a + k, stride, panel + k * PANEL, std::min(BLOCK_UNITS, units - k), sums, PANEL, k == 0);
                const i64 column = number * PANEL;
                finish(sums, count, weight, column, row_scales, row_zeros, out + start * out_stride + column, out_stride);
            }
        };
        in_parallel(panels_of(weight.columns), run_panels);
    }
}

}  // namespace whimbrel
