#include "reduce.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "types.h"

namespace npusim::hccl {
namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds `bits` to a multiple of 2^dropped, to nearest, ties to even; without those lowest bits.
uint32_t rounded(uint32_t bits, int dropped) {
  return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
}

struct Bf16 {
  using Stored = uint16_t;
  static float load(uint16_t stored) { return float_of(static_cast<uint32_t>(stored) << 16); }
  static uint16_t store(float value) {
    if (std::isnan(value)) return 0x7FC0;
    return static_cast<uint16_t>(rounded(bits_of(value), 16));
  }
};

struct Fp16 {
  using Stored = uint16_t;
  static float load(uint16_t stored) {
    const uint32_t sign = (stored & 0x8000u) << 16;
    const uint32_t rest = stored & 0x7FFFu;
    if (rest < 0x0400u) return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
    if (rest >= 0x7C00u) return float_of(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    return float_of(sign | ((rest << 13) + (112u << 23)));
  }
  static uint16_t store(float value) {
    const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
    const float size = std::fabs(value);
    if (std::isnan(value)) return 0x7E00;
    if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00u);
    // Below the smallest normal number a float's own rounding does it, at a place where its last
    // bit counts as 2^-24.
    const uint32_t small = bits_of(size + 0.5f) - bits_of(0.5f);
    if (size < 0x1p-14f) return static_cast<uint16_t>(sign | small);
    return static_cast<uint16_t>(sign | rounded(bits_of(size) - (112u << 23), 13));
  }
};

template <typename Number>
struct Plain {
  using Stored = Number;
  static Number load(Number stored) { return stored; }
  static Number store(Number value) { return value; }
};

template <typename Number>
Number sum(Number a, Number b) {
  if constexpr (std::is_integral_v<Number>) {
    return static_cast<Number>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

template <typename Number>
Number product(Number a, Number b) {
  if constexpr (std::is_integral_v<Number>) {
    return static_cast<Number>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

template <typename Number>
Number largest(Number a, Number b) {
  return b > a || b != b ? b : a;
}

template <typename Number>
Number smallest(Number a, Number b) {
  return b < a || b != b ? b : a;
}

template <typename Format, typename Function>
void each(uint8_t* into, const uint8_t* from, size_t bytes, Function function) {
  using Stored = typename Format::Stored;
  for (size_t at = 0; at < bytes; at += sizeof(Stored)) {
    Stored a;
    Stored b;
    memcpy(&a, into + at, sizeof(a));
    memcpy(&b, from + at, sizeof(b));
    a = Format::store(function(Format::load(a), Format::load(b)));
    memcpy(into + at, &a, sizeof(a));
  }
}

template <typename Format>
void combine_as(int32_t reduction, uint8_t* into, const uint8_t* from, size_t bytes) {
  using Number = decltype(Format::load({}));
  if (reduction == kSum) return each<Format>(into, from, bytes, sum<Number>);
  if (reduction == kProd) return each<Format>(into, from, bytes, product<Number>);
  if (reduction == kMax) return each<Format>(into, from, bytes, largest<Number>);
  each<Format>(into, from, bytes, smallest<Number>);
}

}  // namespace

void combine(int32_t type, int32_t reduction, uint8_t* into, const uint8_t* from, size_t bytes) {
  switch (type) {
    case kInt8:
      return combine_as<Plain<int8_t>>(reduction, into, from, bytes);
    case kInt16:
      return combine_as<Plain<int16_t>>(reduction, into, from, bytes);
    case kInt32:
      return combine_as<Plain<int32_t>>(reduction, into, from, bytes);
    case kInt64:
      return combine_as<Plain<int64_t>>(reduction, into, from, bytes);
    case kFp16:
      return combine_as<Fp16>(reduction, into, from, bytes);
    case kBf16:
      return combine_as<Bf16>(reduction, into, from, bytes);
    default:
      return combine_as<Plain<float>>(reduction, into, from, bytes);
  }
}

}  // namespace npusim::hccl
