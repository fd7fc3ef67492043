// A fingerprint of bytes that sees values and positions.
#pragma once

#include "common/span.h"

namespace equipoise {

// Sum modulo 2^64 over the little-endian 32-bit words w_i (the tail padded with zeros) of
// mix64(w_i + (i + 1) * kStep64), plus mix64(~length). A sum, so that any order and any number
// of workers gives the same value.
std::uint64_t checksum(Span<const std::uint8_t> bytes);

}  // namespace equipoise
