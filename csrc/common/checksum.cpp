#include "common/checksum.h"

#include "common/hash.h"

namespace equipoise {
namespace {

// Reads byte by byte, so that neither alignment nor the byte order of the machine matters.
// Compilers turn it into one load.
std::uint32_t word_at(const std::uint8_t* p) {
    return static_cast<std::uint32_t>(p[0]) | static_cast<std::uint32_t>(p[1]) << 8 |
           static_cast<std::uint32_t>(p[2]) << 16 | static_cast<std::uint32_t>(p[3]) << 24;
}

}  // namespace

std::uint64_t checksum(Span<const std::uint8_t> bytes) {
    const std::size_t words = bytes.size / 4;
    std::uint64_t sum = mix64(~static_cast<std::uint64_t>(bytes.size));
    std::uint64_t position = kStep64;
    for (std::size_t i = 0; i < words; ++i, position += kStep64)
        sum += mix64(word_at(bytes.data + 4 * i) + position);
    if (bytes.size % 4 == 0) return sum;
    std::uint8_t tail[4] = {0, 0, 0, 0};
    for (std::size_t i = 4 * words; i < bytes.size; ++i) tail[i % 4] = bytes[i];
    return sum + mix64(word_at(tail) + position);
}

}  // namespace equipoise
