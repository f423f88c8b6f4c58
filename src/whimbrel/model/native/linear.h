// Linear layers: activation(x @ weight.T + bias), with weights packed once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "product.h"
#include "structs.h"
#include "team.h"

namespace whimbrel {

enum Activation : int { IDENTITY = 0, GELU = 1, GELU_TANH = 2, RELU = 3, SILU = 4 };

constexpr i64 BLOCK_ROWS = 240;       // the most rows that run at once
constexpr i64 BLOCK_BYTES = 3 << 18;  // their units stay in the L2 cache
// Units of a panel that stay in the L1 cache while all rows are multiplied with them. Bits depend on it, as sums of
// blocks are added. So it is not chosen by the cache at run time: cores of one machine may have caches of two sizes.
constexpr i64 BLOCK_UNITS = HAS_TILES ? 256 : L1_UNITS;  // where there are tiles, that cache is larger

inline i64 panels_of(i64 columns) { return (columns + PANEL - 1) / PANEL; }

template <bool rough>
inline Floats inverse(Floats x) {
    return rough ? ApproximateReciprocal(x) : Div(Set(1.0f), x);
}

template <bool rough>
inline Floats power_of_e(Floats x) {
    return rough ? rough_power_of_2(Mul(x, Set(LOG_OF_E))) : exponential(x);
}

template <bool rough>
inline Floats logistic(Floats x) {
    return inverse<rough>(Add(Set(1.0f), power_of_e<rough>(Sub(Zero(), x))));
}

// Coefficients of erf(x / sqrt(2)) / 2 = x (c0 + c1 x^2 + c2 x^4 ...) up to 4.27, fitted for the least error of GELU.
// Beyond, it is above 1/2 and is cut.
constexpr float ERF[] = {3.988192081e-1f,  -6.619027257e-2f, 9.718773887e-3f,  -1.079076319e-3f, 8.848884318e-5f,
                         -5.147482625e-6f, 1.986139893e-7f,  -4.515241958e-9f, 4.546989868e-11f};

inline Floats rough_gelu(Floats x) {
    const Floats square = Mul(x, x);
    Floats p = Set(ERF[8]);
    for (int i = 7; i >= 0; i--) p = MulAdd(p, square, Set(ERF[i]));
    const Floats half_erf = Max(Set(-0.5f), Min(Set(0.5f), Mul(x, p)));
    return Mul(x, Add(Set(0.5f), half_erf));
}

// Coefficients of erf(x / sqrt(2)) / 2 = x (p0 + p1 x^2 + p2 x^4 ...) / (1 + q1 x^2 + q2 x^4 ...), within 3e-7.
// From 5.3 on it is above 1/2 and is cut.
constexpr float ERF_P[] = {3.989422619e-1f, 3.509965539e-2f, 4.742892925e-3f,
                           1.796341821e-4f, 6.255896551e-6f, 2.076765071e-8f};
constexpr float ERF_Q[] = {1.0f, 2.546479702e-1f, 2.933116257e-2f, 1.947605633e-3f, 7.617542724e-5f, 1.132025545e-6f};

inline Floats gelu(Floats x) {
    const Floats some = Max(Set(-16.0f), Min(Set(16.0f), x)), square = Mul(some, some);
    Floats p = Set(ERF_P[5]), q = Set(ERF_Q[5]);
    for (int i = 4; i >= 0; i--) p = MulAdd(p, square, Set(ERF_P[i])), q = MulAdd(q, square, Set(ERF_Q[i]));
    const Floats half_erf = Max(Set(-0.5f), Min(Set(0.5f), Div(Mul(some, p), q)));
    return Mul(x, Add(Set(0.5f), half_erf));
}

// `rough` is for sums or results of 11 bits or fewer: the result is within 1e-4 of its size, and of 1e-4 near 0.
template <int activation, bool rough>
inline Floats activate(Floats x) {
    if constexpr (activation == RELU) return Max(Zero(), x);
    if constexpr (activation == SILU) return Mul(x, logistic<rough>(x));
    if constexpr (activation == GELU_TANH) {  // 1 + tanh(z) is twice the logistic function of 2 z
        const Floats inner =
            Mul(x, MulAdd(Mul(x, x), Set(2.0f * 0.7978845608f * 0.044715f), Set(2.0f * 0.7978845608f)));
        return Mul(x, logistic<rough>(inner));
    }
    if constexpr (activation == GELU && rough) return rough_gelu(x);
    if constexpr (activation == GELU) return gelu(x);
    return x;
}

template <class D>
inline Floats read_sums(const typename D::Sum* c, const Weight& weight, i64 column, float row_scale, i32 row_zero) {
    if constexpr (D::per_unit == 4) {
        const Ints exact = Sub(LoadU(c), Mul(Set(row_zero), LoadU(weight.column_sums + column)));
        return Mul(ConvertToFloats(exact), Mul(Set(row_scale), LoadU(weight.scales + column)));
    } else if constexpr (D::scaled) {
        return Mul(LoadU(c), Mul(Set(row_scale), LoadU(weight.scales + column)));  // either alone may overflow
    } else {
        return LoadU(reinterpret_cast<const float*>(c));
    }
}

template <class D, int activation, class Out>
inline void finish(const typename D::Sum* sums, i64 rows, const Weight& weight, i64 column, const float* row_scales,
                   const i32* row_zeros, Out* out, i64 out_stride) {
    constexpr bool rough = D::rough || sizeof(Out) == 2;
    const i64 width = weight.columns - column < PANEL ? weight.columns - column : PANEL;
    for (i64 r = 0; r < rows; r++) {
        const float scale = D::per_unit == 4 || D::scaled ? row_scales[r] : 0.0f;
        const i32 zero_point = D::per_unit == 4 ? row_zeros[r] : 0;
        for (int j = 0; j < NV; j++) {
            const i64 left = width - j * W;
            if (left <= 0) break;
            Floats x = read_sums<D>(sums + r * PANEL + j * W, weight, column + j * W, scale, zero_point);
            if (weight.bias != nullptr) x = Add(x, LoadU(weight.bias + column + j * W));
            x = activate<activation, rough>(x);
            if (left >= W) StoreU(x, out + r * out_stride + j * W);
            else StoreN(x, out + r * out_stride + j * W, left);
        }
    }
}

// Write a row as units of D. Numbers beyond its own stay.
template <class D, class In>
inline void write_units(D, const In* x, const Weight& weight, u32* units, float* scale, i32*) {
    auto* numbers = reinterpret_cast<typename D::Number*>(units);
    const i64 n = weight.inner;
    if constexpr (std::is_same_v<In, typename D::Number>) {
        std::memcpy(numbers, x, sizeof(In) * static_cast<std::size_t>(n));
    } else {
        const float factor = D::scaled ? power_to_reach(3, largest_magnitude(x, n)) : 1.0f;
        if constexpr (D::scaled) *scale = inverse_of_power(factor);
        for_vectors(n, [&](i64 k, auto some) {
            const Floats in = LoadN(x + k, some);
            StoreN(D::scaled ? Mul(in, Set(factor)) : in, numbers + k, some);
        });
    }
}
// x * factor = scale * (byte - zero point). The row's own scale and zero point make its least number 0 and its largest
// 255.
template <class In>
inline void write_units(InInt8, const In* x, const Weight& weight, u32* units, float* scale, i32* zero_point) {
    const i64 n = weight.inner;
    const auto scaled = [&](i64 k, auto some) { return Mul(LoadN(x + k, some), LoadN(weight.factors + k, some)); };
    Floats low = Zero(), high = Zero(), total = Zero();
    for_vectors(n, [&](i64 k, auto some) {
        const Floats v = scaled(k, some);
        low = Min(low, v), high = Max(high, v);
        total = MulAdd(v, Zero(), total);  // NaN if a number is no finite one
    });
    const float least_x = ReduceMin(low), most_x = ReduceMax(high), spoiled = ReduceSum(total);
    const float step = most_x > least_x ? (most_x - least_x) / 255.0f : 1.0f;
    const float first_byte = std::nearbyint(-least_x / step);
    *scale = step + spoiled;
    *zero_point = static_cast<i32>(first_byte);
    const Floats inverse = Set(1.0f / step), offset = Set(first_byte);
    for_vectors(n, [&](i64 k, auto some) {
        const Floats byte = Max(Zero(), Min(Set(255.0f), Add(Mul(scaled(k, some), inverse), offset)));
        TruncateStoreN(NearestInts(byte), reinterpret_cast<u8*>(units) + k, some);
    });
}

// Function that turns sums into results: `finish` for an activation.
template <class D, class Out>
using Finish = void (*)(const typename D::Sum*, i64, const Weight&, i64, const float*, const i32*, Out*, i64);

template <class D, class In, class Out>
void linear(Finish<D, Out> finish, const In* x, i64 x_stride, i64 rows, const Weight& weight, Out* out,
            i64 out_stride) {
    const i64 units = units_for<D>(weight.inner);
    const bool in_place = std::is_same_v<D, InFloat32> && std::is_same_v<In, float> && x_stride % 1024 != 0;
    const i64 packed_stride = up_to(units, 16) + 16;  // rows that are no multiple of 4 KiB apart share no cache set
    const i64 stride = in_place ? x_stride : packed_stride;
    const i64 most =
        std::clamp(BLOCK_BYTES / 4 / packed_stride / ROW_STEP<D>, i64{4}, BLOCK_ROWS / ROW_STEP<D>) * ROW_STEP<D>;
    const i64 blocks = std::max<i64>(1, (rows + most - 1) / most);  // of even size: each reads all weights
    const i64 block = up_to((rows + blocks - 1) / blocks, ROW_STEP<D>);
    auto* packed = static_cast<u32*>(scratch<0>(sizeof(u32) * static_cast<std::size_t>(in_place ? 0 : stride * block)));
    const u32* a = packed;
    float row_scales[BLOCK_ROWS];
    i32 row_zeros[BLOCK_ROWS];
    for (i64 start = 0; start < rows; start += block) {
        const i64 count = std::min(block, rows - start);
        if (in_place) {
            a = reinterpret_cast<const u32*>(x + start * x_stride);
        } else {
            for (i64 r = 0; r < count; r++) {
                u32* row = packed + r * stride;
                // Its last unit, and those that fill the last tile.
                std::fill(row + weight.inner / D::per_unit, row + units, 0u);
                write_units(D{}, x + (start + r) * x_stride, weight, row, row_scales + r, row_zeros + r);
            }
        }
        auto run_panels = [&](i64 first, i64 last) {
            [[maybe_unused]] typename Tiling<D>::Registers registers;
            auto* sums = static_cast<typename D::Sum*>(scratch<1>(sizeof(typename D::Sum) * PANEL * BLOCK_ROWS));
            for (i64 number = first; number < last; number++) {
                const u32* panel = weight.units + number * units * PANEL;
                for (i64 k = 0; k < units; k += BLOCK_UNITS)
                    product<D>(count, a + k, stride, panel + k * PANEL, std::min(BLOCK_UNITS, units - k), sums, PANEL,
                               k == 0);
                const i64 column = number * PANEL;
                finish(sums, count, weight, column, row_scales, row_zeros, out + start * out_stride + column,
                       out_stride);
            }
        };
        in_parallel(panels_of(weight.columns), run_panels);
    }
}

// Pack a weight of (columns, inner) float32. `units` holds padded columns * padded units; `scales`, for int8 and
// float16, and `column_sums`, for int8, one number for each padded column.
template <class D>
void pack(const float* weight, i64 columns, i64 inner, u32* units, [[maybe_unused]] float* scales,
          [[maybe_unused]] i32* column_sums) {
    using Number = typename D::Number;
    const i64 num_units = units_for<D>(inner);
    std::memset(units, 0, sizeof(u32) * static_cast<std::size_t>(num_units * PANEL * panels_of(columns)));
    for (i64 column = 0; column < columns; column++) {
        const float* in = weight + column * inner;
        u32* out = units + column / PANEL * num_units * PANEL + column % PANEL;
        const auto number = [&](i64 k) {
            return reinterpret_cast<Number*>(out + k / D::per_unit * PANEL) + k % D::per_unit;
        };
        if constexpr (D::kind == INT8) {
            float most = 0.0f;
            for (i64 k = 0; k < inner; k++) most = std::max(most, std::fabs(in[k]));
            const float step = most > 0.0f ? most / 127.0f : 1.0f;
            scales[column] = step;
            column_sums[column] = 0;
            for (i64 k = 0; k < inner; k++) {
                const auto byte = static_cast<Number>(std::nearbyint(in[k] / step));
                *number(k) = byte;
                column_sums[column] += byte;
            }
        } else if constexpr (D::kind == FLOAT32) {
            for (i64 k = 0; k < inner; k++) std::memcpy(number(k), in + k, sizeof(float));
        } else {
            const float factor = D::scaled ? power_to_reach(3, largest_magnitude(in, inner)) : 1.0f;
            if constexpr (D::scaled) scales[column] = 1.0f / factor;
            for (i64 k = 0; k < inner; k++) StoreN(Set(D::scaled ? in[k] * factor : in[k]), number(k), 1);
        }
    }
}

}  // namespace whimbrel
