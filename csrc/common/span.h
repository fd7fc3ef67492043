// A run of values that someone else owns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace equipoise {

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

// A share of one: shares are integers with this denominator.
constexpr std::int32_t kShareOne = 1 << 16;

// The largest sum of token counts per layer: loads are tokens << 16 in 64 bits.
constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 46) - 1;

}  // namespace equipoise
