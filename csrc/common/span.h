// A view of consecutive values that another object owns, and the integers that the core computes
// in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace equipoise {

// std::span would do, but the core builds as C++17.
template <typename T>
struct Span {
    T* data;
    std::size_t size;

    T& operator[](std::size_t i) const { return data[i]; }
    T* begin() const { return data; }
    T* end() const { return data + size; }
};

using Ids = Span<const std::int32_t>;
using Counts = Span<const std::int64_t>;

// Shares are integers with this denominator: every rank has to get the same shares bit for bit, on
// any processor and with any compiler, which sums of floats do not promise.
constexpr std::int32_t kShareOne = 1 << 16;

// Largest sum of the token counts of a layer. Loads are tokens << 16, so that a load divides into
// shares without a remainder: this bound keeps them below 2^62, and the sum of two of them in 64
// bits.
constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 46) - 1;

}  // namespace equipoise
