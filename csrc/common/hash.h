// Hash functions of 32 and 64 bits. `hal/routing.py` and `hal/checksum.py` define them for every
// backend, and kernels reproduce them bit for bit: a constant here changes only with the contract.
// The multipliers are our own: the best of a random search by worst avalanche bias (below 0.004
// over 300 000 samples for the mixer of 32 bits, which is the noise of the measurement).
#pragma once

#include <cstdint>

namespace equipoise {

constexpr std::uint32_t kStep32 = 0x9E3779B9u;          // 2^32 / golden ratio
constexpr std::uint64_t kStep64 = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, odd

// Every step can be undone (an xor with a shift, a product with an odd number), so two words never
// become one.
inline std::uint32_t finalise32(std::uint32_t x) {
    x ^= x >> 16;
    x *= 0x99F0736Bu;
    x ^= x >> 15;
    x *= 0xCEDA5629u;
    return x ^ (x >> 16);
}

// The constant keeps a state and a word of zeros from staying zero.
inline std::uint32_t absorb32(std::uint32_t state, std::uint32_t word) {
    return finalise32((state ^ word) + kStep32);
}

// The part of mix32(index, rank, layer, step) that all elements of a batch have in common. A router
// computes it once per batch, and absorbs one word per element.
inline std::uint32_t seed32(std::uint32_t rank, std::uint32_t layer, std::uint32_t step) {
    return absorb32(absorb32(absorb32(0, step), layer), rank);
}

// Absorbs step, layer, rank, index in this order: what changes most often comes last.
inline std::uint32_t mix32(std::uint32_t index, std::uint32_t rank, std::uint32_t layer,
                           std::uint32_t step) {
    return absorb32(seed32(rank, layer, step), index);
}

// Where the window of a hashed routing pass begins in the sequence of draws: one of 2^18 places, so
// that a device can keep the whole sequence as a table (docs/design/routing-and-shares.md).
inline std::uint32_t window_begin(std::uint32_t rank, std::uint32_t layer, std::uint32_t step) {
    return mix32(0, rank, layer, step) & ((1u << 18) - 1);
}

inline std::uint64_t mix64(std::uint64_t x) {
    x ^= x >> 32;
    x *= 0xC92A4895548C7445u;
    x ^= x >> 29;
    x *= 0xB33D02297CFAF58Du;
    return x ^ (x >> 32);
}

}  // namespace equipoise
