// A checksum that depends on the values of bytes and on their positions.
#pragma once

#include "common/span.h"

namespace equipoise {

// Sum modulo 2^64 over the little-endian 32-bit words w_i (the tail padded with zeros) of
// mix64(w_i + (i + 1) * kStep64), plus mix64(~length). A sum, so that threads
// and kernels may add the words in any order; with the length, so that bytes and the same bytes
// padded with zeros differ.
std::uint64_t checksum(Span<const std::uint8_t> bytes);

}  // namespace equipoise
